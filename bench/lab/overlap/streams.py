"""Streams beside the handovers that are measured, and the workers' traces."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Self

from baton.bench.lab.harness.workers import Workers, prompt_of, request
from baton.rpc import worker_pb2 as pb


@dataclass
class Background:
    """Streams that keep the decode batch at a size while other requests are measured."""

    workers: Workers
    attempts: list[bytes]
    length: int
    """Tokens after which a stream ends. A longer measurement fails."""

    @classmethod
    async def start(cls, workers: Workers, size: int, context: int, length: int, seed: int) -> Self:
        attempts: list[bytes] = []
        for number in range(size):
            work = request(prompt_of(context, seed + number), length)
            prefill_id = await workers.prefill.prefill(work, handover=True)
            attempts.append(await workers.submit_decode(work, prefill_id))
        for decode_id in attempts:
            await workers.decode.tokens(decode_id, 2)
        return cls(workers, attempts, length)

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between tokens of all streams within a time. Raises RuntimeError if one has ended."""
        times = [self.workers.decode.times(decode_id) for decode_id in self.attempts]
        if any(len(series) >= self.length for series in times):
            raise RuntimeError(
                f"a stream of --batch ended after its {self.length} tokens, before all gaps were measured: "
                "measure with --short, or shorter --tokens"
            )
        inside = [[at for at in series if since <= at <= until] for series in times]
        return [b - a for series in inside for a, b in itertools.pairwise(series)]

    async def stop(self, count: int | None = None) -> None:
        """Ends `count` streams; None: all."""
        ended, self.attempts = self.attempts[:count], self.attempts[len(self.attempts[:count]) :]
        for decode_id in ended:
            await self.workers.decode.send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=decode_id)))


AT_ONCE = 2
"""Prompts that are handed over at a time.

With two, a prefill begins before all KV of the last one has come.
"""


async def quiet_gaps(background: Background, context: int, seconds: float, seed: int) -> list[float]:
    """Gaps of the background streams while no KV comes. `AT_ONCE` more streams keep the batch size equal."""
    more = await Background.start(background.workers, AT_ONCE, context, background.length, seed)
    began, gaps = time.perf_counter(), []
    while not gaps:
        await asyncio.sleep(seconds)
        gaps = background.gaps(began, time.perf_counter())
    await more.stop()
    return gaps


async def injected_gaps(background: Background, tokens: int, seconds: float, seed: int) -> list[float]:
    """Gaps of the background streams while prompts are handed over all the time."""
    number = itertools.count(seed)
    began = time.perf_counter()
    while True:
        prompts = [prompt_of(tokens, next(number)) for _ in range(AT_ONCE)]
        await asyncio.gather(*(background.workers.handover(request(prompt, 3)) for prompt in prompts))
        # Not earlier: collecting gaps takes some milliseconds and would delay timestamps of tokens.
        if time.perf_counter() >= began + seconds and (gaps := background.gaps(began, time.perf_counter())):
            return gaps


@dataclass(frozen=True)
class Joined:
    at: float
    size: int  # bytes of KV
    fetch_seconds: float


@dataclass
class Trace:
    """Times in seconds of CLOCK_MONOTONIC, which all processes of a host share."""

    taken: dict[bytes, float] = field(default_factory=dict)  # by the engine, by prefill id
    first_token: dict[bytes, float] = field(default_factory=dict)  # by prefill id
    joined: dict[bytes, Joined] = field(default_factory=dict)  # by decode id

    @classmethod
    def read(cls, *paths: Path) -> Self:
        """Of some processes. Complete when they have ended."""
        trace = cls()
        for event in chain.from_iterable(map(events, paths)):
            at, fields = event.get("ts", 0.0) / 1e6, event["args"]
            match event["name"]:
                case "taken":
                    trace.taken[bytes.fromhex(fields["attempt"])] = at
                case "first token":
                    trace.first_token[bytes.fromhex(fields["prefill"])] = at
                case "joined":
                    joined = Joined(at, fields["bytes"], fields["fetch_us"] / 1e6)
                    trace.joined[bytes.fromhex(fields["decode"])] = joined
        return trace


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Those in the trace of a process, as `TraceWriter` writes them."""
    return (json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:])
