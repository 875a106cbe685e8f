"""From logits to tokens, for all sampled rows of a step at once, and to log probabilities, also of prompts.

The result of a row depends on that row alone: its random number is a function of (seed, position). So a
request gets the same tokens in any batch and on any worker.

On a GPU nothing in this file waits for the device. `choose` is all that most requests need, and runs within
CUDA graphs; `adjust` and `top_logprobs` are launched around it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from baton.engine.kernels import SMALLEST_TEMPERATURE, Kernels
from baton.engine.kernels.upload import upload
from baton.engine.step import NO_CHOICE, NOT_FINITE, Draws, Scored, Variant
from baton.engine.step_adjustments import Adjustments, Bias, Penalties, ScoredLogprobs, TokenMask

PIECE = 256
"""Rows of a prompt with logits that exist at a time. The logits of a long prompt are far larger than its KV:
a row has a number for each token of the vocabulary. Only what was asked for stays."""


def choose(
    adjusted: Tensor, logits: Tensor, variant: Variant, draws: Draws[Tensor], kernels: Kernels
) -> Tensor:
    """[rows] int64: a token of each row of adjusted [rows, vocabulary], float32; `NOT_FINITE` where the
    model's own logits are not all finite; or `NO_CHOICE`. Draws are on the device."""
    if variant is Variant.GREEDY:
        tokens, finite = kernels.greedy(adjusted)
    else:
        probs = cutoffs = None
        if variant is Variant.FILTERED:
            probs = torch.softmax(adjusted / draws.temperature.clamp_min(SMALLEST_TEMPERATURE)[:, None], -1)
            cutoffs = kernels.thresholds(probs, draws.top_k, draws.top_p, draws.min_p)
        tokens, finite = kernels.draw(adjusted, draws.temperature, draws.keys, probs, cutoffs)
    if adjusted is not logits:
        _, finite = kernels.greedy(logits)
        # −∞ bars a token, so only the largest must be finite. It is NaN if any logit is.
        tokens = torch.where(adjusted.amax(dim=-1).isfinite(), tokens, NO_CHOICE)
    return torch.where(finite, tokens, NOT_FINITE)


def adjust(logits: Tensor, adjustments: Adjustments, newest: Tensor) -> Tensor:
    """The model's logits [rows, vocabulary] float32 with bias, penalties and grammars applied. Returns a
    copy, or `logits` if nothing changes; never writes into `logits`. `newest` [rows of the step before] has
    the tokens that `Penalties.pending` refers to."""
    adjusted = logits
    if adjustments.bias is not None:
        adjusted = _biased(adjusted, adjustments.bias)
    if adjustments.penalties is not None:
        adjusted = _penalised(adjusted, adjustments.penalties, newest)
    if adjustments.mask is not None:
        adjusted = _masked(adjusted, logits, adjustments.mask)
    return adjusted


def _biased(logits: Tensor, bias: Bias) -> Tensor:
    index = _moved(bias.rows, logits), _moved(bias.tokens, logits)
    return logits.index_put(index, _moved(bias.values, logits), accumulate=True)


