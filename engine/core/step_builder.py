"""From the schedule to a step of plain arrays (`engine.step`). Pure.

`build_step` runs when a step is launched, `build_adjustments` when its tokens are sampled: by then the host
knows the tokens of the step before, which a grammar needs.
"""

from array import array
from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import attrgetter

import numpy as np

from baton.engine.core.live_request import DRAW, PENDING, LiveRequest
from baton.engine.core.schedule import Chunk
from baton.engine.core.state_copies import Save
from baton.engine.step import (
    NOT_SCORED,
    Adjustments,
    Bias,
    Draws,
    Penalties,
    Scored,
    Step,
    TokenMask,
    Variant,
    arrange,
)

NO_TOP_P = np.float32(2)
"""Rounded sums of probabilities may pass 1, so "no limit" must be above it."""
DRAW_TYPES = np.float32, np.int32, np.int32, np.float32, np.float32
"""Types of the fields of `Draws`."""


MOST_ROWS = 8
"""Most tokens of a request that decodes whose queries attend one by one. More of them read their KV together,
as those of a prompt do."""


def build_step(
    chunks: Sequence[Chunk],
    vocabulary: int,
    *,
    block_size: int,
    table_width: int | None,
    has_states: bool = False,
    restores: Sequence[tuple[int, int]] = (),
    saves: Sequence[Save] = (),
) -> tuple[Step, list[LiveRequest], list[Chunk]]:
    """The step, the requests that get a token in the order of its sampled rows, and the positions that
    `Step.scored` has in its order. `has_states`: the model has state layers. `restores` is as in
    `Step`."""
    # Decodes are sorted by length: attention groups requests of similar length.
    decodes = sorted([c for c in chunks if _one_by_one(c, has_states)], key=attrgetter("stop"))
    chunks = decodes + [c for c in chunks if not _one_by_one(c, has_states)]

    tokens: list[int] = []
    for live, start, stop, _ in chunks:
        first = live.token_ids[start]
        tokens.append(-1 - live.row if first == PENDING else first)
        if stop > start + 1:
            tokens += live.token_ids[start + 1 : stop]
    sampled = [i for i, c in enumerate(chunks) if c.stop == len(c.live.token_ids)]
    requests = [chunks[i].live for i in sampled]
    scored, scores = _scored(chunks)
    after, within = _saves(chunks, saves) if saves else ((), ())
    step = arrange(
        tokens,
        [c.start for c in chunks],
        [c.stop for c in chunks],
        [c.live.blocks for c in chunks],
        sampled,
        *draws_of(requests, vocabulary),
        num_decodes=len(decodes),
        hands_over=any(c.live.handover for c in chunks),
        block_size=block_size,
        table_width=table_width,
        scored=scored,
        state_slots=[c.live.state_slot for c in chunks] if has_states else None,
        restores=restores,
        saves=after,
        copies=within,
    )
    return step, requests, scores


def _one_by_one(chunk: Chunk, has_states: bool) -> bool:
    """Whether the queries of a chunk attend one by one. The state of a request takes one token, or several
    in the way of a prompt."""
    return chunk.decodes and chunk.tokens <= (1 if has_states else MOST_ROWS)


def _saves(
    chunks: Sequence[Chunk], saves: Sequence[Save]
) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
    """`Step.saves` and `Step.copies`: what is copied after the step, and what while it computes."""
    begins = accumulate([c.tokens for c in chunks[:-1]], initial=0)
    of_slot = {c.live.state_slot: (begin, c) for begin, c in zip(begins, chunks, strict=True)}
    after: list[tuple[int, int]] = []
    within: list[tuple[int, int]] = []
    for slot, position, to in saves:
        begin, chunk = of_slot[slot]
        if position == chunk.stop:
            after.append((slot, to))
        else:
            within.append((begin + position - chunk.start - 1, to))
    return after, within


def _scored(chunks: Sequence[Chunk]) -> tuple[Scored, list[Chunk]]:
    """The tokens of prompts that get log probabilities, and the positions that predict them."""
    if not any(c.start < c.live.scores_to for c in chunks):
        return NOT_SCORED, []
    rows: list[int] = []
    tokens: list[int] = []
    scores: list[Chunk] = []
    begin = 0  # row of the chunk's first token
    for live, start, stop, _ in chunks:
        first, end = max(start, live.num_scored), min(stop, live.scores_to)
        if first < end:
            rows += range(begin + first - start, begin + end - start)
            tokens += live.token_ids[first + 1 : end + 1]
            scores.append(Chunk(live, first, end))
        begin += stop - start
    top = max((c.live.request.sampling.prompt_logprobs or 0 for c in scores), default=0)
    return Scored(np.array(rows), np.array(tokens), top) if rows else NOT_SCORED, scores


