"""Continuous load of streams whose tokens are known, and what the clients saw."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.chaos.faults import Happened
from bench.chaos.streams import Case, Stream, new_session, read

RECONNECT_S = 0.2


@dataclass(slots=True)
class Load:
    """Some clients, each asking one thing after another until told to stop. Every answer is kept. Who loses
    the connection to the router asks again."""

    url: str
    cases: Sequence[Case]
    rng: random.Random
    streams: list[Stream] = field(default_factory=list)

    async def run(self, clients: int, stop: asyncio.Event) -> None:
        """Returns once all clients have read their last answer to the end."""
        async with new_session() as http:

            async def client() -> None:
                while not stop.is_set():
                    case = self.rng.choice(self.cases)
                    while (stream := await read(http, self.url, case)).cut:
                        if stream.status:
                            self.streams.append(stream)  # else nobody listened: it never began
                        await asyncio.sleep(RECONNECT_S)
                    self.streams.append(stream)

            await asyncio.gather(*(client() for _ in range(clients)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every answer held against the right one."""

    requests: int
    tokens: int
    failed: int
    reconnected: int  # connections lost with a router
    lost_or_repeated: int  # tokens by which an answer is too short or too long
    different: int  # tokens that are not those of a run without faults
    errors: tuple[str, ...]


def judge(
    streams: Sequence[Stream], right: Mapping[Case, list[int]], routers_killed: Sequence[Happened] = ()
) -> Verdict:
    """Who loses the connection while a router is killed and comes back has to ask again, and did not fail."""
    lost = different = reconnected = 0
    failures = []
    for stream in streams:
        if stream.cut and any(
            one.at <= stream.ended and stream.started <= one.back for one in routers_killed
        ):
            reconnected += 1
        elif stream.failed:
            failures.append(stream.error or "the stream ended early")
        expected = right[stream.case]
        if not stream.failed:
            lost += abs(len(expected) - len(stream.token_ids))
        # A request that failed counts as failed; what it said before must be right all the same.
        different += sum(a != b for a, b in zip(stream.token_ids, expected, strict=False))
    tokens = sum(len(stream.token_ids) for stream in streams)
    return Verdict(len(streams), tokens, len(failures), reconnected, lost, different, tuple(failures))


def pauses(streams: Sequence[Stream], happened: Happened) -> list[float]:
    """Seconds without a token around a fault, for every stream that ran then (hit by it or not)."""
    return [gap for stream in streams if (gap := stream.gap_around(happened.at)) is not None]