def _penalised(logits: Tensor, penalties: Penalties, newest: Tensor) -> Tensor:
    rows, vocabulary = len(penalties.rows), logits.shape[1]

    def counts(row: np.ndarray, tokens: np.ndarray) -> Tensor:  # [rows, vocabulary]
        where = _moved(row * vocabulary + tokens, logits)
        ones = torch.ones(len(where), dtype=torch.int32, device=logits.device)
        zeros = torch.zeros(rows * vocabulary, dtype=torch.int32, device=logits.device)
        return zeros.index_add_(0, where, ones).view(rows, vocabulary)

    generated = counts(*penalties.output)
    to, source = penalties.pending
    if len(to):
        # A negative token means that its request fails, so its row does not matter.
        generated[_moved(to, logits), newest[_moved(source, logits)].clamp_min(0)] += 1
    seen = counts(*penalties.prompt) + generated > 0
    index = _moved(penalties.rows, logits)
    chosen = logits[index]
    repetition, presence, frequency = (
        _moved(values, logits)[:, None]
        for values in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    chosen = torch.where(seen, torch.where(chosen > 0, chosen / repetition, chosen * repetition), chosen)
    chosen = chosen - frequency * generated - presence * (generated > 0)
    return logits.index_copy(0, index, chosen)


def _masked(adjusted: Tensor, logits: Tensor, mask: TokenMask) -> Tensor:
    # A table lookup of eight bits at a time is several times as fast on a CPU as shifts and fills.
    device = logits.device
    is_set = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    table = torch.zeros((256, 8), device=device).masked_fill_(is_set == 0, -torch.inf)
    octets = _moved(mask.bits.view(np.uint8), logits).int()
    barred = embedding(octets, table).flatten(1)[:, : logits.shape[1]]  # [rows, vocabulary]: 0 or -inf
    index = _moved(mask.rows, logits)
    chosen = adjusted[index] + barred
    if mask.over_bias:
        nothing = chosen.amax(dim=-1, keepdim=True) == -torch.inf
        chosen = torch.where(nothing, logits[index] + barred, chosen)
    return adjusted.index_copy(0, index, chosen)


def _moved(values: np.ndarray, like: Tensor) -> Tensor:
    """The array on the device of `like`; does not wait for what the device has queued."""
    moved = torch.from_numpy(values)
    return moved.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else moved


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log probabilities of the model's own logits, for the rows in `Adjustments.logprob_rows`. On the host;
    valid once the step is over."""

    chosen: Tensor  # [rows]: of the sampled token
    ids: Tensor  # [rows, most]: the tokens that the row names, or the most likely ones, in order
    values: Tensor  # [rows, most]


def top_logprobs(logits: Tensor, tokens: Tensor, adjustments: Adjustments) -> TopLogprobs | None:
    """Log probabilities from the model's own logits. None: no row asks for them."""
    if adjustments.logprob_rows is None:
        return None
    index = _moved(adjustments.logprob_rows, logits)
    logs = torch.log_softmax(logits[index], dim=-1)
    chosen = logs.gather(1, tokens[index].clamp_min(0)[:, None])[:, 0]
    values, ids = logs.topk(adjustments.top_logprobs, dim=-1)
    if adjustments.logprob_ids is not None:
        named = _moved(adjustments.logprob_ids, logits)
        ids = torch.where(named < 0, ids, named)
        values = logs.gather(1, ids)
    return TopLogprobs(to_host(chosen), to_host(ids), to_host(values))


def prompt_logprobs(
    hidden: Tensor, scored: Scored, logits: Callable[[Tensor], Tensor], rank: int
) -> ScoredLogprobs | None:
    """Enqueues the work for one step with hidden states [tokens, hidden_size]. The result is valid once the
    step is over. All ranks call `logits`, in the same order. Only rank 0 has its result; None on the
    others."""
    rows, tokens = upload([scored.rows, scored.tokens], hidden.device)
    pieces: list[tuple[Tensor, ...]] = []
    for piece, actual in zip(rows.split(PIECE), tokens.split(PIECE), strict=True):
        values = logits(hidden[piece])
        if rank == 0:
            pieces.append(_logprobs(values.float(), actual, scored.top))
    if not pieces:
        return None
    fields = (torch.cat(of_field) for of_field in zip(*pieces, strict=True))
    return ScoredLogprobs(*(to_host(of_field).numpy() for of_field in fields))


def _logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, ...]:
    """The fields of `ScoredLogprobs` for some rows."""
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1, dtype=torch.int32) + 1
    best = logits.topk(top, dim=-1).indices
    logs = torch.log_softmax(logits, dim=-1)  # row by row, unlike `logsumexp`, so other rows change no bit
    return logs.gather(1, tokens[:, None])[:, 0], ranks, best.int(), logs.gather(1, best)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, valid once everything queued on the current stream is over."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
