"""From logits to tokens, for all requests of a step at once.

A row's result depends on that row alone: its random number is a function of (seed, position), so a request
gets the same tokens in whatever batch, and on whichever worker, it happens to be.

On a GPU nothing in here waits for the device. What most requests ask for, `choose` alone, runs within CUDA
graphs; the rest, from `adjust` to `top_logprobs`, is launched around it.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.grammar import TokenMask
from engine.kernels import SMALLEST_TEMPERATURE, Kernels
from engine.live_request import DRAW, LiveRequest
from engine.request import Logprobs

Array = TypeVar("Array", np.ndarray, Tensor)

NO_TOP_P = np.float32(2)  # rounded sums of probabilities may pass 1, so what is no limit must be above it
NOT_FINITE = -1
"""In place of a token: the model's logits are not all finite, so nothing can be sampled from them."""
NO_CHOICE = -2
"""In place of a token: the request's own parameters bar every token, or drive a logit beyond float32."""


class Variant(Enum):
    """How much there is to do for a batch; each includes the ones before."""

    GREEDY = 0
    DRAWN = 1  # some at random
    FILTERED = 2  # and of these some by top_k, top_p or min_p


class Draws(NamedTuple, Generic[Array]):
    """How the token of each row is drawn: [rows] each."""

    temperature: Array  # float32; 0: the most likely one
    keys: Array  # int32: stands for all its random numbers
    top_k: Array  # int32; the vocabulary's size: no limit
    top_p: Array  # float32; above 1: no limit
    min_p: Array  # float32


def draws_of(requests: Sequence[LiveRequest], vocabulary: int) -> tuple[Variant, Draws[np.ndarray]]:
    wanted = np.frombuffer(b"".join([live.draw for live in requests]), DRAW)
    positions = np.array([len(live.token_ids) for live in requests], dtype=np.uint64)
    drawn = wanted["temperature"] > 0
    some_top_k, some_top_p = wanted["top_k"] > 0, wanted["top_p"] < 1
    filtered = drawn & (some_top_k | some_top_p | (wanted["min_p"] > 0))
    variant = Variant.FILTERED if filtered.any() else Variant.DRAWN if drawn.any() else Variant.GREEDY
    return variant, Draws(
        wanted["temperature"].copy(),
        draw_keys(wanted["seed"], positions),
        np.where(some_top_k, wanted["top_k"], np.int32(vocabulary)),
        np.where(some_top_p, wanted["top_p"], NO_TOP_P),
        wanted["min_p"].copy(),
    )


def draw_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int32, 32 bits that stand for all random numbers of the token at a position: splitmix64, twice. Of
    uint64 [rows] each."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    return (mix(mix(seeds) ^ positions) >> np.uint64(32)).astype(np.uint32).view(np.int32)


def choose(
    adjusted: Tensor, logits: Tensor, variant: Variant, draws: Draws[Tensor], kernels: Kernels
) -> Tensor:
    """[rows] int64: a token of each row of adjusted [rows, vocabulary], float32; `NOT_FINITE` where the
    model's own logits are not all finite; or `NO_CHOICE`. Draws are on the device."""
    if variant is Variant.GREEDY:
        tokens, finite = kernels.greedy(adjusted)
    else:
        probs = least = None
        if variant is Variant.FILTERED:
            probs = torch.softmax(adjusted / draws.temperature.clamp_min(SMALLEST_TEMPERATURE)[:, None], -1)
            least = kernels.thresholds(probs, draws.top_k, draws.top_p, draws.min_p)
        tokens, finite = kernels.draw(adjusted, draws.temperature, draws.keys, probs, least)
    if adjusted is not logits:
        _, finite = kernels.greedy(logits)
        # −∞ bars a token, so only the largest must be finite. It is NaN where any logit is.
        tokens = torch.where(adjusted.amax(dim=-1).isfinite(), tokens, NO_CHOICE)
    return torch.where(finite, tokens, NOT_FINITE)


# What only some requests ask for


def adjusts(live: LiveRequest) -> bool:
    """Whether `adjust` changes its logits, or `top_logprobs` is about it."""
    return len(live.token_ids) < live.plain_from


def adjust(
    logits: Tensor,
    requests: Sequence[LiveRequest],
    newest: Tensor,
    eos_ids: Collection[int],
    mask: TokenMask | None,
) -> Tensor:
    """With what the requests and their grammars add to, and take from, the model's logits [rows, vocabulary],
    float32. Those themselves stay as they are: what comes back is them, or a copy. `newest` has the tokens
    that are pending, by `LiveRequest.row`."""
    adjusted = _penalised(_biased(logits, requests, eos_ids), requests, newest)
    return adjusted if mask is None else _masked(adjusted, logits, mask, requests)


def _biased(logits: Tensor, requests: Sequence[LiveRequest], eos_ids: Collection[int]) -> Tensor:
    """With logit_bias, and without tokens that min_tokens forbids for now. Copies if it changes anything."""
    tokens: list[int] = []
    values: list[float] = []  # added to their logits
    counts: list[int] = []  # of each row
    for live in requests:
        p = live.request.sampling
        barred = {*eos_ids, *p.stop_token_ids} if live.num_generated < p.min_tokens else ()
        tokens += [*p.logit_bias, *barred]
        values += [*p.logit_bias.values(), *[-torch.inf] * len(barred)]
        counts.append(len(p.logit_bias) + len(barred))
    if not tokens:
        return logits
    rows = np.repeat(np.arange(len(requests)), counts)
    index = _moved(rows, torch.int64, logits), _moved(tokens, torch.int64, logits)
    return logits.index_put(index, _moved(values, torch.float32, logits), accumulate=True)


