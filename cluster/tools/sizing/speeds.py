"""Makes the model of steps of a worker (`machine.step_model`), from measurements of one model on one GPU.

The measured times are scaled to other models:

- matrix products: by the number of their parameters. Of a mixture of experts, a step reads the experts that
  its tokens are expected to choose, and computes with the active parameters
- prefill attention: by layers × heads × head size, and by the keys in the span of each layer
- decode attention: by the bytes of KV that it reads, in the span of each layer
- several GPUs: each computes its share. Then two all-reduces in each layer, as measured on two GPUs

This works for a model of similar width. A much smaller model is bound by kernel launches, so it is slower
than the estimate.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch

from baton.cluster.model import reach_hub, resolve
from baton.cluster.tools.sizing import MODELS
from baton.content.cache_kinds import window_blocks
from baton.engine.execution.memory_sizing import TOKENS_OF_WINDOW
from baton.engine.loader.families import cache_spec
from baton.engine.loader.hf_config import model_config_from_hf, read_config
from baton.engine.model_config import ModelConfig, Span
from baton.engine.models import attention_caches, cache_bytes_per_token, windows_of
from baton.machine.step_model import StepModel, interpolated, row_sizes, token_sizes
from baton.router.text.model_files import locate

ELEMENT_BYTES = 2  # bfloat16
BLOCK = 128  # positions of a block on a GPU
CONTEXT = 1064  # tokens per request in the measured decode steps


@dataclass(frozen=True)
class Gpu:
    """Measured speeds of a GPU.

    Attributes:
        memory: bytes.
        kv_bytes_per_s: KV bytes per second that decode attention reads.
        decode: batch size -> seconds of a step with `CONTEXT` tokens per request, ascending.
        prefill: prompt tokens -> seconds of one prompt alone; two or more entries.
        all_reduce: rows of the reference model -> seconds of an all-reduce over two GPUs, ascending.
        source: where `decode` and `prefill` were measured, for people.
    """

    memory: int
    kv_bytes_per_s: float
    decode: dict[int, float]
    prefill: dict[int, float]
    all_reduce: dict[int, float]
    source: str


REFERENCE = model_config_from_hf(MODELS["llama-3.1-8b"], {}, "llama-3.1-8b")
H200 = Gpu(
    memory=139 << 30,
    kv_bytes_per_s=4.3e12,
    decode={1: 4.91e-3, 8: 5.20e-3, 32: 6.24e-3, 64: 7.60e-3, 128: 10.80e-3, 256: 18.43e-3},
    prefill={2000: 49.8e-3, 8000: 210.5e-3},
    all_reduce={1: 6.3e-6, 8: 6.7e-6, 64: 7.6e-6, 256: 12.9e-6, 2000: 56e-6, 8000: 208e-6},
    source="Llama-3.1-8B in bfloat16 on one H200, vLLM 0.26; Baton was no slower there",
)


def measured(gpu: Gpu, file: Path) -> Gpu:
    """`gpu` with the speeds of Llama-3.1-8B in a report of `python -m baton.bench.engine --json FILE`.

    Raises ValueError for another file.
    """
    try:
        rows = {row["name"]: row["value"] / 1e3 for row in json.loads(file.read_text())["results"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--measured {file}: not a report of bench.engine ({error})") from error
    found = {}
    for kind, pattern in (("decode", r"engine\.decode\.b(\d+)"), ("prefill", r"engine\.prefill\.1x(\d+)")):
        matches = ((re.fullmatch(pattern, name), value) for name, value in rows.items())
        found[kind] = dict(sorted((int(match[1]), value) for match, value in matches if match))
        if len(found[kind]) < 2:
            raise ValueError(
                f"--measured {file}: needs two rows {pattern}; run python -m baton.bench.engine on a GPU"
            )
    return replace(gpu, source=str(file), decode=found["decode"], prefill=found["prefill"])


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
        active = gemm_parameters(self._model, 1) / gemm_parameters(REFERENCE, 1)
        attention = _attention_width(self._model) / _attention_width(REFERENCE)
        reference_kv = cache_bytes_per_token(cache_spec(REFERENCE, torch.bfloat16))
        kv_seconds = CONTEXT * reference_kv / gpu.kv_bytes_per_s  # of one request of the reference model
        products = {rows: max(0.0, seconds - rows * kv_seconds) for rows, seconds in gpu.decode.items()}
        reading = _at(products, 1)
        # t = linear · n + quadratic · n² / 2, through the shortest and the longest measured prompt
        (short, short_s), *_, (long, long_s) = sorted(gpu.prefill.items())
        quadratic = max(0.0, 2 * (long_s / long - short_s / short) / (long - short))
        linear = short_s / short - quadratic * short / 2
        quadratic *= attention

        def decode(rows: int) -> float:
            work = reading * self._read(rows) + (_at(products, rows) - reading) * active
            return work / ranks + self._sums(rows)

        def prompt(tokens: int) -> float:
            work = max(reading * self._read(tokens), linear * tokens * active)
            return (work + quadratic * self._seen(tokens, tokens**2 / 2)) / ranks + self._sums(tokens)

        rows = sorted({*row_sizes(max(gpu.decode)), *gpu.decode})
        tokens = sorted({*token_sizes(long), *gpu.prefill})
        seen = self._seen(1, positions) / positions
        return StepModel(
            rows=tuple(rows),
            decode_seconds=tuple(accumulate(map(decode, rows), max)),
            context_seconds=seen * self.kv_bytes_per_token / gpu.kv_bytes_per_s / ranks,
            tokens=tuple(tokens),
            prompt_seconds=tuple(accumulate(map(prompt, tokens), max)),
            pair_seconds=seen * quadratic / ranks,
            overlap=1.0,
        )

    def _sums(self, rows: int) -> float:
        """Seconds of the all-reduces of a step."""
        if self.ranks == 1:
            return 0.0
        wide = rows * self._model.hidden_size / REFERENCE.hidden_size
        return 2 * self._model.num_layers * _at(self._gpu.all_reduce, wide)

    def _seen(self, queries: float, pairs: float) -> float:
        """The pairs of a query and a key in the span of a layer, on average, of `pairs` without a span."""
        seen = {span: pairs if span is None else min(pairs, queries * span.length) for span in self._spans}
        return sum(layers * seen[span] for span, layers in self._spans.items()) / self._model.num_layers

    def _read(self, tokens: int) -> float:
        """Bytes of weights that a step of `tokens` tokens reads, as a multiple of the reference model's."""
        parameters = gemm_parameters(self._model, tokens) / gemm_parameters(REFERENCE, tokens)
        return parameters * self._matrix_bytes / ELEMENT_BYTES

    def kv_bytes(self, positions: float) -> float:
        """Bytes of the KV pool that a request of so many positions takes, as the engine plans its memory:
        layers with windows have a window for each `TOKENS_OF_WINDOW` tokens."""
        if self._window is None:
            return positions * self.kv_bytes_per_token
        window, saved_per_token = self._window
        tokens = max(positions, TOKENS_OF_WINDOW * min(1.0, positions / window))
        planned = tokens * (self.kv_bytes_per_token - saved_per_token)
        return min(positions * self.kv_bytes_per_token, planned)

    def kv_room(self, utilization: float) -> int:
        """Bytes for KV, after the weights and 4 GiB of each GPU for activations, graphs and context.

        Raises ValueError if none are left.
        """
        room = self.ranks * (int(self._gpu.memory * utilization) - (4 << 30)) - self.weight_bytes
        if room <= 0:
            gpus = "one GPU" if self.ranks == 1 else f"{self.ranks} GPUs"
            raise ValueError(
                f"the weights ({self.weight_bytes / 1e9:.0f} GB) leave no room for KV, and a worker has "
                f"{gpus}; choose larger --prefill-tensor-parallel-size and --decode-tensor-parallel-size, or "
                "a smaller --model"
            )
        return room


def _at(measured: Mapping[int, float], size: float) -> float:
    return interpolated(tuple(measured), tuple(measured.values()), size)


def gemm_parameters(model: ModelConfig, tokens: int) -> float:
    """The parameters in the matrix products of a step of `tokens` tokens.

    Excludes the input embedding: a step reads one row per token.
    """
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return model.parameters_read(tokens) - embedding


def _attention_width(model: ModelConfig) -> int:
    """A query and a key of all heads multiply so many numbers, and so do a probability and a value."""
    latent, head_dim = model.latent, model.head_dim
    if latent is not None:
        head_dim = (latent.nope_dim + latent.rope_dim + latent.value_dim) // 2
    return model.num_layers * model.num_heads * head_dim


def shape(name: str) -> ModelConfig:
    """The configuration of a known shape, a Hugging Face directory, or a name on the hub.

    Reads no weights. Raises ValueError with the flag or the file.
    """
    if name in MODELS:
        return model_config_from_hf(MODELS[name], {}, name)
    if "/" not in name and not Path(name).exists():
        raise ValueError(
            f"--model {name}: must be {', '.join(MODELS)}, a directory with config.json, or a name on the hub"
        )
    location = resolve(name).location
    reach_hub(location)
    return read_config(locate(location, None))
