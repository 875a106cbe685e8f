"""RMSNorm with the addition to the residual stream that comes before it."""

from typing import Any

from torch import Tensor

from baton.engine.layers.fp8_linear import fp8_groups
from baton.engine.layers.weights import Weights


class RMSNorm:
    """Norm of the residual stream [tokens, size] (Zhang & Sennrich 2019)."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", (size,))
        self.eps = eps
        self.kernels = weights.kernels
        self.ranks = weights.ranks

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Adds delta to residual, in place, and returns the norm of that. With several ranks delta is a term:
        the sum of all ranks' deltas is added."""
        return self.ranks.add_rms_norm(self.kernels, residual, delta, self.weight, self.eps)


class InputNorm:
    """An `RMSNorm` before a product. If the product takes FP8, the norm quantizes its result."""

    def __init__(self, norm: RMSNorm, product: object) -> None:
        self.norm = norm
        self.grouped = fp8_groups(product)

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Any:
        """As `RMSNorm`. Returns what the product takes: a tensor, or `Quantized`."""
        norm = self.norm
        if self.grouped is None:
            return norm(residual, delta)
        if norm.ranks.size > 1:
            return norm.kernels.quantize(norm(residual, delta), grouped=self.grouped)
        return norm.kernels.add_rms_norm_quantized(
            residual, delta, norm.weight, norm.eps, grouped=self.grouped
        )
