"""What the models are built of. Weights come from a `Weights` by their Hugging Face names."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_config import ModelConfig
from engine.weights import Weights


class Linear:
    """y = x Wᵀ + b; W is [out, in]. On a CPU W is kept in the blocked layout of oneDNN, which would otherwise
    rearrange it in every call: at small batches that takes longer than the product. On a GPU small batches
    have a kernel of their own."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = _packs(weight.dtype, weight.device)
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS) if self.packed else weight
        )
        self.bias = bias
        self.skinny = _skinny(weight, bias) if weight.is_cuda else None

    @classmethod
    def fused(
        cls, weights: Weights, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool = False
    ) -> "Linear":
        """Several projections of one input as one: their rows stacked."""
        weight = weights.stack(
            [f"{name}.weight" for name in names],
            [(n, columns) for n in rows],
            scratch=_packs(weights.dtype, weights.device),
        )
        if not bias:
            return cls(weight)
        return cls(weight, weights.stack([f"{name}.bias" for name in names], [(n,) for n in rows]))

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if self.skinny is not None and len(x) <= MAX_SKINNY_ROWS:
            return self.skinny(x)
        return F.linear(x, self.weight, self.bias)


def _packs(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and (
        dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _skinny(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    from engine.kernels.skinny_linear import SkinnyLinear

    if not SkinnyLinear.suits(weight):
        return None
    return SkinnyLinear(weight, bias, torch.cuda.get_device_properties(weight.device).multi_processor_count)


MAX_SKINNY_ROWS = 64
"""Of x, on a GPU: above, cuBLAS is faster."""

PACKED_FOR_ROWS = 64
"""Rows of x that the layout is chosen for; measured, it is then good from 1 to 512."""


class RMSNorm:
    """Of the residual stream [tokens, size], with the addition that comes before it."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", (size,))
        self.eps = eps
        self.kernels = weights.kernels

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Adds delta to residual, in place, and returns the norm of that."""
        return self.kernels.add_rms_norm(residual, delta, self.weight, self.eps)


class GatedMLP:
    """down(silu(gate(x)) * up(x)), SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = Linear.fused(weights, [f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], hidden)
        self.down = Linear.fused(weights, [f"{name}.down_proj"], [hidden], inner)
        self.kernels = weights.kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.silu_mul(self.gate_up(x)))


class Rotary:
    """Rotary position embedding (Su 2021), in the half-split order of Hugging Face checkpoints."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / config.rope_theta**exponents
        frequencies = self._scaled(frequencies, config, weights)
        angles = torch.arange(config.max_model_len, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        # The sign of "rotate half" sits in the table.
        table = torch.stack((cos.repeat(1, 2), torch.cat((-sin, sin), dim=1)), dim=1)
        self.table = table.to(weights.device)  # [positions, 2, head_dim] float32

    @staticmethod
    def _scaled(frequencies: Tensor, config: ModelConfig, weights: Weights) -> Tensor:
        scaling = config.rope_scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        if scaling.kind == "tensor":
            return frequencies / weights.take("rope_freqs.weight", frequencies.shape).to(frequencies)
        turns = scaling.original_context * frequencies / (2 * math.pi)  # over the original context
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / scaling.factor

    def at(self, positions: Tensor) -> Tensor:
        """[tokens, 2, head_dim] float32 of positions [tokens]: cos θ twice, then −sin θ and sin θ, so that
        x · cos + (x with its halves exchanged) · sin is x turned by θ."""
        return self.table.index_select(0, positions)
