"""Makes the model of steps of a worker (`steps.step_model`), from measurements of one model on one GPU.

The times of `bench.engine` are of a few sizes. Between and beyond these, steps are like those of the
simulator (`simulator.steps`), times the ratio at the measured sizes. Times of another model are scaled:

- matrix products: by the number of their parameters. Of a mixture of experts, a step reads the experts that
  its tokens are expected to choose, and computes with the active parameters
- prefill attention: by layers × heads × head size, and by the keys in the span of each layer
- decode attention: by the bytes of KV that it reads, in the span of each layer
- several GPUs: each computes its share. Then two all-reduces in each layer, as measured on two GPUs

This works for a model of similar width. A much smaller model is bound by kernel launches, so it is slower
than the estimate.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch

from baton.cluster.model import reach_hub, resolve
from baton.cluster.options.optimize import HOST_PART
from baton.cluster.tools.sizing import ENCODE_TOKEN_SECONDS, MODELS, STEP_MODEL
from baton.engine.api.config import EngineConfig
from baton.engine.execution.cache_limits import STEP_BYTES, TOKENS_BESIDE_STATES, TOKENS_OF_WINDOW
from baton.engine.execution.memory_sizing import COPY_SHARE, COPY_TOKENS
from baton.engine.layers.weights import Checkpoint, PlainFormat
from baton.engine.loader import open_checkpoint
from baton.engine.loader.families import cache_spec
from baton.engine.loader.hf import DummyCheckpoint
from baton.engine.loader.hf_config import model_config_from_hf
from baton.engine.model_config import ModelConfig, Span
from baton.engine.models import (
    attention_caches,
    cache_bytes_per_token,
    state_bytes_per_request,
    windows_of,
)
from baton.kv_names.cache_kinds import window_blocks
from baton.router.text.model_files import locate
from baton.simulator.copies import CopyRoom
from baton.simulator.step_worker import measured as measured_steps
from baton.simulator.steps import H200_8B, Machine, modelled, padded
from baton.steps.step_model import StepModel, interpolated

CPU = torch.device("cpu")
ELEMENT_BYTES = 2  # bfloat16
BLOCK = 128  # positions of a block on a GPU
CONTEXT = 1064  # tokens per request in the measured decode steps


@dataclass(frozen=True)
class Gpu:
    """Measured speeds of a GPU.

    Attributes:
        memory: bytes.
        host_memory: bytes that its machine has left, for each of its GPUs.
        kv_bytes_per_s: KV bytes per second that decode attention reads.
        decode: batch size -> seconds of a step with `CONTEXT` tokens per request, ascending.
        prefill: prompt tokens -> seconds of one prompt alone, ascending; two or more entries.
        all_reduce: rows of the reference model -> seconds of an all-reduce over two GPUs, ascending.
        source: where `decode` and `prefill` were measured, for people.
        planned: they were measured with the model that is planned, and not with `REFERENCE`.
        steps: the model that an engine measured there when it started. None: not known.
        encode_token_seconds: of images, for each of their tokens, as that engine measured it. 0: not known.
    """

    memory: int
    host_memory: int
    kv_bytes_per_s: float
    decode: dict[int, float]
    prefill: dict[int, float]
    all_reduce: dict[int, float]
    source: str
    planned: bool = False
    steps: StepModel | None = None
    encode_token_seconds: float = 0.0


REFERENCE = model_config_from_hf(MODELS["llama-3.1-8b"], {}, "llama-3.1-8b")
H200 = Gpu(
    memory=139 << 30,
    host_memory=128 << 30,
    kv_bytes_per_s=4.3e12,
    decode={1: 4.35e-3, 8: 4.58e-3, 32: 5.51e-3, 64: 6.91e-3, 128: 9.31e-3, 256: 15.55e-3},
    prefill={2000: 50.3e-3, 8000: 212.4e-3, 32000: 1199e-3},
    all_reduce={1: 6.3e-6, 8: 6.7e-6, 64: 7.6e-6, 256: 12.9e-6, 2000: 56e-6, 8000: 208e-6},
    source="Llama-3.1-8B in bfloat16 on one H200, the mean of up to four runs",
)
SHAPE = measured_steps(H200_8B)
"""Of `REFERENCE`, for the sizes that were not measured."""


def measured(gpu: Gpu, file: Path) -> Gpu:
    """`gpu` with the speeds in a report of `python -m baton.bench.engine --json FILE`.

    Rows of Llama-3.1-8B are named `engine.decode.b1`. Others, such as `engine.moe.decode.b1`, must be of the
    model that is planned.

    Raises ValueError for another file.
    """
    try:
        report = json.loads(file.read_text())
        rows = {row["name"]: row["value"] / 1e3 for row in report["results"]}
        detail = report.get("detail", {})
        steps = _step_model(detail.get(STEP_MODEL))
        encode_token_seconds = float(detail.get(ENCODE_TOKEN_SECONDS, 0.0))
        if not 0 <= encode_token_seconds < math.inf:
            raise ValueError(f"its {ENCODE_TOKEN_SECONDS} is {encode_token_seconds}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--measured {file}: not a report of bench.engine ({error})") from error
    row = re.compile(r"(engine(?:\.\w+)*)\.(?:decode\.b|prefill\.1x)(\d+)")
    cases = {match[1]: None for name in rows if (match := row.fullmatch(name))}
    case = "engine" if "engine" in cases else next(iter(cases), "engine")
    seconds_of = {}
    for kind, start in (("decode", f"{case}.decode.b"), ("prefill", f"{case}.prefill.1x")):
        sizes = ((name.removeprefix(start), value) for name, value in rows.items() if name.startswith(start))
        seconds_of[kind] = dict(sorted((int(size), value) for size, value in sizes if size.isdecimal()))
        if len(seconds_of[kind]) < 2:
            raise ValueError(
                f"--measured {file}: needs two rows {start}N; run python -m baton.bench.engine on a GPU"
            )
    return replace(
        gpu,
        source=str(file),
        planned=case != "engine",
        steps=steps,
        encode_token_seconds=encode_token_seconds,
        decode=seconds_of["decode"],
        prefill=seconds_of["prefill"],
    )


def _step_model(fields: dict[str, Any] | None) -> StepModel | None:
    if fields is None:
        return None
    steps = StepModel(
        rows=tuple(fields["rows"]),
        decode_seconds=tuple(fields["decode_seconds"]),
        context_seconds=float(fields["context_seconds"]),
        tokens=tuple(fields["tokens"]),
        prompt_seconds=tuple(fields["prompt_seconds"]),
        pair_seconds=float(fields["pair_seconds"]),
        overlap=float(fields["overlap"]),
    )
    for sizes, seconds in ((steps.rows, steps.decode_seconds), (steps.tokens, steps.prompt_seconds)):
        if not sizes or len(sizes) != len(seconds) or not all(x > 0 for x in (*sizes, *seconds)):
            raise ValueError("its step_model must have a time above 0 for each size")
    return steps


class Speeds:
    """One worker with one model.

    Attributes:
        ranks: its GPUs.
        steps: what its steps cost.
        kv_bytes_per_token, weight_bytes: of all its GPUs.
    """

    def __init__(
        self,
        gpu: Gpu,
        model: ModelConfig,
        matrix_bytes: float = ELEMENT_BYTES,
        ranks: int = 1,
        kv_dtype: torch.dtype = torch.bfloat16,
        positions: float = CONTEXT,
    ) -> None:
        """`matrix_bytes`: of one parameter of a matrix, which depends on the format of the weights.
        `positions`: of a request on average, which say how many of them a layer with a window reads.

        Raises ValueError if the heads of the model do not divide over the ranks.
        """
        self.ranks = ranks
        self._gpu = gpu
        self._model = model
        self._matrix_bytes = matrix_bytes
        caches = cache_spec(model, torch.bfloat16, kv_dtype)
        # With fewer KV heads than ranks, each head is there several times.
        copies = ranks * model.of_rank(ranks).num_kv_heads // model.num_kv_heads
        self.kv_bytes_per_token = cache_bytes_per_token(caches) * copies
        windows = windows_of(layer.arrays for layer in caches)
        windowed = cache_bytes_per_token(caches, windowed=True) * copies
        self._state_bytes = state_bytes_per_request(caches)
        self._state_seconds = 2 * self._state_bytes / gpu.kv_bytes_per_s  # a step reads and writes them
        self._window: tuple[int, float] | None = None
        if 0 < windowed < self.kv_bytes_per_token:
            tokens = window_blocks(windows, BLOCK) * BLOCK
            if tokens < TOKENS_OF_WINDOW:
                self._window = tokens, windowed * (1 - tokens / TOKENS_OF_WINDOW)
        self._spans = Counter(layer.span for layer in attention_caches(caches))
        if model.latent is not None and (index := model.latent.index) is not None:
            # A query reads as many positions as it chooses. Reading the index is not counted.
            self._spans = Counter({Span(index.most_chosen): model.num_layers})
        self.weight_bytes = model.weight_bytes(ELEMENT_BYTES, ELEMENT_BYTES, self._matrix_bytes)
        self.steps = self._steps(positions)

    def _steps(self, positions: float) -> StepModel:
        gpu, ranks = self._gpu, self.ranks
        if gpu.planned:
            alone = gpu.steps or _corrected(self._scaled(SHAPE, positions), gpu, self._state_seconds)
        else:
            alone = self._scaled(gpu.steps or _corrected(SHAPE, gpu), positions)
        decodes, prompts = (
            (seconds / ranks + self._sums(size) for size, seconds in zip(sizes, each, strict=True))
            for sizes, each in ((alone.rows, alone.decode_seconds), (alone.tokens, alone.prompt_seconds))
        )
        return replace(
            alone,
            decode_seconds=tuple(accumulate(decodes, max)),
            context_seconds=alone.context_seconds / ranks,
            prompt_seconds=tuple(accumulate(prompts, max)),
            pair_seconds=alone.pair_seconds / ranks,
        )

    def prefill(self, tokens: int, position: float = 0.0) -> float:
        """Seconds of a prompt that is computed alone, with the rows that pad its step."""
        return self.steps.prefill(padded(tokens), position)

    def encoding(self, token_seconds: float) -> Self:
        """The same worker, which also encodes the images of its prompts: so many seconds for each token."""
        speeds, steps = copy(self), self.steps
        each = zip(steps.tokens, steps.prompt_seconds, strict=True)
        speeds.steps = replace(steps, prompt_seconds=tuple(s + n * token_seconds for n, s in each))
        return speeds

    @property
    def encode_token_seconds(self) -> float:
        """0: not known."""
        return self._gpu.encode_token_seconds

    @property
    def products_per_s(self) -> float:
        """Multiplications of parameters per second, in a long step of prompts."""
        tokens = self.steps.tokens[-1]
        seconds = self.steps.prompt_seconds[-1] - self.steps.pair_seconds * tokens**2 / 2
        return gemm_parameters(self._model, 1) * tokens / seconds

    @property
    def pair_seconds_of_number(self) -> float:
        """Of attention: of one pair of positions, for each number of a key of one layer."""
        return self.steps.pair_seconds / (self._model.num_layers * _attention_width(self._model))

    def _scaled(self, steps: StepModel, positions: float) -> StepModel:
        """On one GPU, from the steps of the reference model."""
        active = gemm_parameters(self._model, 1) / gemm_parameters(REFERENCE, 1)
        of_layer = _attention_width(self._model) / _attention_width(REFERENCE)
        attention = of_layer * self._spans.total() / REFERENCE.num_layers
        reading = steps.decode_seconds[0]
        pair = attention * steps.pair_seconds

        def decode(rows: int, seconds: float) -> float:
            return reading * self._read(rows) + (seconds - reading) * active

        def prompt(tokens: int, seconds: float) -> float:
            work = max(reading * self._read(tokens), (seconds - tokens**2 / 2 * steps.pair_seconds) * active)
            return work + pair * self._seen(tokens, tokens**2 / 2)

        seen_share = self._seen(1, positions) / positions
        return replace(
            steps,
            decode_seconds=tuple(map(decode, steps.rows, steps.decode_seconds)),
            context_seconds=seen_share * self.kv_bytes_per_token / self._gpu.kv_bytes_per_s,
            prompt_seconds=tuple(map(prompt, steps.tokens, steps.prompt_seconds)),
            pair_seconds=seen_share * pair,
        )

    def machine(self, positions: float, utilization: float, seats: int) -> Machine:
        """For simulations. `positions`: of a request, which say how many requests fit into the memory.
        `seats`: requests that the worker decodes at once, each with its states."""
        room, copies = self.kv_room(utilization), None
        if self._state_bytes:
            tokens, copies = self._divided(room, seats)
        else:
            tokens = int(room / self.kv_bytes(positions) * positions)
        doubles_at, row_seconds, small = self._model.attention_doubles_at, 0.0, 1.0
        layers = self._model.num_layers
        if self._gpu.steps is not None:  # it has the states, and the attention of chunks of all sizes
            return modelled(self.steps, tokens, doubles_at, row_seconds, small, layers=layers, copies=copies)
        row_seconds = self._state_seconds / self.ranks
        return modelled(self.steps, tokens, doubles_at, row_seconds, layers=layers, copies=copies)

    def _divided(self, room: int, seats: int) -> tuple[int, CopyRoom]:
        """The positions of KV and the copies of states that there is room for beside the states of requests,
        as `memory_sizing` divides it."""
        state, token = self._state_bytes, self.kv_bytes_per_token
        reserve_bytes = TOKENS_BESIDE_STATES * token
        slots = min(seats, int(room // (state + reserve_bytes)))
        free_bytes = room - slots * state
        device = max(0, int(COPY_SHARE * (free_bytes - slots * reserve_bytes)) // state)
        tokens = (free_bytes - device * state) // token
        each = max(COPY_TOKENS, tokens // max(1, device))  # positions in the host for each copy
        host = self._gpu.host_memory * self.ranks // HOST_PART // (each * token + state)
        return tokens, CopyRoom(device, host if device else 0, COPY_TOKENS)

    def _sums(self, rows: int) -> float:
        """Seconds of the all-reduces of a step."""
        if self.ranks == 1:
            return 0.0
        wide = rows * self._model.hidden_size / REFERENCE.hidden_size
        return 2 * self._model.num_layers * _at(self._gpu.all_reduce, wide)

    def _seen(self, queries: float, pairs: float) -> float:
        """The pairs of a query and a key in the span of a layer, on average, of `pairs` without a span."""
        counts = {span: pairs if span is None else min(pairs, queries * span.length) for span in self._spans}
        return sum(layers * counts[span] for span, layers in self._spans.items()) / self._spans.total()

    def _read(self, tokens: int) -> float:
        """Bytes of weights that a step of `tokens` tokens reads, as a multiple of the reference model's."""
        parameters = gemm_parameters(self._model, tokens) / gemm_parameters(REFERENCE, tokens)
        return parameters * self._matrix_bytes / ELEMENT_BYTES

    def holds(self, context: int, utilization: float) -> bool:
        """Whether there is room for the KV of a request of so many positions."""
        try:
            return self.kv_room(utilization) >= self.kv_bytes(context)
        except ValueError:
            return False

    def kv_bytes(self, positions: float) -> float:
        """Bytes of the KV pool that a request of so many positions takes, as the engine plans its memory:
        layers with windows have a window for each `TOKENS_OF_WINDOW` tokens. With its states."""
        if self._window is None:
            return positions * self.kv_bytes_per_token + self._state_bytes
        window, saved_per_token = self._window
        tokens = max(positions, TOKENS_OF_WINDOW * min(1.0, positions / window))
        planned = tokens * (self.kv_bytes_per_token - saved_per_token)
        return min(positions * self.kv_bytes_per_token, planned)

    def kv_room(self, utilization: float) -> int:
        """Bytes for KV, after the weights and `STEP_BYTES` of each GPU.

        Raises ValueError if none are left, with the number of GPUs that would do.
        """
        of_gpu = int(self._gpu.memory * utilization) - STEP_BYTES
        room = self.ranks * of_gpu - self.weight_bytes
        if room <= 0:
            gpus = "one GPU" if self.ranks == 1 else f"{self.ranks} GPUs"
            enough = [ranks for ranks in self._model.group_sizes if ranks * of_gpu > self.weight_bytes]
            larger = "no number of such GPUs is enough; choose"
            if enough:
                larger = (
                    f"choose at least {enough[0]} for --prefill-tensor-parallel-size and "
                    "--decode-tensor-parallel-size, or"
                )
            raise ValueError(
                f"the weights ({self.weight_bytes / 1e9:.0f} GB) leave no room for KV, and a worker has "
                f"{gpus}; {larger} a smaller --model"
            )
        return room


