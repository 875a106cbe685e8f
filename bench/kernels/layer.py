"""The matrix products of a layer without attention, which the benches of quantized weights share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton.bench.kernels.cases import Shape
from baton.engine.kernels import Kernels
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.weights import GatedMethod

EPS = 1e-5


class LayerCases:
    def __init__(self, shape: Shape, kernels: Kernels, device: torch.device) -> None:
        self.shape, self.kernels, self.device = shape, kernels, device
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.sizes = {"qkv": (shape.hidden, qkv), "out": (shape.hidden, shape.hidden)}
        self.sizes |= {"gate_up": (shape.hidden, 2 * shape.inner), "down": (shape.inner, shape.hidden)}
        """(columns, rows) of the weights."""

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.shape.dtype)

    def plain(self, columns: int, out: int) -> PlainLinear:
        return PlainLinear(self.normal(out, columns))

    def chain(
        self, rows: int, make: Callable[[int, int], Callable[[Tensor], Tensor]]
    ) -> Callable[[], object]:
        """Two norms, four products made by `make`, and the activation function, in launches that overlap."""
        hidden, kernels = self.shape.hidden, self.kernels
        qkv, out, gate_up, down = (make(*size) for size in self.sizes.values())
        residual, delta, attended = (self.normal(rows, hidden) for _ in range(3))
        weight = self.normal(hidden)

        def activated(x: Tensor) -> Tensor:
            return gate_up.silu_mul(x) if isinstance(gate_up, GatedMethod) else kernels.silu_mul(gate_up(x))

        def run() -> object:
            qkv(kernels.add_rms_norm(residual, delta, weight, EPS))
            out(attended)
            return down(activated(kernels.add_rms_norm(residual, delta, weight, EPS)))

        return run