def _penalised(logits: Tensor, requests: Sequence[LiveRequest], newest: Tensor) -> Tensor:
    """With repetition, presence and frequency penalty. Copies if it changes anything."""
    rows = [
        row
        for row, live in enumerate(requests)
        for p in [live.request.sampling]
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
    ]
    if not rows:
        return logits

    def counts(tokens: Sequence["array[int]"]) -> Tensor:  # [rows, vocabulary]
        row = np.repeat(np.arange(len(tokens)), [len(of_row) for of_row in tokens])
        flat = row * vocabulary + np.frombuffer(b"".join(tokens), np.int32)
        where = _moved(flat, torch.int64, logits)
        ones = torch.ones(len(flat), dtype=torch.int32, device=logits.device)
        zeros = torch.zeros(len(rows) * vocabulary, dtype=torch.int32, device=logits.device)
        return zeros.index_add_(0, where, ones).view(len(rows), vocabulary)

    def column(name: str) -> Tensor:  # [rows, 1]
        values = [getattr(requests[row].request.sampling, name) for row in rows]
        return _moved(values, torch.float32, logits)[:, None]

    vocabulary = logits.shape[1]
    live = [requests[row] for row in rows]
    generated = counts([r.token_ids[len(r.request.prompt_ids) : r.num_known] for r in live])
    if waiting := [(row, r.row) for row, r in enumerate(live) if r.pending]:
        to, source = _moved(np.array(waiting).T, torch.int64, logits)
        # A token that is none fails its request, whatever is made of it here.
        generated[to, newest[source].clamp_min(0)] += 1
    seen = counts([r.token_ids[: len(r.request.prompt_ids)] for r in live]) + generated > 0
    index = _moved(rows, torch.int64, logits)
    chosen = logits[index]
    repetition = column("repetition_penalty")
    chosen = torch.where(seen, torch.where(chosen > 0, chosen / repetition, chosen * repetition), chosen)
    chosen = chosen - column("frequency_penalty") * generated - column("presence_penalty") * (generated > 0)
    return logits.index_copy(0, index, chosen)


def _masked(adjusted: Tensor, logits: Tensor, mask: TokenMask, requests: Sequence[LiveRequest]) -> Tensor:
    """Only what grammars allow; where min_tokens forbids all of it, the grammar has the last word."""
    # By a table, eight bits at a time: on a CPU several times as fast as shifts and fills.
    device = logits.device
    is_set = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    table = torch.zeros((256, 8), device=device).masked_fill_(is_set == 0, -torch.inf)
    bits = mask.bits.pin_memory() if logits.is_cuda else mask.bits
    octets = bits.view(torch.uint8).to(device, non_blocking=True).int()
    barred = embedding(octets, table).flatten(1)[:, : logits.shape[1]]  # [rows, vocabulary]: 0 or -inf
    index = _moved(mask.rows, torch.int64, logits)
    chosen = adjusted[index] + barred
    if any(requests[row].num_generated < requests[row].request.sampling.min_tokens for row in mask.rows):
        nothing = chosen.amax(dim=-1, keepdim=True) == -torch.inf
        chosen = torch.where(nothing, logits[index] + barred, chosen)
    return adjusted.index_copy(0, index, chosen)


def _moved(values: Sequence[float] | np.ndarray, dtype: torch.dtype, like: Tensor) -> Tensor:
    """To the device of `like`, without waiting for what it has queued."""
    moved = torch.as_tensor(values, dtype=dtype)
    return moved.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else moved


# Logprobs


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Of the rows that asked; on the host once the step is over."""

    rows: list[int]
    chosen: Tensor  # [rows]
    ids: Tensor  # [rows, most]
    values: Tensor  # [rows, most]

    def by_row(self, requests: Sequence[LiveRequest]) -> dict[int, Logprobs]:
        lists = zip(
            self.rows, self.chosen.tolist(), self.ids.tolist(), self.values.tolist(), strict=True
        )  # fmt: skip
        result = {}
        for row, logprob, ids, values in lists:
            wanted = requests[row].request.sampling.logprobs or 0
            result[row] = Logprobs(logprob, tuple(ids[:wanted]), tuple(values[:wanted]))
        return result


def top_logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[LiveRequest]) -> TopLogprobs | None:
    """Of the model's own logits; None: nobody asked."""
    rows = [row for row, live in enumerate(requests) if live.request.sampling.logprobs is not None]
    if not rows:
        return None
    index = _moved(rows, torch.int64, logits)
    logs = torch.log_softmax(logits[index], dim=-1)
    chosen = logs.gather(1, tokens[index].clamp_min(0)[:, None])[:, 0]
    top = logs.topk(max(requests[row].request.sampling.logprobs or 0 for row in rows), dim=-1)
    return TopLogprobs(rows, to_host(chosen), to_host(top.indices), to_host(top.values))


def to_host(tensor: Tensor) -> Tensor:
    """Its copy, right once all that is queued on the current stream is over."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
