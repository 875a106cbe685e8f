"""Continuous load of streams whose tokens are known, and what the clients saw."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.chaos.faults import Happened
from bench.chaos.streams import Case, Stream, new_session, read


@dataclass(slots=True)
class Load:
    """Some clients, each asking one thing after another until told to stop. Every answer is kept."""

    url: str
    cases: Sequence[Case]
    rng: random.Random
    streams: list[Stream] = field(default_factory=list)

    async def run(self, clients: int, stop: asyncio.Event) -> None:
        """Returns once all clients have read their last answer to the end."""
        async with new_session() as http:

            async def client() -> None:
                while not stop.is_set():
                    self.streams.append(await read(http, self.url, self.rng.choice(self.cases)))

            await asyncio.gather(*(client() for _ in range(clients)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every answer held against the right one."""

    requests: int
    tokens: int
    failed: int
    lost_or_repeated: int  # tokens by which an answer is too short or too long
    different: int  # tokens that are not those of a run without faults
    errors: tuple[str, ...]


def judge(streams: Sequence[Stream], right: Mapping[Case, list[int]]) -> Verdict:
    lost = different = 0
    for stream in streams:
        expected = right[stream.case]
        if not stream.failed:
            lost += abs(len(expected) - len(stream.token_ids))
        # A request that failed counts as failed; what it said before must be right all the same.
        different += sum(a != b for a, b in zip(stream.token_ids, expected, strict=False))
    failed = [stream.error or "the stream ended early" for stream in streams if stream.failed]
    tokens = sum(len(stream.token_ids) for stream in streams)
    return Verdict(len(streams), tokens, len(failed), lost, different, tuple(failed))


def pauses(streams: Sequence[Stream], happened: Happened) -> list[float]:
    """Seconds without a token around a fault, for every stream that ran then (hit by it or not)."""
    return [gap for stream in streams if (gap := stream.gap_around(happened.at)) is not None]
