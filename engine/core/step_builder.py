"""The schedule of a step, and from there to a step of plain arrays (`engine.step`). Pure.

`build_step` runs when a step is launched, `core.adjustments` when its tokens are sampled.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from baton.engine.arrange import arrange
from baton.engine.core.live_request import DRAW, LiveRequest
from baton.engine.core.prompt_images import with_images
from baton.engine.core.state_copies import CopyLease, Save
from baton.engine.step import ARRAYS, NOT_SCORED, Draws, Scored, Step, Variant
from baton.engine.step_drafts import Draft

NO_TOP_P = np.float32(2)
"""Rounded sums of probabilities may pass 1, so "no limit" must be above it."""
_DRAW_TYPES = [ARRAYS[f"draws.{name}"].dtype for name in Draws._fields]

MOST_ROWS = 8
"""Most tokens of a request that decodes whose queries attend one by one. More of them read their KV together,
as those of a prompt do."""

_Chunk = tuple[LiveRequest, range]  # with the positions that a step computes


class StepSize(NamedTuple):
    """What a step computes, as the model of steps counts it (`steps.step_model`)."""

    rows: int
    """Positions of requests that decode: more than one of each with drafts."""
    context: int
    """Positions that these requests read."""
    tokens: int
    """Of prompts."""
    position: float
    """Mean position of these tokens; 0.0 without any."""


@dataclass(slots=True, eq=False)
class Schedule:
    """One step, until its tokens are known. Until then it has leases on its requests.

    launched ──▶ sampled ──▶ over (the device has computed all of it) ──▶ landed: its tokens are known

    A step is sampled right after its launch. A grammar that must know the token before delays this until the
    step before has landed; the device computes the forward pass meanwhile."""

    chunks: dict[LiveRequest, range] = field(default_factory=dict)
    """The positions of each request that the step computes. Decodes come before prompts."""
    prompts: dict[LiveRequest, range] = field(default_factory=dict)
    """Those of `chunks` that are a part of a prompt, or of what was lost."""
    started: list[LiveRequest] = field(default_factory=list)
    """Requests that this step admitted from the queue."""
    preempted: list[LiveRequest] = field(default_factory=list)
    """Requests that lost their blocks to others. They are in the queue again, or go back to their sender."""
    began: float = 0.0
    """When the host began to launch it."""
    waited: float = 0.0
    """Seconds in which the host waited for KV from other workers, so that it could go on."""
    size: StepSize = field(init=False)
    """Set by `lease`."""
    ids: frozenset[bytes] = frozenset()
    """The requests that it computes. This and the rest is known from the launch on."""
    copies: list[CopyLease] = field(default_factory=list)
    """On the copies of states with which its requests begin."""
    drafts: dict[LiveRequest, Draft] = field(default_factory=dict)
    """Of the requests that have some, or come after some."""
    guesses: int = 0
    """What a draft head makes for each request that gets a token and decodes on here."""
    sampled: list[LiveRequest] = field(default_factory=list)
    """The requests that get a token, by row. One with drafts has a row more for each of them."""
    scored: list[tuple[LiveRequest, range]] = field(default_factory=list)
    """The positions that predict a token of a prompt with log probabilities."""
    refused: dict[int, str] = field(default_factory=dict)
    """By row, what is wrong with a request's grammar."""

    def lease(self) -> None:
        """The step is scheduled: its size is known, and it uses the blocks and the states of its requests."""
        rows, context, tokens, positions = sum([x.count for x in self.drafts.values()]), 0, 0, 0.0
        for live, chunk in self.chunks.items():
            live.leases.begin(self)
            if live in self.prompts:
                tokens += len(chunk)
                positions += len(chunk) * (chunk.start + chunk.stop) / 2
            else:
                rows += len(chunk)
                context += chunk.stop
        self.size = StepSize(rows, context, tokens, positions / max(1, tokens))

    def end_leases(self) -> None:
        """The device computes nothing of the step any more."""
        for live in self.chunks:
            live.leases.end(self)
        for copy in self.copies:
            copy.end()

    @property
    def decodes(self) -> int:
        """Requests that get a token after their first one."""
        return len(self.chunks) - len(self.prompts)

    @property
    def decode_context(self) -> int:
        """As in `StepSize`, of what is scheduled so far."""
        prompts = sum(chunk.stop for chunk in self.prompts.values())
        return sum(chunk.stop for chunk in self.chunks.values()) - prompts

    @property
    def prompt_tokens(self) -> int:
        """Scheduled so far."""
        return sum(map(len, self.prompts.values()))

    def verified(self, live: LiveRequest, right: int) -> int:
        """The end of the positions of a request that stay computed, before its tokens are known, of which
        `right` are drafts. It may be behind all positions."""
        if live.states is None or live.states.kept is None or right == self.drafts[live].count:
            return len(live.token_ids) + right
        return self.chunks[live].start

    @property
    def waits(self) -> bool:
        """A grammar must know a token of the step before, or adjustments must know how many there are, or
        which drafts come after them."""
        return any(
            (live.grammar is not None and live.grammar.needs_tokens and live.pending)
            or (live.pending and live in self.drafts and not is_plain(live))
            for live in self.sampled
        )

    @property
    def drafts_before(self) -> Mapping[int, "array[int]"]:
        """By sampled row, the drafts that come before its token. They are known when the step is sampled,
        before its tokens are promised."""
        return {
            row + j: array("i", live.guesses.of(len(live.token_ids), j))
            for live, row, count in self.requests()
            for j in range(1, count + 1)
        }

    def requests(self) -> Iterator[tuple[LiveRequest, int, int]]:
        """Yields each request that gets a token, with its first sampled row and its number of drafts."""
        row = 0
        while row < len(self.sampled):
            live = self.sampled[row]
            count = self.drafts[live].count if live in self.drafts else 0
            yield live, row, count
            row += 1 + count


