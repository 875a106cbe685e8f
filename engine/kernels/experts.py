"""Mixture of experts in plain torch: it defines the result, and runs on a CPU.

route: logits of the router ─▶ experts and weights of each token
mix:   sort the tokens by expert ─▶ the products of each expert that has tokens ─▶ sum by token
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Routing(NamedTuple):
    """The experts of each token."""

    experts: Tensor  # [tokens, chosen] int64
    weights: Tensor  # [tokens, chosen] float32


def route(logits: Tensor, num_chosen: int, *, normalized: bool) -> Routing:
    """Chooses the most probable experts by logits [tokens, experts]. Their weights are the probabilities; if
    `normalized`, scaled to a sum of 1."""
    weights, experts = logits.softmax(dim=-1, dtype=torch.float32).topk(num_chosen, dim=-1)
    if normalized:
        weights /= weights.sum(dim=-1, keepdim=True)
    return Routing(experts, weights)


def mix(x: Tensor, routing: Routing, counts: Sequence[int], gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of down(silu(gate(x)) * up(x)) over the experts of each row of x [tokens, size].

    `counts` has the number of tokens of each expert. gate_up [experts, 2 * inner, size] and down [experts,
    size, inner]. A token's terms are added in the order of `routing`, which other tokens do not change."""
    order = routing.experts.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
    gate, up = _products(x[order // routing.experts.shape[1]], gate_up, counts).chunk(2, dim=-1)
    sorted_out = _products(F.silu(gate).mul_(up), down, counts)
    out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
    weights = routing.weights.to(x.dtype)[:, None]  # [tokens, 1, chosen]
    return torch.bmm(weights, out.unflatten(0, routing.experts.shape)).squeeze(1)


def _products(x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """x Wᵀ, where the first counts[0] rows of x are for weights[0], and so on."""
    out = x.new_empty(len(x), weights.shape[1])
    start = 0
    for weight, count in zip(weights, counts, strict=True):
        if count:
            rows = slice(start, start + count)
            torch.mm(x[rows], weight.T, out=out[rows])
            start += count
    return out
