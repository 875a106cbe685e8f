"""The floor of a step on this card: its plain GEMMs by cuBLAS, and the KV of attention at the card's speed.

Uses no kernel of the engine: no norm, RoPE, activation or sampling. The GEMMs of a decode step run in one
CUDA graph, as in an engine. Those of a prefill run one after another.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from baton.bench.lab.kernels.cases import graph_seconds
from baton.engine.kernels import Kernels, Quantized
from baton.engine.model_config import ModelConfig

KV_READ_BYTES_PER_S = 4.3e12
"""What a good decode attention reads on an H200, whose datasheet says 4.8 TB/s."""


class Floor:
    """Owns random weights, as the engine has, since power and clocks depend on the values."""

    def __init__(self, config: ModelConfig, kv_bytes_per_token: int) -> None:
        """`config`: of a dense Llama."""
        self._config, self._kv_bytes_per_token = config, kv_bytes_per_token
        c, heads = config, config.num_heads + 2 * config.num_kv_heads
        # (in, out) of the four GEMMs of a layer. QKV and gate-up are one GEMM each.
        self._linears = [
            (c.hidden_size, heads * c.head_dim),
            (c.num_heads * c.head_dim, c.hidden_size),
            (c.hidden_size, 2 * c.intermediate_size),
            (c.intermediate_size, c.hidden_size),
        ]
        self._layers = [[self._operand(o, i) for i, o in self._linears] for _ in range(c.num_layers)]
        self._head = _random(c.vocab_size, c.hidden_size)

    def decode_ms(self, batch: int, context: int) -> float:
        inputs = self._inputs(batch, batch)
        replay = graph_seconds([lambda: self._gemms(*inputs)])
        gemms = statistics.median(replay() for _ in range(20)) * 1e3
        return gemms + batch * context * self._kv_bytes_per_token / KV_READ_BYTES_PER_S * 1e3

    def prefill_ms(self, sequences: int, tokens: int) -> float:
        """The GEMMs of all tokens, and causal attention of each sequence by torch's fastest kernel."""
        inputs = self._inputs(sequences * tokens, sequences)
        return _median_ms(lambda: self._gemms(*inputs)) + self._attention_ms(sequences, tokens)

    def _attention_ms(self, sequences: int, tokens: int) -> float:
        c = self._config
        q = torch.randn(sequences, c.num_heads, tokens, c.head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.randn(sequences, c.num_kv_heads, tokens, c.head_dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )

        def attention() -> None:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        backends = torch.nn.attention.SDPBackend
        timed: list[float] = []
        for backend in (backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION):
            with torch.nn.attention.sdpa_kernel(backend):
                timed.append(_median_ms(attention))
        return c.num_layers * min(timed)

    def _inputs(self, rows: int, sampled: int) -> tuple[dict[int, Any], torch.Tensor]:
        """Of the layers' GEMMs by their width, [rows, width], and of the head, [sampled, hidden]."""
        widths = {i for i, _ in self._linears}
        return {i: self._operand(rows, i) for i in widths}, _random(sampled, self._config.hidden_size)

    def _gemms(self, by_width: dict[int, Any], of_head: torch.Tensor) -> None:
        for layer in self._layers:
            for (width, _), weight in zip(self._linears, layer, strict=True):
                self._multiply(by_width[width], weight)
        torch.nn.functional.linear(of_head, self._head)

    def _operand(self, rows: int, columns: int) -> Any:
        return _random(rows, columns)

    def _multiply(self, x: Any, weight: Any) -> None:
        torch.nn.functional.linear(x, weight)


class Fp8Floor(Floor):
    """The same in FP8 with scales of rows, except the output projection. The inputs are quantized already."""

    def _operand(self, rows: int, columns: int) -> Any:
        return Kernels().quantize(_random(rows, columns), grouped=False)

    def _multiply(self, x: Quantized, weight: Quantized) -> None:
        torch._scaled_mm(
            x.values,
            weight.values.T,
            x.scales,
            weight.scales.T,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02


def _median_ms(work: Callable[[], object]) -> float:
    for _ in range(2):
        work()
    times: list[float] = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
