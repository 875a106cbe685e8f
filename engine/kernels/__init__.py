"""What a layer computes between its matrix products, on any device.

    once a step    plan, plan_states                  where to read and write, for all layers of a kind
    each layer     add_rms_norm → [QKV product] → rope_and_write → attention → [output product]
                   add_rms_norm → [gate-up product] → silu_mul → [down product]
                   or, with experts: add_rms_norm → [router's product] → mix_experts
    with states    [input product] → mamba2 → gated_rms_norm → [output product], in place of attention
                   or [input product] → gated_delta → norm_gate → [output product]
    with FP8       add_rms_norm_quantized, silu_mul_quantized and quantize, before fp8_linear
    at its end     greedy, or draw with or without thresholds: from logits to tokens

`TorchKernels` is plain torch: it defines each operation, and runs on a CPU. `TritonKernels` runs on CUDA and
must match it. Each of its files has one kernel and its maths. Only `kernels_for` chooses between the two.

CUDA graphs can capture every operation, and the plans if `AttentionMetadata.prefills` is empty. These launch
the same grid for all values in the tensors, read lengths on the device, and never wait for it. Keep the
metadata in static tensors, and give padding rows context 0 and slot −1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.kernels.attention.paged import KV, AttentionMetadata, Fp8KV, parts
from baton.engine.kernels.state.gated_delta import GatedDelta
from baton.engine.kernels.state.mamba2 import LayerState, Mamba2
from baton.engine.model_config import ClampedSwiGLU, Scoring, Span

__all__ = [
    "FP8",
    "FP8_GROUP",
    "KV",
    "SMALLEST_TEMPERATURE",
    "AttentionMetadata",
    "Experts",
    "Fp8Experts",
    "Fp8KV",
    "GatedDelta",
    "HeadNorm",
    "Kernels",
    "LayerState",
    "Mamba2",
    "Quantized",
    "kernels_for",
    "parts",
]


SMALLEST_TEMPERATURE = 1e-5
"""Lower temperatures above 0 count as this one, since logits / temperature might overflow."""


FP8 = torch.float8_e4m3fn
FP8_GROUP = 128
"""Columns of activations, and rows and columns of weights, that share a scale where scales have groups."""


class Quantized(NamedTuple):
    """Activations in FP8: they stand for values times scales."""

    values: Tensor  # [rows, size] FP8
    scales: Tensor  # [rows, 1] float32, or grouped: [rows, size / FP8_GROUP rounded up]


class Fp8Experts(NamedTuple):
    """The weights of several experts in FP8: they stand for values times scales."""

    values: Tensor  # [experts, out, in] FP8
    scales: Tensor  # [experts, groups, out or out / FP8_GROUP] float32: as in `Kernels.fp8_linear`

    @property
    def grouped(self) -> bool:
        return self.scales.shape[1] > 1


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The experts of one layer that this rank holds, and how a token chooses among all experts."""

    gate_up: Tensor | Fp8Experts  # [held, 2 * inner, size]
    down: Tensor | Fp8Experts  # [held, size, inner]
    num_chosen: int
    """Experts of a token."""
    scoring: Scoring
    """Defines their weights."""
    first: int = 0
    """The first expert that is held. Those that are not add nothing to the sum."""
    gate_up_bias: Tensor | None = None  # [held, 2 * inner]
    down_bias: Tensor | None = None  # [held, size]
    activation: ClampedSwiGLU | None = None
    """In place of silu(gate) * up."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head before it is rotated (Qwen3)."""

    scale: Tensor  # [num_heads + num_kv_heads, head_dim]
    eps: float


