"""Continuous load of requests with known answers, and the check of what the clients got."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.bench.chaos.faults import Happened
from baton.bench.chaos.streams import Case, Stream, new_session, read

RECONNECT_S = 0.2


@dataclass(slots=True)
class Load:
    """Clients that send one request after another and keep every answer.

    A client that loses the connection to the router sends its request again.
    """

    url: str
    cases: Sequence[Case]
    rng: random.Random
    streams: list[Stream] = field(default_factory=list)

    async def run(self, clients: int, stop: asyncio.Event) -> None:
        """Returns after `stop`, once every client has read its last answer to the end."""
        async with new_session() as http:

            async def client() -> None:
                while not stop.is_set():
                    case = self.rng.choice(self.cases)
                    while (stream := await read(http, self.url, case)).cut:
                        if stream.status:
                            self.streams.append(
                                stream
                            )  # else no router listened, and the request never began
                        await asyncio.sleep(RECONNECT_S)
                    self.streams.append(stream)

            await asyncio.gather(*(client() for _ in range(clients)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of all answers with the right ones."""

    requests: int
    tokens: int
    failed: int
    reconnected: int  # connections lost because a router was killed
    lost_or_repeated: int  # tokens by which answers are too short or too long
    different: int  # tokens that differ from a run without faults
    errors: tuple[str, ...]


def judge(
    streams: Sequence[Stream], right: Mapping[Case, list[int]], routers_killed: Sequence[Happened] = ()
) -> Verdict:
    """A stream that was cut while its router was killed counts as reconnected, not as failed."""
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
        # The tokens before a failure must be right, too.
        different += sum(a != b for a, b in zip(stream.token_ids, expected, strict=False))
    tokens = sum(len(stream.token_ids) for stream in streams)
    return Verdict(len(streams), tokens, len(failures), reconnected, lost, different, tuple(failures))


def pauses(streams: Sequence[Stream], happened: Happened) -> list[float]:
    """Seconds without a token around a fault, for every stream that ran at that time."""
    return [gap for stream in streams if (gap := stream.gap_around(happened.at)) is not None]
