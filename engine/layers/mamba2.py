"""The Mamba-2 mixer (Dao & Gu 2024), which takes the place of attention in a state layer."""

from collections.abc import Callable

from torch import Tensor

from engine.kernels import Mamba2
from engine.layers.ranks import whole
from engine.layers.weights import Weights
from engine.model_config import Mamba2Config, ModelConfig

Mix = Callable[[int, Tensor, Mamba2], Tensor]
"""(layer, projected [tokens, channels + heads], parameters) → y [tokens, heads · head_dim]. Takes the states
of the layer past the tokens of the step, as `Kernels.mamba2`."""


class Mamba2Mixer:
    """The input product gives the gate of each column of y, the channels, and Δ of each head."""

    def __init__(self, config: ModelConfig, mamba: Mamba2Config, weights: Weights, name: str) -> None:
        hidden, inner, heads = whole(config.hidden_size), mamba.inner_size, mamba.num_heads
        self.gate_size = inner
        self.input = weights.linear(
            [f"{name}.in_proj"], [whole(inner + mamba.channels + heads)], hidden, bias=mamba.proj_bias
        )
        self.out = weights.linear([f"{name}.out_proj"], [hidden], whole(inner), bias=mamba.proj_bias)
        kernel = weights.take(f"{name}.conv1d.weight", (mamba.channels, 1, mamba.conv_width))
        self.parameters = Mamba2(
            kernel[:, 0].T.contiguous(),
            weights.take(f"{name}.conv1d.bias", (mamba.channels,)) if mamba.conv_bias else None,
            weights.take(f"{name}.dt_bias", (heads,)).float(),
            -weights.take(f"{name}.A_log", (heads,)).float().exp(),
            weights.take(f"{name}.D", (heads,)).float(),
            mamba.groups,
            mamba.dt_limits,
        )
        self.norm = weights.take(f"{name}.norm.weight", (inner,))
        self.norm_eps = mamba.norm_eps
        self.kernels = weights.kernels

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        projected = self.input(x)
        y = mix(layer, projected[:, self.gate_size :], self.parameters)
        gate, groups = projected[:, : self.gate_size], self.parameters.groups
        return self.out(self.kernels.gated_rms_norm(y, gate, self.norm, self.norm_eps, groups))
