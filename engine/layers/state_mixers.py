"""What takes the place of attention in a state layer: Mamba-2 (Dao & Gu 2024) or the gated delta rule (Yang
2024)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.engine.kernels import GatedDelta, Mamba2, StateLayer
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig, StateConfig

Mix = Callable[[int, Tensor, StateLayer], Tensor]
"""(layer, projected, parameters) → y [tokens, heads · head_dim]. Takes the states of the layer past the
tokens of the step, as `Kernels.mix_states`."""


class StateMixer:
    """The input product gives the gate of each column of y, the channels, and what each head needs.

    A rank has some heads, with their gates and their columns of x, and B and C (keys and queries) of the
    groups of these heads."""

    def __init__(
        self, config: ModelConfig, state: StateConfig, weights: Weights, name: str, inputs: Sequence[str]
    ) -> None:
        """`inputs`: the weights of the parts of the input product. Equal names are one weight."""
        hidden = unsharded(config.hidden_size)
        self.heads = weights.ranks.shard(state.num_heads)
        self.inner = self.heads.of(state.head_dim)
        self.gate_size = self.inner.length
        self.groups = weights.ranks.shard_with_copies(state.groups)
        of_groups = self.groups.of(state.state_size)
        rows = [self.inner, self.inner, of_groups, of_groups, *[self.heads] * (len(inputs) - 4)]
        rows = side_by_side(*rows) if len(set(inputs)) == 1 else rows
        names = [f"{name}.{part}" for part in inputs]
        self.input = weights.linear(names, rows, hidden, bias=state.proj_bias)
        self.out = weights.linear([f"{name}.out_proj"], [hidden], self.inner, bias=state.proj_bias)
        channels = side_by_side(self.inner, of_groups, of_groups)
        kernel = take(weights, f"{name}.conv1d.weight", channels, unsharded(1), unsharded(state.conv_width))
        self.of_both = (
            kernel[:, 0].T.contiguous(),
            take(weights, f"{name}.conv1d.bias", channels) if state.conv_bias else None,
            take(weights, f"{name}.dt_bias", [self.heads]).float(),
            -take(weights, f"{name}.A_log", [self.heads]).float().exp(),
            self.groups.length,
        )
        """The fields of `StateLayer`."""
        self.norm_eps = state.norm_eps
        self.kernels = weights.kernels
        self.ranks = weights.ranks


class Mamba2Mixer(StateMixer):
    """A head needs Δ. With fewer groups than ranks, several ranks hold a group, and the norm of the group
    needs the columns of all of them: they sum its squares first."""

    def __init__(self, config: ModelConfig, state: StateConfig, weights: Weights, name: str) -> None:
        super().__init__(config, state, weights, name, ["in_proj"] * 5)
        d = take(weights, f"{name}.D", [self.heads]).float()
        self.parameters = Mamba2(*self.of_both, d, state.dt_limits)
        self.norm = take(weights, f"{name}.norm.weight", [self.inner])
        self.group_size = state.inner_size // state.groups

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


class GatedDeltaMixer(StateMixer):
    """A head needs Δ and β."""

    def __init__(self, config: ModelConfig, state: StateConfig, weights: Weights, name: str) -> None:
        super().__init__(config, state, weights, name, [f"in_proj_{part}" for part in "zvkqab"])
        self.parameters = GatedDelta(*self.of_both)
        self.norm = weights.take(f"{name}.norm.weight", (state.head_dim,))

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        projected = self.input(x)
        y = mix(layer, projected[:, self.gate_size :], self.parameters)
        return self.out(self.kernels.norm_gate(y, projected[:, : self.gate_size], self.norm, self.norm_eps))


def take(weights: Weights, name: str, parts: list[Shard], *others: Shard) -> Tensor:
    """These parts of the first dimension of a tensor, beneath each other."""
    return weights.stack([name] * len(parts), [(part, *others) for part in parts])


def side_by_side(*parts: Shard) -> list[Shard]:
    """The parts of one dimension that has the dimensions of all these parts side by side."""
    size = sum(part.size for part in parts)
    starts = [sum(part.size for part in parts[:i]) for i in range(len(parts))]
    return [
        Shard(start + part.start, start + part.stop, size) for start, part in zip(starts, parts, strict=True)
    ]
