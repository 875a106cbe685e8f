"""What takes the place of attention in a state layer: Mamba-2 (Dao & Gu 2024), the gated delta rule (Yang
2024), KDA (Kimi Linear, 2025), or a short convolution (LFM2, 2025)."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from baton.engine.kernels import (
    Both,
    GatedDelta,
    KimiDelta,
    Mamba2,
    Rates,
    ShortConvolution,
    StateLayer,
)
from baton.engine.layers.partly_quantized import product, side_by_side
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig, StateConfig

Mix = Callable[[int, Tensor, Rates, StateLayer], Tensor]
"""(layer, x, rates, parameters) → y [tokens, heads · head_dim]. Takes the states of the layer past the
tokens of the step, as `Kernels.mix_states`."""


class StateMixer:
    """The input product gives the gate of each column of y, the channels, and what each head needs.

    A rank has some heads, with their gates and their columns of x, and B and C (keys and queries) of the
    groups of these heads."""

    convolved: ClassVar[Sequence[str]] = ("conv1d",) * 3
    """The convolutions of x, of B and of C. Equal names are one weight, with the channels in this order."""
    output: ClassVar[str] = "out_proj"

    def __init__(
        self,
        config: ModelConfig,
        state: StateConfig,
        weights: Weights,
        name: str,
        wide: Sequence[str],
        narrow: Sequence[tuple[str, Shard]],
    ) -> None:
        """The weights of the parts of the input product, where equal names are one weight. `wide`: of the
        gate, if x has one here, and of the channels. `narrow`: what a head needs, with its rows."""
        hidden = unsharded(config.hidden_size)
        self.heads = weights.ranks.shard(state.num_heads)
        self.inner = self.heads.of(state.head_dim)
        self.groups = weights.ranks.shard_with_copies(state.groups)
        of_groups = self.groups.of(state.state_size)
        channels = [self.inner, of_groups, of_groups]
        rows = [*[self.inner] * (len(wide) - 3), *channels]
        self.sizes = [sum(part.length for part in parts) for parts in (rows[:-3], channels)]
        self.sizes += [part.length for _, part in narrow]
        self.input = product(
            weights, name, [*zip(wide, rows, strict=True)], narrow, hidden, bias=state.proj_bias
        )
        self.out = weights.linear([f"{name}.{self.output}"], [hidden], self.inner, bias=state.proj_bias)
        kernels = [f"{name}.{part}.weight" for part in self.convolved]
        parts = side_by_side(*channels) if len({*kernels}) == 1 else channels
        width = (unsharded(1), unsharded(state.conv_width))
        kernel = weights.stack(kernels, [(part, *width) for part in parts])
        biases = [f"{name}.{part}.bias" for part in self.convolved]
        self.convolution = (
            kernel[:, 0].T.contiguous(),
            weights.stack(biases, [(part,) for part in parts]) if state.conv_bias else None,
        )
        self.rate = -take(weights, f"{name}.A_log", [self.heads]).float().exp()
        self.norm_eps = state.norm_eps
        self.kernels = weights.kernels
        self.ranks = weights.ranks

    def project(self, x: Tensor | Both) -> Sequence[Tensor]:
        """The gate, the channels, and each narrow part."""
        made = self.input(x)
        if isinstance(made, Tensor):
            return made.split(self.sizes, dim=1)
        wide, narrow = made
        return *wide.split(self.sizes[:2], dim=1), *narrow.split(self.sizes[2:], dim=1)


class Mamba2Mixer(StateMixer):
    """A head needs Δ. With fewer groups than ranks, several ranks hold a group, and the norm of the group
    needs the columns of all of them: they sum its squares first."""

    def __init__(self, config: ModelConfig, state: StateConfig, weights: Weights, name: str) -> None:
        heads = weights.ranks.shard(state.num_heads)
        super().__init__(config, state, weights, name, ["in_proj"] * 4, [("in_proj", heads)])
        dt_bias, d = (take(weights, f"{name}.{part}", [heads]).float() for part in ("dt_bias", "D"))
        groups = self.groups.length
        self.parameters = Mamba2(*self.convolution, dt_bias, self.rate, groups, d, state.dt_limits)
        self.norm = take(weights, f"{name}.norm.weight", [self.inner])
        self.group_size = state.inner_size // state.groups

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        gate, x, dt = self.project(x)
        y, groups = mix(layer, x, [dt], self.parameters), self.parameters.groups
        squares = self._squares(y, gate) if gate.shape[1] < groups * self.group_size else None
        return self.out(self.kernels.gated_rms_norm(y, gate, self.norm, self.norm_eps, groups, squares))

    def _squares(self, y: Tensor, gate: Tensor) -> Tensor:
        """The mean of the squares of this rank's group [tokens], from all ranks that hold a part of it."""
        of_groups = torch.zeros(len(y), self.groups.size, device=y.device)
        of_groups[:, self.groups.start] = self.kernels.gated_squares(y, gate) / self.group_size
        return self.ranks.all_reduce(of_groups)[:, self.groups.start]