class Kernels(Protocol):
    """Tensors are contiguous and have the model's dtype, unless a docstring says otherwise."""

    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Adds delta to residual [rows, size], in place. Returns the RMSNorm of the sum (Zhang & Sennrich
        2019) times weight [size]. Without delta, residual is only read."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * size] → [rows, size]: silu(first half) times second half (SwiGLU, Shazeer 2020)."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_mul`, with gelu, approximated by tanh (GeGLU)."""
        ...

    def add_rms_norm_quantized(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, grouped: bool
    ) -> Quantized:
        """As `add_rms_norm`, but quantizes the result."""
        ...

    def silu_mul_quantized(self, gate_up: Tensor, *, grouped: bool) -> Quantized:
        """As `silu_mul`, but quantizes the result."""
        ...

    def quantize(self, x: Tensor, *, grouped: bool) -> Quantized:
        """x [rows, size] in FP8. The largest value of a row, or group, becomes the largest FP8 number."""
        ...

    def fp8_linear(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Callable[[Quantized], Tensor]:
        """The product x Wᵀ + b for x [rows, in] quantized, W [out, in] FP8 and b [out]. Returns [rows, out]
        of `dtype`. scales [groups, out] float32: those of W, each for a row of W and a group of its columns.
        Or [groups, out / FP8_GROUP]: each for a block. x has as many groups. All calls are in one stream."""
        ...

    def mix_experts(
        self,
        x: Tensor,
        logits: Tensor,
        experts: Experts,
        counts: Tensor,
        *,
        slots: Tensor | None = None,
        shared: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """A mixture of experts: the weighted sum of down(silu(gate(x)) * up(x)) over each token's experts.

        x [tokens, size]. Each token has the experts with the largest logits [tokens, experts]. counts
        [experts] int32 must be zero, and becomes the number of tokens of each expert. Returns [tokens, size].

        slots [tokens]: a row with slot −1 pads a graph. It has no expert, and its result is undefined. None:
        no row is padding. Inputs of weights in FP8 are quantized. The result of `shared` [tokens, size],
        which is called last, is added."""
        ...

    def rope_and_write(
        self, qkv: Tensor, rotary: Tensor, norm: HeadNorm | None, kv: KV, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotates query and key heads, and writes key and value heads to the cache.

        The heads are those of qkv [tokens, num_heads + 2 * num_kv_heads, head_dim]. `norm` applies first,
        then rotary, which is `Rotary.at(positions)`. `kv` is the layer's cache; slots [tokens] int64. A cache
        in FP8 gets the same keys and values, quantized. Returns
        q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim]: strided views of qkv or of
        new memory. The rest of qkv is undefined afterwards."""
        ...

    def plan(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        span: Span | None = None,
    ) -> Any:
        """The plan that `attention` needs, the same for all layers of a step that have this span."""
        ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: KV,
        plan: Any,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Every query attends to the positions of its request up to its own, from the first in the plan's
        span. q, k and v are as `rope_and_write` returns them, and kv holds this step's keys and values. sinks
        [num_heads]: logits that take part in the softmax of each head, without a value. `scale` multiplies
        the products of queries and keys; None: 1 / √head_dim. Returns [tokens, num_heads, head_dim]."""
        ...

    def plan_states(self, metadata: AttentionMetadata, dtype: torch.dtype) -> Any:
        """The plan that `mamba2` and `gated_delta` need, the same for all layers of a step."""
        ...

    def tile_programs(self, num_kv_heads: int) -> int:
        """Pieces of `AttentionMetadata.tiles` that the device computes at once. 0: tiles are not cut."""
        ...

    def chunk_tokens(self, dtype: torch.dtype) -> int:
        """Tokens of a chunk in `AttentionMetadata.scans`. The states can be copied after each chunk."""
        ...

    def mamba2(self, projected: Tensor, layer: Mamba2, state: LayerState, plan: Any) -> Tensor:
        """Convolution and scan of a state layer (`state.mamba2`): takes the state of each request in the plan
        past the tokens of this step, in place.

        projected [tokens, channels + heads], dense rows at any stride: x, B, C, and Δ of each head. Returns
        y [tokens, heads · head_dim]."""
        ...

    def gated_delta(self, projected: Tensor, layer: GatedDelta, state: LayerState, plan: Any) -> Tensor:
        """As `mamba2`, for the gated delta rule: Δ and β of each head come after the channels."""
        ...

    def norm_gate(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMSNorm of each head of x [rows, size], times weight [head_dim], times silu(gate). gate [rows,
        size], with rows at any stride."""
        ...

    def gated_squares(self, x: Tensor, gate: Tensor) -> Tensor:
        """The sum of the squares of x · silu(gate), [rows] float32. x and gate as in `gated_rms_norm`."""
        ...

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        groups: int,
        squares: Tensor | None = None,
    ) -> Tensor:
        """The RMSNorm of x · silu(gate), times weight. x [rows, size]; gate too, with rows at any stride.
        Each of the `groups` parts of a row has a norm of its own.

        squares [rows] float32, at any stride: x is a part of one group, with this mean of squares."""
        ...

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """For logits [rows, vocabulary] float32: the column of the largest logit [rows] int64, and whether
        the whole row is finite [rows] bool. A row that is not finite gets any column."""
        ...

    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        keys: Tensor,
        probs: Tensor | None = None,
        least: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Like `greedy`, but samples at temperature [rows] float32 (0: greedy).

        This is a race of exponential clocks, also known as the Gumbel-max trick: token i wins with
        probability p[i]. The clocks of a row are a function of its key, keys [rows] int32. With probs
        [rows, vocabulary] (softmax of logits / temperature) and least [rows], only tokens with at least this
        probability take part.

        One random number per row, looked up in the cumulative distribution, would be less stable. A rounding
        error in any logit would move all boundaries; here it matters only if it swaps the first two."""
        ...

    def thresholds(self, probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """[rows]: the smallest probability that a token may have, in each row of probs [rows, vocabulary].
        top_k [rows] int32 applies first (vocabulary: no limit), then top_p [rows] (above 1: no limit). A
        token also needs min_p [rows] times the largest probability."""
        ...


def from_hopper_on(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU or a later one: it multiplies FP8 numbers, and its copy engine loads
    tiles. Where there is no GPU, the question is about one of these on another machine (`baton plan`)."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (9, 0)


def kernels_for(device: torch.device, head_dim: int) -> Kernels:
    """The kernels for this device. Raises `ValueError` if CUDA has no kernel for this head_dim, or if Triton
    is not installed; the message then names the extra."""
    if device.type == "cpu":
        from baton.engine.kernels.torch_kernels import TorchKernels

        return TorchKernels()
    try:
        from baton.engine.kernels.triton_kernels import TritonKernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            f"--device {device} needs Triton: in Baton's source directory `pip install -e '.[cuda]'` "
            "installs it; or use --device cpu"
        ) from error
    return TritonKernels(device, head_dim)