def build_step(
    schedule: Schedule,
    vocabulary: int,
    *,
    block_size: int,
    table_width: int | None,
    has_states: bool = False,
    restores: Sequence[tuple[int, int]] = (),
    saves: Sequence[Save] = (),
    ahead: int = 1,
    draft_head: bool = False,
    window_blocks: np.ndarray | None = None,
    sees: bool = False,
) -> Step:
    """The step. Also sets `schedule.sampled`, in the order of the step's sampled rows, and `schedule.scored`,
    in that of `Step.scored`. `has_states`: the model has state layers. `restores` is as in `Step`. `ahead`:
    the size of this dimension, 1 if the engine has no drafts. `draft_head`: whether there is one.
    `window_blocks`: as in `arrange`; 0: the block has none, and no token is written there. `sees`:
    the model takes images."""
    # The state of a request takes one token, or several in the way of a prompt.
    most = 1 if has_states else MOST_ROWS
    one_by_one: list[_Chunk] = []
    together: list[_Chunk] = []
    for live, positions in schedule.chunks.items():
        drafts_behind = schedule.drafts[live].count if live in schedule.drafts else 0
        decodes = live not in schedule.prompts and len(positions) + drafts_behind <= most
        (one_by_one if decodes else together).append((live, positions))
    # Decodes are sorted by length: attention groups requests of similar length.
    chunks = sorted(one_by_one, key=lambda chunk: chunk[1].stop) + together

    tokens = [live.token_ids[positions.start : positions.stop] for live, positions in chunks]
    sampled = [i for i, (live, positions) in enumerate(chunks) if positions.stop == len(live.token_ids)]
    drafts = {i: schedule.drafts[live] for i, (live, _) in enumerate(chunks) if live in schedule.drafts}
    schedule.sampled = [chunks[i][0] for i in sampled]
    behind = [0] * len(sampled)
    if drafts:
        counts = [drafts[i].count if i in drafts else 0 for i in sampled]
        schedule.sampled = [
            live for live, n in zip(schedule.sampled, counts, strict=True) for _ in range(n + 1)
        ]
        behind = [j for n in counts for j in range(n + 1)]
    scored, schedule.scored = _scored(chunks)
    variant, draws = draws_of(schedule.sampled, vocabulary, behind)
    after, within = _saves(chunks, saves) if saves else ((), ())
    step = arrange(
        np.frombuffer(b"".join(tokens), np.int32),
        [positions.start for _, positions in chunks],
        [positions.stop for _, positions in chunks],
        [live.blocks for live, _ in chunks],
        sampled,
        variant,
        draws,
        num_decodes=len(one_by_one),
        hands_over=any(live.handover for live in schedule.prompts),
        awaits_kv=any(live.shared.unverified for live in schedule.prompts),
        block_size=block_size,
        table_width=table_width,
        source_rows=[live.row if live.pending else -1 for live, _ in chunks],
        scored=scored,
        state_slots=[live.state_slot for live, _ in chunks] if has_states else None,
        restores=restores,
        saves=after,
        copies=within,
        drafts=drafts,
        keys=_keys_ahead(schedule.sampled, behind, ahead, variant) if ahead > 1 else None,
        following=_following(chunks) if draft_head else None,
        guessed=[i for i in sampled if not chunks[i][0].handover] if schedule.guesses else (),
        guesses=schedule.guesses,
        window_blocks=window_blocks,
    )
    assert not len(step.window_slots) or step.window_slots.min() >= block_size, "a token without a slot"
    return with_images(step, [(live.images, positions) for live, positions in chunks]) if sees else step


