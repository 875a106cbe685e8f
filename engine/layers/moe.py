"""The feed-forward part of a layer with a mixture of experts (Shazeer 2017)."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.mlp import GatedMLP
from baton.engine.layers.ranks import whole
from baton.engine.layers.side_stream import beside, join, side_stream
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ExpertsConfig, ModelConfig

MOST_BESIDE = 64
"""Tokens of a step in which a GPU computes the shared expert on a second stream. With more tokens, the
products of either stream fill the GPU."""


class MoE:
    """The weighted sum of the outputs of the experts that a router chooses for each token. An expert is a
    `GatedMLP`, and so is the shared expert, which computes every token. A rank has some of the inner columns
    of every expert, or whole experts. All ranks make the same choice. Each computes a term of the result."""

    def __init__(
        self, config: ModelConfig, experts: ExpertsConfig, weights: Weights, name: str, router: str = "gate"
    ) -> None:
        hidden = whole(config.hidden_size)
        own, inner = weights.ranks.expert_parts(experts.num_experts, experts.intermediate_size)
        names = [f"{name}.experts.{expert}" for expert in range(experts.num_experts)]
        self.router = weights.linear(
            [f"{name}.{router}"], [whole(experts.num_experts)], hidden, bias=experts.bias
        )
        self.gate_up = weights.experts(  # [own experts, 2 * inner, hidden_size]
            [(f"{name}.gate_proj", f"{name}.up_proj") for name in names],
            [own.here(expert, inner) for expert in range(len(names))],
            hidden,
        )
        self.down = weights.experts(  # [own experts, hidden_size, inner]
            [(f"{name}.down_proj",) for name in names],
            [own.here(expert, hidden) for expert in range(len(names))],
            inner,
        )
        if isinstance(self.gate_up, Tensor) != isinstance(self.down, Tensor):
            raise ValueError(f"{weights.source}: of the experts of {name} only some matrices are in FP8")
        self.gate_up_bias: Tensor | None = None  # [own experts, 2 * inner]
        self.down_bias: Tensor | None = None  # [own experts, hidden_size]
        if experts.bias:
            self.gate_up_bias = weights.stack(
                [f"{name}.{half}_proj.bias" for name in names for half in ("gate", "up")],
                [(own.here(expert, inner),) for expert in range(len(names)) for _ in range(2)],
            ).unflatten(0, (own.length, -1))
            rows = [own.here(expert, hidden) for expert in range(len(names))]
            down_bias = weights.bias([f"{name}.down_proj" for name in names], rows, inner)
            self.down_bias = None if down_bias is None else down_bias.unflatten(0, (own.length, -1))
        self.first = own.start
        self.shared, self.shared_gate, self.side = None, None, None
        if experts.shared_intermediate_size:
            size = experts.shared_intermediate_size
            self.shared = GatedMLP(config, weights, f"{name}.shared_expert", size)
            if experts.shared_gate:
                self.shared_gate = weights.take(f"{name}.shared_expert_gate.weight", (1, config.hidden_size))
            if weights.device.type == "cuda":
                self.side = side_stream(weights.device)
        assert weights.expert_load is not None, "the model has experts"
        self.load = weights.expert_load
        self.counts = self.load.next_layer()
        self.num_chosen = experts.num_chosen
        self.scoring = experts.scoring
        self.activation = experts.activation
        self.kernels = weights.kernels

    def __call__(self, x: Tensor) -> Tensor:
        shared = None if self.shared is None else self._shared(x, self.shared)
        return self.kernels.mix_experts(
            x,
            self.router(x),
            self.gate_up,
            self.down,
            self.counts,
            self.num_chosen,
            self.scoring,
            slots=self.load.slots,
            first=self.first,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            activation=self.activation,
            shared=shared,
        )

    def _shared(self, x: Tensor, expert: GatedMLP) -> Callable[[], Tensor]:
        """What the shared expert computes: now on a second stream, or when the result is asked for."""
        if self.side is None or len(x) > MOST_BESIDE:
            return partial(self._gated, x, expert)
        with beside(self.side):
            computed = self._gated(x, expert)

        def joined() -> Tensor:
            assert self.side is not None
            join(self.side)
            return computed

        return joined

    def _gated(self, x: Tensor, expert: GatedMLP) -> Tensor:
        if self.shared_gate is None:
            return expert(x)
        return expert(x).mul_(F.linear(x, self.shared_gate).sigmoid_())
