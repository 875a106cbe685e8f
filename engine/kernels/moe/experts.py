"""Mixture of experts in plain torch: it defines the result, and runs on a CPU.

route: logits of the router ─▶ experts and weights of each token
mix:   sort the tokens by expert ─▶ the products of each expert that has tokens ─▶ sum by token
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.blocks_of_rows import in_blocks, in_sizes
from baton.engine.kernels.quantized.reference import FourBits, Fp8Experts
from baton.engine.model_config import Activation, GeLU, Scoring, SquaredReLU


class Choice(NamedTuple):
    """How a token chooses among all experts of a layer: those with the largest scores, within some groups."""

    num_chosen: int
    scoring: Scoring
    """Defines their weights."""
    groups: int = 1
    groups_chosen: int = 1
    scale: float = 1.0
    """As in `ExpertsConfig`."""
    bias: Tensor | None = None  # [experts] float32: is added to the scores, for the choice only


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The experts of one layer that this rank holds, and how a token chooses among all experts."""

    gate_up: Tensor | Fp8Experts | FourBits  # [held, 2 * inner, size]; [held, inner, size] for `SquaredReLU`
    down: Tensor | Fp8Experts | FourBits  # [held, size, inner]
    choice: Choice
    """How a token chooses its experts."""
    first: int = 0
    """The first expert that is held. Those that are not add nothing to the sum."""
    gate_up_bias: Tensor | None = None  # [held, 2 * inner]
    down_bias: Tensor | None = None  # [held, size]
    activation: Activation = None

    takes_both: ClassVar[bool] = True
    """The router takes the plain form."""

    def quantizes(self, rows: int) -> bool | None:
        """As in `LinearMethod`."""
        return self.gate_up.grouped if isinstance(self.gate_up, Fp8Experts) else None


class Routing(NamedTuple):
    """The experts of each token."""

    experts: Tensor  # [tokens, chosen] int64
    weights: Tensor  # [tokens, chosen] float32
    on_input: bool  # the weights multiply the inputs of the experts, not their outputs


class Terms(NamedTuple):
    """A mixture of experts, not added up yet."""

    rows: Tensor  # [pairs, size]: of the experts of each token
    weights: Tensor  # [tokens, chosen] float32: of each pair; 0: its row is not read
    shared: Tensor | None  # [tokens, size]: of the shared expert
    weighted: bool  # False: the weights only say which rows to add


def route(logits: Tensor, choice: Choice) -> Routing:
    """Chooses experts by their logits [tokens, experts]."""
    num_chosen, scoring, groups, groups_chosen, scale, bias = choice
    if scoring is Scoring.SIGMOID_ON_INPUT:
        highest, experts = logits.topk(num_chosen, dim=-1)
        return Routing(experts, highest.float().sigmoid(), on_input=True)
    scores = logits.float().sigmoid() if scoring.is_biased else logits.softmax(dim=-1, dtype=torch.float32)
    ranked = scores if bias is None else scores + bias
    if groups > 1:
        by_group = ranked.unflatten(1, (groups, -1))
        best = by_group.topk(1 if bias is None else 2, dim=-1).values.sum(dim=-1)
        left_out = best.topk(groups - groups_chosen, dim=-1, largest=False).indices
        of_left_out = left_out[..., None].expand(-1, -1, by_group.shape[2])
        ranked = by_group.scatter(1, of_left_out, float("-inf")).flatten(1)
    experts = ranked.topk(num_chosen, dim=-1).indices
    weights = scores.gather(1, experts)
    if scoring in (Scoring.NORMALIZED_SOFTMAX, Scoring.NORMALIZED_SIGMOID):
        weights /= weights.sum(dim=-1, keepdim=True)
    return Routing(experts, weights * scale, on_input=False)


def mix(
    x: Tensor,
    routing: Routing,
    counts: Sequence[int],
    gate_up: Tensor,
    down: Tensor,
    experts: Experts,
    rounded: Callable[[Tensor], Tensor] | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """The weighted sum of down(silu(gate(x)) * up(x)) over the experts of each row of x [tokens, size].

    `counts` has the number of tokens of each expert. gate_up [held, 2 * inner, size] and down [held, size,
    inner] are the exact values of those in `experts`; other experts add nothing. `rounded` applies to the
    input of down. A token's terms are added in the order of `routing`, which other tokens do not change.
    `exact`: as in `Kernels`."""
    first = experts.first
    before, counts = sum(counts[:first]), counts[first : first + len(gate_up)]
    order = routing.experts.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
    order = order[before : before + sum(counts)]
    weights, inputs = routing.weights.to(x.dtype), x[order // routing.experts.shape[1]]
    if routing.on_input:
        inputs *= weights.flatten()[order, None]
        weights = torch.ones_like(weights)
    products = partial(_products, exact=exact)
    inner = activated(products(inputs, gate_up, experts.gate_up_bias, counts), experts.activation)
    inner = inner if rounded is None else rounded(inner)
    sorted_out = products(inner, down, experts.down_bias, counts)
    out = x.new_zeros(routing.experts.numel(), x.shape[1]).index_copy_(0, order, sorted_out)
    terms = out.unflatten(0, routing.experts.shape)
    if not exact:
        return torch.bmm(weights[:, None], terms).squeeze(1)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for i in range(weights.shape[1]):
        total += terms[:, i].float() * weights[:, i, None]
    return total.to(x.dtype)


def activated(gate_up: Tensor, activation: Activation) -> Tensor:
    if isinstance(activation, SquaredReLU):
        return F.relu(gate_up).square_()
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is None:
        return F.silu(gate).mul_(up)
    if isinstance(activation, GeLU):
        return F.gelu(gate, approximate="tanh").mul_(up)
    up = up.clamp(-activation.limit, activation.limit)
    if activation.alpha is None:
        return F.silu(gate).clamp_max_(activation.limit).mul_(up)
    gate = gate.clamp_max(activation.limit)
    return torch.sigmoid(activation.alpha * gate).mul_(gate).mul_(up + 1)


def _products(
    x: Tensor, weights: Tensor, biases: Tensor | None, counts: Sequence[int], *, exact: bool
) -> Tensor:
    """x Wᵀ + b, where the first counts[0] rows of x are for weights[0], and so on."""
    out = x.new_empty(len(x), weights.shape[1])
    form = in_blocks if exact else in_sizes
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            out[rows] = form(partial(torch.mm, mat2=weights[expert].T), x[rows])
            if biases is not None:
                out[rows] += biases[expert]
            start += count
    return out
