"""What a step of an engine costs: Llama-3.1-8B in bfloat16 on one H200.

Fitted to measurements. 1, 32, 64, 128 and 256 decodes take 4.3, 5.5, 6.8, 9.3 and 15.2 ms. Prompts of 2,000
and 8,000 tokens take 48 and 203 to 210 ms. Chunks of 256 and 512 tokens of a prompt of 4,000 take 9.8 and
16.9 ms, with one decode. A prompt of 8,000 tokens, in chunks of about 300 beside decodes, adds 158 ms to
their steps.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

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
DOUBLES_AT = ROW_SECONDS / PAIR_SECONDS
"""As an engine reports it: from the cost of a position beside that of a pair of positions."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a GPU, beside the 8B model on an H200.

    Attributes:
        weights: how many times as long a step takes for the weights: to read them, and to multiply by them.
        attention: the same for attention.
        memory: how many times as many positions of KV it has room for.
    """

    weights: float = 1.0
    attention: float = 1.0
    memory: float = 1.0


H200_8B = Machine()
HALF_32B = Machine(8.0, 4.0, 0.25)
"""A GPU half as fast with a model four times as large, which has twice as many layers."""


def step_seconds(
    decodes: int, context: float, chunks: Iterable[tuple[int, int]], machine: Machine = H200_8B
) -> float:
    """Seconds of a step on the device.

    `context`: positions of all decodes. `chunks`: (tokens, position of the first token) of each chunk."""
    tokens, seconds = 0, context * DECODE_SECONDS
    for count, start in chunks:
        tokens += count
        seconds += count * (start + count / 2) * (SMALL_PAIR_SECONDS if count < SMALL else PAIR_SECONDS)
    rows = tokens + decodes
    if tokens and rows <= GRAPH_ROWS[-1]:
        rows = GRAPH_ROWS[bisect_left(GRAPH_ROWS, rows)]
    seconds = machine.attention * (seconds + MIXED_SECONDS if tokens and decodes else seconds)
    reading = READ_SECONDS + rows * (CHUNK_ROW_SECONDS if tokens else DECODE_ROW_SECONDS)
    return seconds + machine.weights * max(reading, PRODUCTS_SECONDS + ROW_SECONDS * rows)