class GatedDeltaMixer(StateMixer):
    """A head needs Δ and β."""

    def __init__(self, config: ModelConfig, state: StateConfig, weights: Weights, name: str) -> None:
        heads = weights.ranks.shard(state.num_heads)
        wide = [f"in_proj_{part}" for part in "zvkq"]
        super().__init__(config, state, weights, name, wide, [("in_proj_a", heads), ("in_proj_b", heads)])
        dt_bias = take(weights, f"{name}.dt_bias", [heads]).float()
        self.parameters = GatedDelta(*self.convolution, dt_bias, self.rate, self.groups.length)
        self.norm = weights.take(f"{name}.norm.weight", (state.head_dim,))

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        gate, x, dt, beta = self.project(x)
        y = mix(layer, x, [dt, beta], self.parameters)
        return self.out(self.kernels.norm_gate(y, gate, self.norm, self.norm_eps))


class KimiDeltaMixer(StateMixer):
    """A head needs β, and Δ of each dimension of its key. That and the gate are made in two products, whose
    inner columns all ranks hold."""

    convolved = ("v_conv1d", "k_conv1d", "q_conv1d")
    output = "o_proj"

    def __init__(self, config: ModelConfig, state: StateConfig, weights: Weights, name: str) -> None:
        heads, low = weights.ranks.shard(state.num_heads), unsharded(state.head_dim)
        # The inner columns come first: kernels take rows that begin at a multiple of 16 bytes.
        narrow = [("f_a_proj", low), ("g_a_proj", low), ("b_proj", heads)]
        super().__init__(config, state, weights, name, ["v_proj", "k_proj", "q_proj"], narrow)
        self.sizes = [*self.sizes[:2], 2 * low.length, heads.length]
        of_keys = heads.of(state.state_size)
        self.decay = weights.linear([f"{name}.f_b_proj"], [of_keys], low)
        self.gate = weights.linear([f"{name}.g_b_proj"], [self.inner], low)
        dt_bias = take(weights, f"{name}.dt_bias", [of_keys]).float()
        self.parameters = KimiDelta(*self.convolution, dt_bias, self.rate, heads.length)
        self.norm = weights.take(f"{name}.o_norm.weight", (state.head_dim,))

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        _, x, low, beta = self.project(x)
        # Kernels take dense rows. Of a single row this is no copy.
        decay, gate = low.unflatten(1, (2, -1)).transpose(0, 1).contiguous()
        y = mix(layer, x, [self.decay(decay), beta], self.parameters)
        gate = self.gate(gate)
        return self.out(self.kernels.norm_gate(y, gate, self.norm, self.norm_eps, sigmoid=True))


class ShortConvMixer:
    """Gates before and after a convolution of each column. A rank has the columns of some heads."""

    def __init__(self, config: ModelConfig, state: StateConfig, weights: Weights, name: str) -> None:
        hidden = unsharded(config.hidden_size)
        columns = weights.ranks.shard(state.num_heads).of(state.head_dim)
        parts = side_by_side(columns, columns, columns)
        self.input = weights.linear([f"{name}.in_proj"] * 3, parts, hidden, bias=state.proj_bias)
        self.out = weights.linear([f"{name}.out_proj"], [hidden], columns, bias=state.proj_bias)
        kernel = take(weights, f"{name}.conv.weight", [columns], unsharded(1), unsharded(state.conv_width))
        bias = take(weights, f"{name}.conv.bias", [columns]) if state.conv_bias else None
        self.parameters = ShortConvolution(kernel[:, 0].T.contiguous(), bias)

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        before, after, x = self.input(x).chunk(3, dim=1)
        return self.out(mix(layer, before * x, (), self.parameters).mul_(after))


def take(weights: Weights, name: str, parts: list[Shard], *others: Shard) -> Tensor:
    """These parts of the first dimension of a tensor, beneath each other."""
    return weights.stack([name] * len(parts), [(part, *others) for part in parts])
