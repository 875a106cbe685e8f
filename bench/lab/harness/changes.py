"""Streams that run while weights change beneath them, and the answers after that."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from baton.bench.lab.harness.streams import Case, Stream, Verdict, leaked, new_session, read, until, zeros
from baton.bench.report import Report

BEGUN, GONE_ON = 4, 32
"""Tokens that each stream has when the change begins, and those that it still gets after it."""

T = TypeVar("T")


async def beside(
    url: str, cases: Sequence[Case], longest: int, change: Callable[[], Awaitable[T]]
) -> tuple[T, list[Stream], float]:
    """Makes the change while a stream of each case runs. Returns what `change` returns, the streams, and the
    seconds of their longest gap since it began. `longest`: tokens of a stream. Another one follows it."""
    streams, over = list[Stream](), asyncio.Event()
    async with new_session() as http:

        async def one_after_another(case: Case) -> None:
            while not over.is_set() and not any(stream.error or stream.cut for stream in streams):
                streams.append(stream := Stream(case))
                await read(http, url, case, into=stream)

        long = [replace(case, max_tokens=longest) for case in cases]
        reading = [asyncio.create_task(one_after_another(case)) for case in long]

        def begun() -> bool:
            assert not any(stream.error or stream.cut for stream in streams), "before the change"
            return len(streams) >= len(long) and all(len(stream.token_ids) >= BEGUN for stream in streams)

        await until(begun, reading)
        began = time.monotonic()
        done = await change()
        over.set()
        running = [(stream, len(stream.token_ids)) for stream in streams if not stream.ended]
        await until(
            lambda: all(s.ended or len(s.token_ids) >= count + GONE_ON for s, count in running), reading
        )
        for task in reading:
            task.cancel()
        for ended in await asyncio.gather(*reading, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended
    gaps = (b - a for stream in streams for a, b in pairwise(stream.arrivals) if b > began)
    return done, streams, max(gaps, default=0.0)


def tell(
    report: Report,
    prefix: str,
    streams: Sequence[Stream],
    verdicts: Sequence[Verdict],
    leaks: Mapping[str, int],
) -> None:
    """Adds the rows that must be 0. `streams`: those of `beside`, which may be cut off in the middle.
    `verdicts`: of the answers after each change."""
    failed = sum(bool(stream.error) or stream.cut for stream in streams)
    failed += sum(s.finish_reason is not None and len(s.token_ids) < s.case.max_tokens for s in streams)
    failed += sum(each.failed for each in verdicts)
    different = sum(each.different + each.lost_or_repeated for each in verdicts)
    zeros(report, prefix, different=(different, "tokens"), failed=(failed, "answers"), leaked=leaked(leaks))
