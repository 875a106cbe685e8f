"""What takes the place of attention in a state layer: Mamba-2 (Dao & Gu 2024) or the gated delta rule (Yang
2024)."""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.kernels import GatedDelta, Mamba2, StateLayer
from baton.engine.layers.ranks import Part, whole
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig, StateConfig

Mix = Callable[[int, Tensor, StateLayer], Tensor]
"""(layer, projected, parameters) → y [tokens, heads · head_dim]. Takes the states of the layer past the
tokens of the step, as `Kernels.mix_states`."""


class Mamba2Mixer:
    """The input product gives the gate of each column of y, the channels, and Δ of each head.

    A rank has some heads, with their gates and their columns of x, and B and C of the groups of these heads.
    With fewer groups than ranks, several ranks hold a group, and the norm of the group needs the columns of
    all of them: they sum its squares first."""

    def __init__(self, config: ModelConfig, state: StateConfig, weights: Weights, name: str) -> None:
        hidden = whole(config.hidden_size)
        heads = weights.ranks.part(state.num_heads)
        inner = heads.of(state.head_dim)
        self.groups = weights.ranks.shared_part(state.groups)
        of_groups = self.groups.of(state.state_size)
        channels = beside(inner, of_groups, of_groups)
        rows = beside(inner, inner, of_groups, of_groups, heads)
        self.gate_size = inner.length
        self.input = weights.linear([f"{name}.in_proj"] * len(rows), rows, hidden, bias=state.proj_bias)
        self.out = weights.linear([f"{name}.out_proj"], [hidden], inner, bias=state.proj_bias)

        def take(tensor: str, parts: list[Part], *others: Part) -> Tensor:
            return weights.stack([f"{name}.{tensor}"] * len(parts), [(part, *others) for part in parts])

        kernel = take("conv1d.weight", channels, whole(1), whole(state.conv_width))
        self.parameters = Mamba2(
            kernel[:, 0].T.contiguous(),
            take("conv1d.bias", channels) if state.conv_bias else None,
            take("dt_bias", [heads]).float(),
            -take("A_log", [heads]).float().exp(),
            self.groups.length,
            take("D", [heads]).float(),
            state.dt_limits,
        )
        self.norm = take("norm.weight", [inner])
        self.norm_eps = state.norm_eps
        self.group_size = state.inner_size // state.groups
        self.kernels = weights.kernels
        self.ranks = weights.ranks

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        projected = self.input(x)
        y = mix(layer, projected[:, self.gate_size :], self.parameters)
        gate, groups = projected[:, : self.gate_size], self.parameters.groups
        squares = self._squares(y, gate) if self.gate_size < groups * self.group_size else None
        return self.out(self.kernels.gated_rms_norm(y, gate, self.norm, self.norm_eps, groups, squares))

    def _squares(self, y: Tensor, gate: Tensor) -> Tensor:
        """The mean of the squares of this rank's group [tokens], from all ranks that hold a part of it."""
        of_groups = torch.zeros(len(y), self.groups.size, device=y.device)
        of_groups[:, self.groups.start] = self.kernels.gated_squares(y, gate) / self.group_size
        return self.ranks.all_reduce(of_groups)[:, self.groups.start]


class GatedDeltaMixer:
    """The input product gives the gate of each column of y, the channels, and Δ and β of each head.

    A rank has some heads, and the keys and queries of the groups of these heads."""

    def __init__(self, config: ModelConfig, state: StateConfig, weights: Weights, name: str) -> None:
        hidden = whole(config.hidden_size)
        heads = weights.ranks.part(state.num_heads)
        inner = heads.of(state.head_dim)
        groups = weights.ranks.shared_part(state.groups)
        of_groups = groups.of(state.state_size)
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
        kernel = take("conv1d.weight", channels, whole(1), whole(state.conv_width))
        self.parameters = GatedDelta(
            kernel[:, 0].T.contiguous(),
            None,
            take("dt_bias", [heads]).float(),
            -take("A_log", [heads]).float().exp(),
            groups.length,
        )
        self.norm = weights.take(f"{name}.norm.weight", (state.head_dim,))
        self.norm_eps = state.norm_eps
        self.kernels = weights.kernels

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        projected = self.input(x)
        y = mix(layer, projected[:, self.gate_size :], self.parameters)
        return self.out(self.kernels.norm_gate(y, projected[:, : self.gate_size], self.norm, self.norm_eps))


def beside(*parts: Part) -> list[Part]:
    """The parts of one dimension that has the dimensions of all these parts side by side."""
    size = sum(part.size for part in parts)
    starts = [sum(part.size for part in parts[:i]) for i in range(len(parts))]
    return [
        Part(start + part.start, start + part.stop, size) for start, part in zip(starts, parts, strict=True)
    ]
