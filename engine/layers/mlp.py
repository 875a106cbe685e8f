"""The feed-forward part of a layer: an MLP, or a mixture of experts (Shazeer 2017)."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import Both, Choice, Experts, FourBits, Fp8Experts, LinearMethod, Quantized, in_form
from baton.engine.layers.current_step import current_step
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import DTYPES, Stack, Weights
from baton.engine.model_config import Activation, ClampedSwiGLU, ExpertsConfig, ModelConfig, SquaredReLU

MOST_BESIDE = 256
"""Tokens of a step in which a GPU computes the shared expert on a second stream, while it reads the other
experts. With more tokens, the products of either stream fill the GPU."""


class MLP:
    """down(silu(gate(x)) * up(x)), or with another activation. With several ranks, a term of that."""

    def __init__(
        self, config: ModelConfig, weights: Weights, name: str, size: int, activation: Activation = None
    ) -> None:
        """`size`: of the inner columns, on all ranks."""
        hidden, inner = unsharded(config.hidden_size), weights.ranks.shard(size)
        parts = ["up_proj"] if isinstance(activation, SquaredReLU) else ["gate_proj", "up_proj"]
        self.input = weights.linear([f"{name}.{part}" for part in parts], [inner] * len(parts), hidden)
        self.down = weights.linear([f"{name}.down_proj"], [hidden], inner)
        self.kernels = weights.kernels
        self.activation = activation

    def __call__(self, x: Any) -> Tensor:
        return self.down(self._inner(x))

    def _inner(self, x: Any) -> Any:
        """What the down product takes: a tensor, or `Quantized`."""
        grouped = self.down.quantizes(len(x.values if isinstance(x, Quantized) else x))
        if grouped is None and self.activation is None:
            return self.input.silu_mul(x, self.kernels)
        return self.kernels.activate(self.input(x), grouped, self.activation)


class MoE:
    """The weighted sum of the outputs of the experts that a router chooses for each token. An expert is an
    `MLP`, and so is the shared expert, which computes every token. Others may compute on a projection
    of the hidden state (Nemotron 3, 2025). A rank has some of the inner columns
    of every expert, or whole experts. All ranks make the same choice. Each computes a term of the result."""

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertsConfig,
        weights: Weights,
        layer: int,
        name: str,
        router: str = "gate",
        shared: str = "shared_expert",
    ) -> None:
        hidden = unsharded(config.hidden_size)
        of_experts = unsharded(experts.latent_size) if experts.latent_size else hidden
        part, inner = weights.ranks.expert_shards(experts.num_experts, experts.intermediate_size)
        names = [f"{name}.experts.{expert}" for expert in range(experts.num_experts)]
        self.router = weights.linear(
            [f"{name}.{router}"], [unsharded(experts.num_experts)], hidden, bias=experts.bias
        )

        def load(
            kinds: Sequence[str], rows: Shard, columns: Shard
        ) -> tuple[Tensor | Fp8Experts | FourBits, Tensor | None]:
            """Matrices of these projections [own experts, out, in], and their biases [own experts, out]."""
            stacks = [
                Stack(
                    [f"{name}.{kind}_proj" for kind in kinds], [part.only_with(i, rows)] * len(kinds), columns
                )
                for i, name in enumerate(names)
            ]
            parts = [part for stack in stacks for part in stack.rows]
            every = Stack([name for stack in stacks for name in stack.names], parts, columns, experts.bias)
            bias = weights.bias(every)
            experts_bias = None if bias is None else bias.unflatten(0, (part.length, -1))
            return weights.format.experts(weights, stacks), experts_bias

        self.index = experts.layers.index(layer)
        """Among the layers with experts."""
        squared, activation, of_shared = isinstance(experts.activation, SquaredReLU), experts.activation, None
        if experts.limits:
            bounds = [ClampedSwiGLU(None, limit) if limit else None for limit in experts.limits[self.index]]
            activation, of_shared = bounds
        gate_up, gate_up_bias = load(("up",) if squared else ("gate", "up"), inner, of_experts)
        down, down_bias = load(("down",), of_experts, inner)
        if isinstance(gate_up, Fp8Experts) != isinstance(down, Fp8Experts):
            raise ValueError(f"{weights.source}: of the experts of {name} only some matrices are in FP8")
        self.input = self.experts = Experts(
            gate_up,
            down,
            self._choice(experts, weights, f"{name}.{router}"),
            part.start,
            gate_up_bias,
            down_bias,
            activation,
        )
        self.latents: tuple[LinearMethod, LinearMethod] | None = None
        if experts.latent_size:
            before = weights.linear([f"{name}.fc1_latent_proj"], [of_experts], hidden)
            self.latents = before, weights.linear([f"{name}.fc2_latent_proj"], [hidden], of_experts)
        self.shared, self.shared_gate, self.side = None, None, None
        if experts.shared_intermediate_size:
            size = experts.shared_intermediate_size
            of_shared = activation if squared else of_shared
            self.shared = MLP(config, weights, f"{name}.{shared}", size, of_shared)
            if experts.shared_gate:
                gate = weights.take(f"{name}.{shared}_gate.weight", (1, config.hidden_size))
                self.shared_gate = PlainLinear(gate, exact=weights.kernels.exact)
            if weights.device.type == "cuda":
                self.side = _side_stream(weights.device)
        self.kernels = weights.kernels
        self.ranks = weights.ranks

    @staticmethod
    def _choice(experts: ExpertsConfig, weights: Weights, router: str) -> Choice:
        bias = None
        if experts.scoring.is_biased:
            name, size = f"{router}.e_score_correction_bias", unsharded(experts.num_experts)
            bias = weights.stored(name, [size], *DTYPES).float()
        groups = experts.groups, experts.groups_chosen
        return Choice(experts.num_chosen, experts.scoring, *groups, experts.scale, bias)

    def __call__(self, x: Tensor | Both, *, summed: bool = True) -> Any:
        """Not `summed`: for the next norm, which with one rank adds up the experts."""
        summed = summed or self.ranks.size > 1
        plain, inputs = x if isinstance(x, Both) else (x, x)
        shared = None if self.shared is None else self._shared(plain, inputs, self.shared)
        step = current_step()
        assert step.expert_counts is not None, "the model has experts"
        counts = step.expert_counts[self.index]
        logits, slots = self.router(plain), step.slots
        if self.latents is None:
            return self.kernels.mix_experts(
                x, logits, self.experts, counts, slots=slots, shared=shared, summed=summed
            )
        before, after = self.latents
        latents = before(plain)
        x = in_form(latents, self.kernels, self.experts.quantizes(len(latents)), both=True)
        y = after(self.kernels.mix_experts(x, logits, self.experts, counts, slots=slots))
        return y if shared is None else y.add_(shared())

    def _shared(self, plain: Tensor, inputs: Tensor | Quantized, expert: MLP) -> Callable[[], Tensor]:
        """What the shared expert computes: now on a second stream, or when the result is asked for."""
        if (side := self.side) is None or len(plain) > MOST_BESIDE:
            return partial(self._gated, plain, inputs, expert)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            computed = self._gated(plain, inputs, expert)

        def joined() -> Tensor:
            torch.cuda.current_stream().wait_stream(side)
            return computed

        return joined

    def _gated(self, plain: Tensor, inputs: Tensor | Quantized, expert: MLP) -> Tensor:
        alike = expert.input.quantizes(len(plain)) == self.experts.quantizes(len(plain))
        y = expert(inputs if alike else plain)
        return y if self.shared_gate is None else y.mul_(self.shared_gate(plain).sigmoid_())


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A second stream of this device, which all layers share.

    A CUDA graph that captures the current stream captures both. The allocator gives the memory of a result to
    later work of the second stream only. That work begins after what the current stream launched before it,
    so it overwrites nothing that is still read."""
    return torch.cuda.Stream(device)