def _following(chunks: Sequence[_Chunk]) -> dict[int, int]:
    """As in `arrange`."""
    return {
        i: live.token_ids[positions.stop]
        for i, (live, positions) in enumerate(chunks)
        if positions.stop < len(live.token_ids)
    }


def _saves(
    chunks: Sequence[_Chunk], saves: Sequence[Save]
) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
    """`Step.saves` and `Step.copies`: what is copied after the step, and what while it computes."""
    begins = accumulate([len(positions) for _, positions in chunks[:-1]], initial=0)
    of_slot = {
        live.state_slot: (begin, positions) for begin, (live, positions) in zip(begins, chunks, strict=True)
    }
    after: list[tuple[int, int]] = []
    within: list[tuple[int, int]] = []
    for slot, position, to in saves:
        begin, positions = of_slot[slot]
        if position == positions.stop:
            after.append((slot, to))
        else:
            within.append((begin + position - positions.start - 1, to))
    return after, within


def _scored(chunks: Sequence[_Chunk]) -> tuple[Scored, list[_Chunk]]:
    """The tokens of prompts that get log probabilities, and the positions that predict them."""
    if not any(positions.start < live.asked.scores_to for live, positions in chunks):
        return NOT_SCORED, []
    rows: list[int] = []
    tokens: list[int] = []
    scores: list[_Chunk] = []
    row = 0  # of position 0 of the request, if it were in the step
    for live, positions in chunks:
        row -= positions.start
        first, end = max(positions.start, live.num_scored), min(positions.stop, live.asked.scores_to)
        if first < end:
            rows += range(row + first, row + end)
            tokens += live.token_ids[first + 1 : end + 1]
            scores.append((live, range(first, end)))
        row += positions.stop
    top = max((live.request.sampling.prompt_logprobs or 0 for live, _ in scores), default=0)
    return Scored(np.array(rows), np.array(tokens), top) if rows else NOT_SCORED, scores


def draws_of(
    requests: Sequence[LiveRequest], vocabulary: int, behind: Sequence[int] | None = None
) -> tuple[Variant, Draws[np.ndarray]]:
    """How each request's next token is drawn, or that after `behind` drafts."""
    wanted = np.frombuffer(b"".join([live.asked.draw for live in requests]), DRAW)
    drawn = wanted["temperature"] > 0
    if not drawn.any():  # then the sampler reads no draws: to make them took longer than all else here
        return Variant.GREEDY, Draws(*(np.zeros(len(requests), dtype) for dtype in _DRAW_TYPES))
    positions = np.array([len(live.token_ids) for live in requests], dtype=np.uint64)
    if behind is not None:
        positions += np.array(behind, dtype=np.uint64)
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


def _keys_ahead(
    requests: Sequence[LiveRequest], behind: Sequence[int], ahead: int, variant: Variant
) -> np.ndarray:
    """As `Ahead.keys`."""
    if variant is Variant.GREEDY:
        return np.zeros((len(requests), ahead), np.int32)
    seeds = np.frombuffer(b"".join([live.asked.draw for live in requests]), DRAW)["seed"]
    first = np.array([len(live.token_ids) for live in requests]) + np.array(behind, dtype=np.int64)
    return draw_keys(seeds[:, None], (first[:, None] + np.arange(ahead)).astype(np.uint64))


def draw_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int32, 32 bits that stand for all random numbers of the token at a position: splitmix64, twice. Of
    uint64 each."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    return (mix(mix(seeds) ^ positions) >> np.uint64(32)).astype(np.uint32).view(np.int32)


def is_plain(live: LiveRequest) -> bool:
    """Whether `Asked.draw` alone says how the next token is chosen."""
    return len(live.token_ids) >= live.asked.plain_from