def as_kept(
    gpu: Gpu,
    model: ModelConfig,
    weight_format: PlainFormat,
    dtype: torch.dtype,
    ranks: int,
    kv_dtype: torch.dtype,
    positions: float,
    utilization: float,
    context: int,
) -> Speeds:
    """A worker that keeps its weights as the engine does (`cache_limits.kept_format`).

    Raises ValueError as `Speeds` does.
    """
    dequantized, kept = (
        Speeds(gpu, model, each.matrix_bytes(model, dtype), ranks, kv_dtype, positions)
        for each in (weight_format.with_int8_dequantized(), weight_format)
    )
    return dequantized if dequantized.holds(context, utilization) else kept


def _at(measured: Mapping[int, float], size: float) -> float:
    return interpolated(tuple(measured), tuple(measured.values()), size)


def _corrected(model: StepModel, gpu: Gpu, state_seconds: float = 0.0) -> StepModel:
    """The model with the measured times, without those of states. Between two measured sizes their ratios to
    the model are interpolated, and beyond them the nearest one counts. Prompts of fewer tokens than were
    measured have the ratio of as many decodes: both are rows of the same products. Decodes that take longer
    for attention than for products do not count, since an error of the first would count as one of the
    latter."""
    # t = products(n) + pair · n² / 2, through the shortest and the longest measured prompt. A mixture of
    # experts reads its experts for the shortest one, too, so that a token may take longer there. Then what
    # attention is expected to take counts.
    (short, short_s), *_, (long, long_s) = gpu.prefill.items()
    pair = 2 * (long_s / long - short_s / short) / (long - short)
    pair = pair if pair > 0 else model.pair_seconds
    most = model.tokens[-1]

    def products(tokens: int) -> float:
        """Of the model, padded as in the measurement. More tokens than those of a step take several."""
        step = padded(min(tokens, most))
        seconds = interpolated(model.tokens, model.prompt_seconds, step) - model.pair_seconds * step**2 / 2
        return seconds * max(1.0, tokens / most)

    def attention(rows: int) -> float:
        """Of decodes, with the states that they read and write."""
        return rows * (CONTEXT * model.context_seconds + state_seconds)

    decodes = {
        rows: max(0.0, seconds - attention(rows)) / model.decode(rows, 0.0)
        for rows, seconds in gpu.decode.items()
    }
    prompts = {
        rows: ratio
        for rows, ratio in decodes.items()
        if rows < short and attention(rows) < model.decode(rows, 0.0)
    }
    prompts |= {n: (seconds - pair * n**2 / 2) / products(n) for n, seconds in gpu.prefill.items()}

    def at(ratios: Mapping[int, float], size: int) -> float:
        return _at(ratios, min(size, max(ratios)))

    return replace(
        model,
        decode_seconds=tuple(
            at(decodes, rows) * seconds
            for rows, seconds in zip(model.rows, model.decode_seconds, strict=True)
        ),
        prompt_seconds=tuple(at(prompts, n) * products(n) + pair * n**2 / 2 for n in model.tokens),
        pair_seconds=pair,
    )