def draws_of(requests: Sequence[LiveRequest], vocabulary: int) -> tuple[Variant, Draws[np.ndarray]]:
    """How each request's next token is drawn."""
    wanted = np.frombuffer(b"".join([live.draw for live in requests]), DRAW)
    drawn = wanted["temperature"] > 0
    if not drawn.any():  # then the sampler reads no draws: to make them took longer than all else here
        return Variant.GREEDY, Draws(*(np.zeros(len(requests), dtype) for dtype in DRAW_TYPES))
    positions = np.array([len(live.token_ids) for live in requests], dtype=np.uint64)
    some_top_k, some_top_p = wanted["top_k"] > 0, wanted["top_p"] < 1
    filtered = drawn & (some_top_k | some_top_p | (wanted["min_p"] > 0))
    variant = Variant.FILTERED if filtered.any() else Variant.DRAWN
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


# What only some requests ask for


def is_plain(live: LiveRequest) -> bool:
    """Whether `LiveRequest.draw` alone says how the next token is chosen."""
    return len(live.token_ids) >= live.plain_from


def build_adjustments(
    requests: Sequence[LiveRequest], eos_ids: Collection[int], mask: tuple[list[int], np.ndarray] | None
) -> Adjustments:
    """For the sampled rows of a step. `mask`: rows with a grammar, and the bits of `TokenMask`."""
    logprob_rows = [row for row, live in enumerate(requests) if live.request.sampling.logprobs is not None]
    asked = [requests[row].request.sampling for row in logprob_rows]
    most = max((p.num_alternatives for p in asked), default=0)
    return Adjustments(
        _bias(requests, eos_ids),
        _penalties(requests),
        None if mask is None else _token_mask(requests, *mask),
        np.array(logprob_rows) if logprob_rows else None,
        most,
        _named([p.logprob_token_ids for p in asked], most),
    )


def _named(ids: Sequence[Sequence[int]], most: int) -> np.ndarray | None:
    """The token ids that rows name for log probabilities, padded with -1 to `most`."""
    if not any(ids):
        return None
    return np.array([[*row, *[-1] * (most - len(row))] for row in ids])


def _below_minimum(live: LiveRequest) -> bool:
    return live.num_generated < live.request.sampling.min_tokens


def _bias(requests: Sequence[LiveRequest], eos_ids: Collection[int]) -> Bias | None:
    """logit_bias, and the tokens that min_tokens bars for now."""
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for row, live in enumerate(requests):
        p = live.request.sampling
        barred = {*eos_ids, *p.stop_token_ids} if _below_minimum(live) else ()
        tokens += [*p.logit_bias, *barred]
        values += [*p.logit_bias.values(), *[-np.inf] * len(barred)]
        rows += [row] * (len(tokens) - len(rows))
    if not tokens:
        return None
    return Bias(np.array(rows), np.array(tokens), np.array(values, dtype=np.float32))


def _penalties(requests: Sequence[LiveRequest]) -> Penalties | None:
    rows = [
        row
        for row, live in enumerate(requests)
        for p in [live.request.sampling]
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
    ]
    if not rows:
        return None
    live = [requests[row] for row in rows]
    sampling = [r.request.sampling for r in live]
    pending = np.array([(i, r.row) for i, r in enumerate(live) if r.pending], dtype=np.int64).reshape(-1, 2)

    def flat(tokens: Sequence["array[int]"]) -> tuple[np.ndarray, np.ndarray]:
        row = np.repeat(np.arange(len(tokens)), [len(of_row) for of_row in tokens])
        return row, np.frombuffer(b"".join(tokens), np.int32).astype(np.int64)

    return Penalties(
        np.array(rows),
        np.array([p.repetition_penalty for p in sampling], dtype=np.float32),
        np.array([p.presence_penalty for p in sampling], dtype=np.float32),
        np.array([p.frequency_penalty for p in sampling], dtype=np.float32),
        flat([r.token_ids[: len(r.request.prompt_ids)] for r in live]),
        flat([r.token_ids[len(r.request.prompt_ids) : r.num_known] for r in live]),
        (pending[:, 0], pending[:, 1]),
    )


def _token_mask(requests: Sequence[LiveRequest], rows: list[int], bits: np.ndarray) -> TokenMask:
    return TokenMask(np.array(rows), bits, any(_below_minimum(requests[row]) for row in rows))
