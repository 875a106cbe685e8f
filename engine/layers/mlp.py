"""The feed-forward part of a dense layer, and the shared expert of a mixture."""

from typing import Any

from torch import Tensor

from baton.engine.layers.fp8_linear import fp8_groups
from baton.engine.layers.ranks import whole
from baton.engine.layers.weights import GatedMethod, Weights
from baton.engine.model_config import ModelConfig


class GatedMLP:
    """down(silu(gate(x)) * up(x)), SwiGLU (Shazeer 2020). With several ranks, a term of that.

    `gelu`: it has gelu, approximated by tanh, in place of silu (GeGLU)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        name: str,
        intermediate_size: int,
        *,
        gelu: bool = False,
    ) -> None:
        hidden, inner = whole(config.hidden_size), weights.ranks.part(intermediate_size)
        self.gate_up = weights.linear([f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], hidden)
        self.down = weights.linear([f"{name}.down_proj"], [hidden], inner)
        self.kernels = weights.kernels
        self.gelu = gelu
        self.gated = self.gate_up if isinstance(self.gate_up, GatedMethod) else None
        self.grouped = fp8_groups(self.down)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._inner(x))

    def _inner(self, x: Tensor) -> Any:
        """What the down product takes: a tensor, or `Quantized`."""
        if self.gelu:
            y = self.kernels.gelu_mul(self.gate_up(x))
            return y if self.grouped is None else self.kernels.quantize(y, grouped=self.grouped)
        if self.grouped is not None:
            return self.kernels.silu_mul_quantized(self.gate_up(x), grouped=self.grouped)
        if self.gated is not None:
            return self.gated.silu_mul(x)
        return self.kernels.silu_mul(self.gate_up(x))
