"""The mixer of the gated delta rule (Yang 2024), which takes the place of attention in a state layer."""

from torch import Tensor

from baton.engine.kernels import GatedDelta
from baton.engine.layers.mamba2 import Mix, beside
from baton.engine.layers.ranks import Part, whole
from baton.engine.layers.weights import Weights
from baton.engine.model_config import Mamba2Config, ModelConfig


class GatedDeltaMixer:
    """The input product gives the gate of each column of y, the channels, and Δ and β of each head.

    A rank has some heads, and the keys and queries of the groups of these heads."""

    def __init__(self, config: ModelConfig, mamba: Mamba2Config, weights: Weights, name: str) -> None:
        hidden = whole(config.hidden_size)
        heads = weights.ranks.part(mamba.num_heads)
        inner = heads.of(mamba.head_dim)
        groups = weights.ranks.shared_part(mamba.groups)
        of_groups = groups.of(mamba.state_size)
        self.gate_size = inner.length
        self.input = weights.linear(
            [f"{name}.in_proj_{part}" for part in "zvkqab"],
            [inner, inner, of_groups, of_groups, heads, heads],
            hidden,
        )
        self.out = weights.linear([f"{name}.out_proj"], [hidden], inner)

        def take(tensor: str, parts: list[Part], *others: Part) -> Tensor:
            return weights.stack([f"{name}.{tensor}"] * len(parts), [(part, *others) for part in parts])

        channels = beside(inner, of_groups, of_groups)
        kernel = take("conv1d.weight", channels, whole(1), whole(mamba.conv_width))
        self.parameters = GatedDelta(
            kernel[:, 0].T.contiguous(),
            take("dt_bias", [heads]).float(),
            -take("A_log", [heads]).float().exp(),
            groups.length,
        )
        self.norm = weights.take(f"{name}.norm.weight", (mamba.head_dim,))
        self.norm_eps = mamba.norm_eps
        self.kernels = weights.kernels

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        projected = self.input(x)
        y = mix(layer, projected[:, self.gate_size :], self.parameters)
        return self.out(self.kernels.norm_gate(y, projected[:, : self.gate_size], self.norm, self.norm_eps))
