"""What a step of an engine costs, and what else a simulated worker has.

`step_seconds` is Llama-3.1-8B in bfloat16 on one H200, fitted to measurements. 1, 32, 64, 128 and 256
decodes take 4.3, 5.5, 6.8, 9.3 and 15.2 ms. Prompts of 2,000 and 8,000 tokens take 48 and 203 to 210 ms.
Chunks of 256 and 512 tokens of a prompt of 4,000 take 9.8 and 16.9 ms, with one decode. A prompt of 8,000
tokens, in chunks of about 300 beside decodes, adds 158 ms to their steps.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from baton.simulator.copies import CopyRoom
from baton.steps.step_model import StepModel

GRAPH_ROWS = (
    *range(16, 128, 16), *range(128, 256, 32), 256, 320, 384, 432, 480, *range(512, 2048, 128), 2048,
)  # fmt: skip
"""Rows of the graphs with chunks of prompts. A smaller step is padded to the next one. A larger one has no
graph."""

READ_SECONDS = 4.3e-3
"""To read the weights and to launch the step."""
DECODE_ROW_SECONDS = 6e-6
"""Added by each row while the time to read the weights is the limit, in a step that only decodes."""
CHUNK_ROW_SECONDS = 13e-6
"""The same in a step with chunks of prompts."""
ROW_SECONDS = 22.6e-6
"""Added by each row if matrix products are the limit. Products also have the fixed cost below."""
PRODUCTS_SECONDS = 0.9e-3
MIXED_SECONDS = 0.4e-3
"""A step with decodes and chunks runs two kinds of attention. This is the cost of the second one."""
DECODE_SECONDS = 0.0305e-6
"""For each position that the attention of a decode reads."""
PAIR_SECONDS = 0.78e-9
"""For each pair of positions in the attention of a prompt."""
SMALL_PAIR_SECONDS = 1.2e-9
"""The same for a chunk of fewer than `SMALL` tokens. It does not occupy all multiprocessors."""
SMALL = 1_024
LAYERS = 32
KV_TOKEN_BYTES = LAYERS * 2 * 8 * 128 * 2
DOUBLES_AT = ROW_SECONDS / PAIR_SECONDS
"""As an engine reports it: from the cost of a position beside that of a pair of positions."""


POSITIONS = 6_888 * 128
"""Of KV that a worker with the 8B model has room for."""

Chunks = Sequence[tuple[int, int]]
"""(tokens, position of the first token) of each chunk of a prompt."""


def padded(rows: int) -> int:
    """Rows that a step with chunks of prompts computes for so many rows."""
    return GRAPH_ROWS[bisect_left(GRAPH_ROWS, rows)] if rows <= GRAPH_ROWS[-1] else rows


def step_seconds(
    decodes: int, context: float, chunks: Chunks, weights: float = 1.0, attention: float = 1.0
) -> float:
    """Seconds of a step on the device.

    `context`: positions of all decodes. `weights`: how many times as long a step takes for the weights: to
    read them, and to multiply by them. `attention`: the same for attention."""
    tokens, seconds = 0, context * DECODE_SECONDS
    for count, start in chunks:
        tokens += count
        seconds += count * (start + count / 2) * (SMALL_PAIR_SECONDS if count < SMALL else PAIR_SECONDS)
    rows = tokens + decodes
    if tokens:
        rows = padded(rows)
    seconds = attention * (seconds + MIXED_SECONDS if tokens and decodes else seconds)
    reading = READ_SECONDS + rows * (CHUNK_ROW_SECONDS if tokens else DECODE_ROW_SECONDS)
    return seconds + weights * max(reading, PRODUCTS_SECONDS + ROW_SECONDS * rows)


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a GPU.

    Attributes:
        step: seconds of a step, with the arguments of `step_seconds`.
        positions: of KV that it has room for.
        doubles_at: the position of a prompt whose token costs twice as much as the first one.
        layers: of the model.
        copies: of states that it has room for. None: the model has no states.
        link: KV of tokens that it sends, and that come, in a second.
        rows: most tokens of a step. Engines of SGLang do without a graph.
        ahead: whether a step is scheduled when the one before begins. If not, it is scheduled when that is
            nearly over, and ends soon after a request from another worker may join.
    """

    step: Callable[[int, float, Chunks], float]
    positions: int
    doubles_at: float
    layers: int = LAYERS
    copies: CopyRoom | None = None
    rows: int = 1 << 30
    ahead: bool = False
    link: float = math.inf


def _beside_8b(weights: float, attention: float, memory: float) -> Machine:
    """How many times as long steps take for weights and attention, and how much more memory there is."""
    step = partial(step_seconds, weights=weights, attention=attention)
    return Machine(step, int(memory * POSITIONS), DOUBLES_AT * weights / attention)


H200_8B = _beside_8b(1.0, 1.0, 1.0)
HALF_32B = _beside_8b(8.0, 4.0, 0.25)
"""A GPU half as fast with a model four times as large, which has twice as many layers."""


VLLM_DECODES = 1.13
"""How many times as long steps that only decode take with vLLM 0.26: 1.12 for 1 to 256 decodes of one engine,
1.13 to 1.15 in workers under load. Steps with prompts take 1.00 to 1.04 (H200, 8B)."""


@cache
def of_vllm(machine: Machine) -> Machine:
    """The machine with vLLM in place of Baton's engine. It computes no part of a split prompt. Its largest
    graph has 512 rows, and no step of a worker has more."""
    return replace(machine, step=partial(_vllm_step, machine.step), doubles_at=0.0, rows=512, ahead=True)


def _vllm_step(
    step: Callable[[int, float, Chunks], float], decodes: int, context: float, chunks: Chunks
) -> float:
    return step(decodes, context, chunks) * (1.0 if chunks else VLLM_DECODES)


def modelled(
    model: StepModel,
    positions: int,
    doubles_at: float,
    row_seconds: float,
    small: float = SMALL_PAIR_SECONDS / PAIR_SECONDS,
    *,
    layers: int,
    copies: CopyRoom | None,
) -> Machine:
    """The machine whose steps cost what a model says. `row_seconds`: that each decode adds for its states.
    `small`: how many times as long a pair takes in a chunk of fewer than `SMALL` tokens. `layers`,
    `copies`: as in `Machine`."""
    return Machine(partial(_modelled_step, model, row_seconds, small), positions, doubles_at, layers, copies)


def _modelled_step(
    model: StepModel, row_seconds: float, small: float, decodes: int, context: float, chunks: Chunks
) -> float:
    """The model was measured with rows that fill a graph. Others are padded, without more attention."""
    seconds = decodes * row_seconds
    tokens = sum(count for count, _ in chunks)
    if not tokens:
        return seconds + model.decode(decodes, context) if decodes else 0.0
    position = sum(count * (start + count / 2) for count, start in chunks) / tokens - tokens / 2
    pairs = sum(count * (start + count / 2) for count, start in chunks if count < SMALL)
    seconds += model.step(decodes, context, tokens, position)
    seconds += pairs * model.pair_seconds * (small - 1)
    computed = padded(decodes + tokens) - decodes
    if computed == tokens:
        return seconds
    return seconds + model.step(decodes, 0.0, computed) - model.step(decodes, 0.0, tokens)
