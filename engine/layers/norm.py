"""RMSNorm with the addition to the residual stream that comes before it."""

from typing import Any

from torch import Tensor

from baton.engine.kernels import Experts, LinearMethod, Terms, in_form
from baton.engine.layers.ranks import Ranks
from baton.engine.layers.weights import Weights


class RMSNorm:
    """Norm of the residual stream [tokens, size] (Zhang & Sennrich 2019).

    `summed`: its delta is already the sum over ranks."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, *, summed: bool = False) -> None:
        self.weight = weights.take(f"{name}.weight", (size,))
        self.eps = eps
        self.kernels = weights.kernels
        self.ranks = Ranks() if summed else weights.ranks

    def __call__(self, residual: Tensor, delta: Tensor | Terms | None = None) -> Tensor:
        """Adds delta to residual, in place, and returns the norm of that. With several ranks delta is a term:
        the sum of all ranks' deltas is added."""
        if isinstance(delta, Terms):
            return self.kernels.add_rms_norm(residual, delta, self.weight, self.eps)
        return self.ranks.add_rms_norm(self.kernels, residual, delta, self.weight, self.eps)

    def of_sum(self, term: Tensor) -> Tensor:
        """The norm of the sum of all ranks' terms, on all ranks. May overwrite `term`."""
        return self(self.ranks.all_reduce(term))


class InputNorm:
    """An `RMSNorm` before a product. If the product takes FP8, the norm quantizes its result.

    `norm` None: the product takes the residual stream itself. Its delta is already the sum over ranks.
    `product`: it may take the result in the model's dtype, too, as the router beside experts does."""

    def __init__(self, weights: Weights, norm: RMSNorm | None, product: LinearMethod | Experts) -> None:
        self.norm = norm
        self.kernels = weights.kernels
        self.product = product
        self.both = product.takes_both

    def __call__(self, residual: Tensor, delta: Tensor | Terms | None = None) -> Any:
        """As `RMSNorm`. Returns what the product takes: a tensor, `Quantized` or `Both`."""
        norm, grouped = self.norm, self.product.quantizes(len(residual))
        if norm is not None and norm.ranks.size == 1:
            return self.kernels.add_rms_norm(residual, delta, norm.weight, norm.eps, grouped, both=self.both)
        x = residual
        if norm is not None:
            x = norm(residual, delta)
        elif delta is not None:
            assert not isinstance(delta, Terms), "a draft head sums its delta"
            residual.add_(delta)
        return in_form(x, self.kernels, grouped, both=self.both)
