"""Index shuffling of a mixture of experts: routes tokens, and lists the pairs that each expert computes.

A *pair* is a token with one of its experts: pair = token · chosen + choice. A program chooses the experts of
a few tokens, those with the largest logits, and appends each pair to the list of its expert. Each list has
room for all tokens, since all may choose the same expert. So a list begins at a fixed place, and one kernel
is enough. (MetaShuffling, Meta 2025, computes offsets instead.)

The order within a list depends on timing. It changes only which row of a tile a pair has.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options, next_may_begin
from baton.engine.kernels.moe.experts import Choice
from baton.engine.model_config import Scoring

BLOCK = 1024  # logits of a program
LOWEST = tl.constexpr(-(1 << 62))  # below the key of every logit


class Shuffled(NamedTuple):
    """The pairs of a step, by expert."""

    weights: Tensor  # [tokens, chosen] float32: of each pair; 0: in no list
    counts: Tensor  # [experts] int32: pairs of each expert
    pairs: Tensor  # [experts, tokens] int32: of each expert, the first counts[expert] are defined
    among: int  # experts that tokens choose from, those of other ranks included


def shuffle(
    logits: Tensor, counts: Tensor, choice: Choice, slots: Tensor | None = None, local: range | None = None
) -> Shuffled:
    """Routes as `moe.experts.route` does, by logits [tokens, experts] with dense rows. Of equal
    logits, the first is chosen. `counts` must be zero, and becomes the pairs of each expert. The result has
    the pairs of the experts `local`; None: of all. A token with slot −1 has no pair. slots [tokens] int64;
    None: all tokens have pairs."""
    assert logits.is_contiguous(), "the kernel assumes dense rows"
    num_chosen, scoring, groups, groups_chosen, scale, bias = choice
    (tokens, experts), device = logits.shape, logits.device
    weights = torch.empty(tokens, num_chosen, dtype=torch.float32, device=device)
    local = local or range(experts)
    pairs = torch.empty(len(local), tokens, dtype=torch.int32, device=device)
    columns = triton.next_power_of_2(experts)
    rows = max(1, BLOCK // columns)
    _shuffle[(triton.cdiv(tokens, rows),)](
        logits,
        bias,
        slots,
        weights,
        counts,
        pairs,
        scale,
        tokens,
        local.start,
        experts,
        ROWS=rows,
        COLUMNS=columns,
        CHOSEN=num_chosen,
        CHOICES=triton.next_power_of_2(num_chosen),
        LOCAL=len(local),
        SIGMOID=scoring is Scoring.SIGMOID_ON_INPUT,
        NORMALIZED=scoring in (Scoring.NORMALIZED_SOFTMAX, Scoring.NORMALIZED_SIGMOID),
        GROUPS=groups,
        GROUPS_CHOSEN=groups_chosen,
        num_warps=4,
        **launch_options(),
    )
    return Shuffled(weights, counts[local.start : local.stop], pairs, experts)


@triton.jit(do_not_specialize=["tokens", "first"])
def _shuffle(
    logits,
    bias,
    slots,
    weights,
    counts,
    pairs,
    scale,
    tokens,
    first,
    experts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    LOCAL: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
):
    next_may_begin()
    token, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    biases, has_experts = 0.0, token < tokens
    if bias is not None:
        biases = tl.load(bias + expert, mask=expert < experts, other=0.0)[None, :]
    if slots is not None:
        has_experts = tl.load(slots + token, mask=has_experts, other=-1) >= 0
    inputs_ready()
    real = token < tokens
    inside = real[:, None] & (expert < experts)[None, :]
    at = token.to(tl.int64)[:, None] * experts + expert[None, :]
    x = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    x = tl.where(real[:, None], x, 0.0)  # a row of −∞ would give NaN
    x = tl.where(x == x, x, -float("inf"))  # padding rows may have NaN; each choice must be an expert
    ranked, scores = x, x
    if bias is not None:
        scores = tl.sigmoid(x)
        ranked = scores + biases
    if GROUPS > 1:
        ranked = _in_best_groups(ranked, expert, experts // GROUPS, GROUPS, GROUPS_CHOSEN, bias is not None)
    # The lower bits of a key choose the first of equal logits.
    keys = _ordered(ranked.to(tl.int32, bitcast=True)).to(tl.int64) * COLUMNS
    keys += (COLUMNS - 1 - expert)[None, :]
    keys = tl.where((expert < experts)[None, :], keys, LOWEST)
    choice = tl.arange(0, CHOICES)
    best, weight = tl.zeros([ROWS, CHOICES], tl.int64), tl.zeros([ROWS, CHOICES], tl.float32)
    for i in tl.static_range(CHOSEN):
        highest = tl.max(keys, axis=1)[:, None]
        if bias is not None:
            score = tl.sum(tl.where(keys == highest, scores, 0.0), axis=1)[:, None]
            weight = tl.where((choice == i)[None, :], score, weight)
        keys = tl.where(keys == highest, LOWEST, keys)
        best = tl.where((choice == i)[None, :], highest, best)
    used = (choice < CHOSEN)[None, :]
    lower = best & (COLUMNS - 1)
    logit = _ordered(((best - lower) // COLUMNS).to(tl.int32)).to(tl.float32, bitcast=True)
    if bias is not None:
        weight /= tl.sum(weight, axis=1)[:, None] if NORMALIZED else 1.0
    elif SIGMOID:
        weight = tl.sigmoid(logit)
    else:
        highest = tl.max(x, axis=1)[:, None]
        weight = tl.exp(logit - highest)
        among = tl.where(used, weight, 0.0) if NORMALIZED else tl.exp(x - highest)
        weight /= tl.sum(among, axis=1)[:, None]
    is_pair = real[:, None] & used
    pair = token[:, None] * CHOSEN + choice[None, :]
    chosen = COLUMNS - 1 - lower
    is_held = (chosen >= first) & (chosen < first + LOCAL) & has_experts[:, None]
    tl.store(weights + pair, tl.where(is_held, weight * scale, 0.0), mask=is_pair)
    place = tl.atomic_add(counts + chosen, 1, mask=is_pair & has_experts[:, None], sem="relaxed")
    tl.store(pairs + (chosen - first) * tokens + place, pair, mask=is_pair & is_held)


@triton.jit
def _in_best_groups(
    ranked, expert, size, GROUPS: tl.constexpr, GROUPS_CHOSEN: tl.constexpr, BEST_TWO: tl.constexpr
):
    """−∞ in place of the experts of all groups but the best ones, which have `size` experts each."""
    group, index = expert // size, tl.arange(0, triton.next_power_of_2(GROUPS))
    best = tl.full([ranked.shape[0], index.shape[0]], -float("inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        of_group = tl.where((group == i)[None, :], ranked, -float("inf"))
        score = tl.max(of_group, axis=1)
        if BEST_TWO:
            first = tl.argmax(of_group, axis=1)
            score += tl.max(tl.where(expert[None, :] == first[:, None], -float("inf"), of_group), axis=1)
        best = tl.where((index == i)[None, :], score[:, None], best)
    kept = tl.zeros(ranked.shape, tl.int1)
    for _ in tl.static_range(GROUPS_CHOSEN):
        first = tl.argmax(best, axis=1)
        kept |= group[None, :] == first[:, None]
        best = tl.where(index[None, :] == first[:, None], -float("inf"), best)
    return tl.where(kept, ranked, -float("inf"))


@triton.jit
def _ordered(bits):
    """int32 numbers in the order of the floats that have these bits. Its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
