"""RMSNorm with the addition to the residual stream that comes before it."""

from torch import Tensor

from engine.layers.weights import Weights


class RMSNorm:
    """Norm of the residual stream [tokens, size] (Zhang & Sennrich 2019)."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", (size,))
        self.eps = eps
        self.kernels = weights.kernels

    def __call__(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """Adds delta to residual, in place, and returns the norm of that."""
        return self.kernels.add_rms_norm(residual, delta, self.weight, self.eps)
