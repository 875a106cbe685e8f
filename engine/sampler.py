"""From logits to tokens, for all requests of a step at once.

A row's result depends on that row alone: its random number is a function of (seed, position), so a request
gets the same tokens in whatever batch, and on whichever worker, it happens to be.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.grammar import TokenMask
from engine.live_request import LiveRequest
from engine.request import Logprobs
from engine.sampling_params import SamplingParams

SMALLEST_TEMPERATURE = 1e-5  # below, logits / temperature might overflow
CANDIDATES = 256  # of a sorted distribution, tried before all of it is sorted
MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprobs: Logprobs | None


def sample(
    logits: Tensor,
    requests: Sequence[LiveRequest],
    eos_ids: Collection[int],
    mask: TokenMask | None = None,
) -> list[Sampled | None]:
    """Chooses the next token of each request from logits [requests, vocabulary], float32, among those that
    `mask` allows. None: that row is not finite, and nothing can be sampled from it."""
    params = [live.request.sampling for live in requests]
    finite = logits.isfinite().all(dim=-1)
    adjusted = _penalised(_biased(logits, requests, eos_ids), requests)
    if mask is not None:
        adjusted = _masked(adjusted, logits, mask, requests)
    tokens = adjusted.argmax(dim=-1)
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if drawn:
        keys = [draw_key(params[row].seed, len(requests[row].token_ids)) for row in drawn]
        tokens[drawn] = _draw(adjusted[drawn], [params[row] for row in drawn], keys)
    logprobs = _logprobs(logits, tokens, params)
    return [
        Sampled(token, logprobs.get(row)) if ok else None
        for row, (token, ok) in enumerate(zip(tokens.tolist(), finite.tolist(), strict=True))
    ]


def draw_key(seed: int, position: int) -> int:
    """32 bits that stand for all random numbers of the token at `position`: splitmix64, twice."""

    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        return z ^ (z >> 31)

    return mix(mix(seed & MASK64) ^ position) >> 32


def exponentials(keys: Sequence[int], count: int, device: torch.device) -> Tensor:
    """[keys, count] exponentially distributed random numbers: each a hash (Wellons' lowbias32) of its key and
    its column. The smallest are the exact ones, since they decide."""
    signed = [key - (1 << 32) if key >> 31 else key for key in keys]
    columns = torch.arange(count, dtype=torch.int32, device=device) * (0x9E3779B1 - (1 << 32))
    x = torch.tensor(signed, dtype=torch.int32, device=device)[:, None] ^ columns
    # Masked, since int32 has only the shift that copies the sign.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    uniform = x.float().add_(0.5).mul_(2.0**-32)  # in (-½, ½), and finest around 0
    uniform.sub_(uniform.floor())
    return uniform.neg_().log1p_().neg_()


def _biased(logits: Tensor, requests: Sequence[LiveRequest], eos_ids: Collection[int]) -> Tensor:
    """With logit_bias, and without tokens that min_tokens forbids for now. Copies if it changes anything."""
    edits: list[tuple[int, int, float]] = []  # row, token, what is added
    for row, live in enumerate(requests):
        p = live.request.sampling
        edits += [(row, token, bias) for token, bias in p.logit_bias.items()]
        if live.num_generated < p.min_tokens:
            edits += [(row, token, -torch.inf) for token in {*eos_ids, *p.stop_token_ids}]
    if not edits:
        return logits
    rows, tokens, values = zip(*edits, strict=True)
    index = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
    return logits.index_put(index, torch.tensor(values, device=logits.device), accumulate=True)


def _penalised(logits: Tensor, requests: Sequence[LiveRequest]) -> Tensor:
    """With repetition, presence and frequency penalty. Copies if it changes anything."""
    rows = [
        row
        for row, live in enumerate(requests)
        for p in [live.request.sampling]
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
    ]
    if not rows:
        return logits

    def counts(tokens: Sequence[Sequence[int]]) -> Tensor:  # [rows, vocabulary]
        flat = [i * vocabulary + token for i, row in enumerate(tokens) for token in row]
        index = torch.tensor(flat, dtype=torch.int64, device=logits.device)
        return torch.bincount(index, minlength=len(rows) * vocabulary).view(len(rows), vocabulary)

    def column(name: str) -> Tensor:  # [rows, 1]
        values = [getattr(requests[row].request.sampling, name) for row in rows]
        return torch.tensor(values, device=logits.device)[:, None]

    vocabulary = logits.shape[1]
    live = [requests[row] for row in rows]
    generated = counts([r.token_ids[len(r.request.prompt_ids) :] for r in live])
    seen = counts([r.token_ids for r in live]) > 0
    chosen = logits[rows]
    repetition = column("repetition_penalty")
    chosen = torch.where(seen, torch.where(chosen > 0, chosen / repetition, chosen * repetition), chosen)
    chosen = chosen - column("frequency_penalty") * generated - column("presence_penalty") * (generated > 0)
    logits = logits.clone()
    logits[rows] = chosen
    return logits


def _masked(adjusted: Tensor, logits: Tensor, mask: TokenMask, requests: Sequence[LiveRequest]) -> Tensor:
    """Only what grammars allow; where min_tokens forbids all of it, the grammar has the last word."""
    # By a table, eight bits at a time: on a CPU several times as fast as shifts and fills.
    device = logits.device
    is_set = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    table = torch.zeros((256, 8), device=device).masked_fill_(is_set == 0, -torch.inf)
    octets = mask.bits.view(torch.uint8).to(device).int()
    barred = embedding(octets, table).flatten(1)[:, : logits.shape[1]]  # [rows, vocabulary]: 0 or -inf
    chosen = adjusted[mask.rows] + barred
    if any(requests[row].num_generated < requests[row].request.sampling.min_tokens for row in mask.rows):
        nothing = chosen.amax(dim=-1, keepdim=True) == -torch.inf
        chosen = torch.where(nothing, logits[mask.rows] + barred, chosen)
    adjusted = adjusted.clone()
    adjusted[mask.rows] = chosen
    return adjusted


def _draw(logits: Tensor, params: Sequence[SamplingParams], keys: Sequence[int]) -> Tensor:
    """A race of exponential clocks, also known as the Gumbel-max trick: token i wins with probability p[i].
    One number per row, looked up in the cumulative distribution, would do, but there a rounding error in any
    logit moves all the boundaries; here it matters only if it swaps the first two."""
    temperatures = [max(p.temperature, SMALLEST_TEMPERATURE) for p in params]
    probs = torch.softmax(logits / torch.tensor(temperatures, device=logits.device)[:, None], dim=-1)
    if any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        probs = torch.where(probs < _thresholds(probs, params)[:, None], 0.0, probs)
    return (probs / exponentials(keys, logits.shape[1], logits.device)).argmax(dim=-1)


def _thresholds(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[rows]: the probability of the least likely token that top_k, then top_p, and min_p leave in a row."""
    vocabulary = probs.shape[1]
    top_k = torch.tensor([p.top_k or vocabulary for p in params], device=probs.device)[:, None]
    # Rounded sums may pass 1, so what is no limit must be above it.
    top_p = torch.tensor([p.top_p if p.top_p < 1 else 2.0 for p in params], device=probs.device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=probs.device)
    width = min(vocabulary, max([CANDIDATES, *(p.top_k for p in params)]))
    while True:
        best = probs.topk(width, dim=-1).values
        allowed = best.masked_fill(torch.arange(width, device=probs.device) >= top_k, 0.0)
        total = torch.where(top_k <= width, allowed.sum(dim=-1, keepdim=True), 1.0)
        kept = (allowed > 0) & (allowed.cumsum(dim=-1) - allowed < top_p * total)
        count = kept.sum(dim=-1, keepdim=True).clamp_min(1)
        undecided = (count == width) & (top_k > width) & (top_p < 1)
        if width == vocabulary or not undecided.any():
            break
        width = min(vocabulary, 16 * width)
    least = best.gather(1, count - 1)
    unlimited = (top_k >= vocabulary) & (top_p > 1)
    return torch.maximum(torch.where(unlimited, 0.0, least)[:, 0], min_p * best[:, 0])


def _logprobs(logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> dict[int, Logprobs]:
    """By row, for the rows that asked."""
    rows = [row for row, p in enumerate(params) if p.logprobs is not None]
    if not rows:
        return {}
    logs = torch.log_softmax(logits[rows], dim=-1)
    chosen = logs.gather(1, tokens[rows, None])[:, 0].tolist()
    top = logs.topk(max(params[row].logprobs or 0 for row in rows), dim=-1)
    result = {}
    for row, logprob, ids, values in zip(
        rows, chosen, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        wanted = params[row].logprobs or 0
        result[row] = Logprobs(logprob, tuple(ids[:wanted]), tuple(values[:wanted]))
    return result
