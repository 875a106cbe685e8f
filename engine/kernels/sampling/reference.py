"""From logits to tokens, and from these to the next step, in plain torch. It defines the results, and runs on
a CPU."""

import torch
from torch import Tensor

SMALLEST_TEMPERATURE = 1e-5
"""Lower temperatures above 0 count as this one, since logits / temperature might overflow."""

CANDIDATES = 256
"""Most likely tokens that `thresholds` sorts first. It sorts more if these do not decide."""


def with_sampled(token_ids: Tensor, rows: Tensor, sampled: Tensor) -> Tensor:
    """[tokens] int64: the tokens that a step sampled in these rows, and where the row is −1, those of
    `token_ids`. Both are [tokens] int32. A token is 0 if its row has none: its request fails."""
    of_rows = sampled[:, 0].index_select(0, rows.clamp_min(0)).clamp_min(0)
    return torch.where(rows < 0, token_ids, of_rows)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """For logits [rows, vocabulary] float32: the column of the largest logit [rows] int64, and whether
    the whole row is finite [rows] bool. A row that is not finite gets any column."""
    return logits.argmax(dim=-1), logits.isfinite().all(dim=-1)


def draw(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    probs: Tensor | None = None,
    cutoffs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `greedy`, but samples at temperature [rows] float32 (0: greedy).

    This is a race of exponential clocks, also known as the Gumbel-max trick: token i wins with
    probability p[i]. The clocks of a row are a function of its key, keys [rows] int32. With probs
    [rows, vocabulary] (softmax of logits / temperature) and cutoffs [rows], only tokens with at least this
    probability take part.

    One random number per row, looked up in the cumulative distribution, would be less stable. A rounding
    error in any logit would move all boundaries; here it matters only if it swaps the first two."""
    tokens, finite = greedy(logits)
    if probs is None or cutoffs is None:
        probs = torch.softmax(logits / temperature.clamp_min(SMALLEST_TEMPERATURE)[:, None], dim=-1)
    else:
        probs = torch.where(probs < cutoffs[:, None], 0.0, probs)
    raced = (probs / exponentials(keys, logits.shape[1])).argmax(dim=-1)
    return torch.where(temperature > 0, raced, tokens), finite


def thresholds(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[rows]: the smallest probability that a token may have, in each row of probs [rows, vocabulary].
    top_k [rows] int32 applies first (vocabulary: no limit), then top_p [rows] (above 1: no limit). A
    token also needs min_p [rows] times the largest probability."""
    vocabulary = probs.shape[1]
    top_k, top_p = top_k[:, None], top_p[:, None]
    width = min(vocabulary, max(CANDIDATES, int(torch.where(top_k < vocabulary, top_k, 0).max())))
    while True:
        best = probs.topk(width, dim=-1).values
        allowed = best.masked_fill(torch.arange(width) >= top_k, 0.0)
        total = torch.where(top_k <= width, allowed.sum(dim=-1, keepdim=True), 1.0)
        kept = (allowed > 0) & (allowed.cumsum(dim=-1) - allowed < top_p * total)
        count = kept.sum(dim=-1, keepdim=True).clamp_min(1)
        undecided = (count == width) & (top_k > width) & (top_p < 1)
        if width == vocabulary or not undecided.any():
            break
        width = min(vocabulary, 16 * width)
    smallest = best.gather(1, count - 1)
    unlimited = (top_k >= vocabulary) & (top_p > 1)
    return torch.maximum(torch.where(unlimited, 0.0, smallest)[:, 0], min_p * best[:, 0])


def exponentials(keys: Tensor, count: int) -> Tensor:
    """[keys, count] exponentially distributed random numbers. Each is a hash (Wellons' lowbias32) of its key,
    int32, and its column. The smallest numbers are the most exact, since they decide the race."""
    columns = torch.arange(count, dtype=torch.int32, device=keys.device) * (0x9E3779B1 - (1 << 32))
    x = keys[:, None] ^ columns
    # Masked, because a right shift of int32 copies the sign.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    uniform = x.float().add_(0.5).mul_(2.0**-32)  # in (-½, ½), and finest around 0
    uniform.sub_(uniform.floor())
    return uniform.neg_().log1p_().neg_()
