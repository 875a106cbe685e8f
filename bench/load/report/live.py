"""Progress during a run: a bar with percentiles in a terminal, a line every few seconds elsewhere."""

import asyncio
import time
from collections import deque
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.load.report.table import ms
from baton.bench.load.target.answer import Failure, Record
from baton.bench.load.traffic.fleet import Harvest
from baton.steps.quantiles import percentile

_RECENT_SECONDS = 15.0
_MOST_RECENT = 300
_REFRESH = 0.5
_LINE_EVERY = 10.0


class Progression:
    """Use with `async with` around a run.

    `saw` gets every record. Prints on stderr; stdout has the result.
    """

    def __init__(
        self, title: str, duration: float | None, requests: int | None, harvest: Harvest, *, quiet: bool
    ) -> None:
        """`duration` in seconds, `requests`: of the run, as far as they are known."""
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self._duration, self._total, self._harvest = duration, requests, harvest
        self._recent: deque[tuple[float, Record]] = deque(maxlen=_MOST_RECENT)
        self._ok = self._failed = 0
        self._bar = Progress(
            TextColumn(f"[bold]{title}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(), TextColumn("{task.description}"), console=self._console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=1.0)
        self._ticker: asyncio.Task[None] | None = None

    def saw(self, record: Record) -> None:
        self._recent.append((time.monotonic(), record))
        if record.ok:
            self._ok += 1
        elif record.failure is not Failure.INTERRUPTED:
            self._failed += 1

    async def __aenter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._ticker is not None
        self._ticker.cancel()
        self._bar.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH if self._console.is_terminal else _LINE_EVERY)
            if self._console.is_terminal:
                self._bar.update(self._task, completed=self._share(), description=self._line())
            else:
                self._console.print(self._line())

    def _share(self) -> float:
        started = self._harvest.started
        by_time = (time.monotonic() - started) / self._duration if started and self._duration else 0.0
        by_count = (self._ok + self._failed) / self._total if self._total else 0.0
        return min(1.0, max(by_time, by_count))

    def _line(self) -> str:
        now = time.monotonic()
        recent = [r for at, r in self._recent if r.ok and now - at < _RECENT_SECONDS]
        in_flight = sum(each.in_flight for each in self._harvest.progress.values())
        text = f"{self._ok} answered, {in_flight} in flight"
        if in_flight and self._share() >= 1:
            text = f"all sent, waiting for answers: {text}"
        if self._failed:
            text += f", [red]{self._failed} FAILED[/red]"
        for name, values in (
            ("TTFT", [r.ttft for r in recent]),
            ("ITL", [g for r in recent for g in r.gaps]),
        ):
            if values:
                p50, p99 = (percentile(values, q) * 1e3 for q in (0.5, 0.99))
                text += f"  {name} {ms(p50)} / {ms(p99)}"
        return f"{text} ms p50 / p99" if recent else text