def gemm_parameters(model: ModelConfig, tokens: int) -> float:
    """The parameters in the matrix products of a step of `tokens` tokens.

    Excludes the input embedding: a step reads one row per token.
    """
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return model.parameters_read(tokens) - embedding


def _attention_width(model: ModelConfig) -> int:
    """Of a layer. A query and a key of all heads multiply so many numbers, and so do a probability and a
    value."""
    latent, head_dim = model.latent, model.head_dim
    if latent is not None:
        head_dim = (latent.nope_dim + latent.rope_dim + latent.value_dim) // 2
    return model.num_heads * head_dim


def opened(name: str) -> Checkpoint:
    """A known shape, a directory, a GGUF file, or a name on the hub: its configuration, and the headers of
    the files that are here. Reads no weights. Raises ValueError with the flag or the file."""
    if name in MODELS:
        return DummyCheckpoint(model_config_from_hf(MODELS[name], {}, name), name, 0, CPU)
    if "/" not in name and not Path(name).exists():
        raise ValueError(
            f"--model {name}: must be {', '.join(MODELS)}, a directory with config.json, a GGUF file, or a "
            "name on the hub"
        )
    location = resolve(name).location
    reach_hub(location)
    path = locate(location, None)
    here = path.is_file() or any(path.glob("*.safetensors"))
    return open_checkpoint(EngineConfig(str(path), load_format="auto" if here else "dummy"), CPU)
