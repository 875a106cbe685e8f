"""The commands: measure, show, write. After Ctrl-C they report what was measured, marked as incomplete."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import signal
from collections.abc import Callable, Coroutine, Generator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import typer

from baton.bench.contract import Report, Row
from baton.bench.load import experiment
from baton.bench.load.experiment import Outcome
from baton.bench.load.options import Options, OutputOptions
from baton.bench.load.report import results, table
from baton.bench.load.report.live import Progression
from baton.bench.load.report.page import page
from baton.bench.load.target.endpoint import EndpointError
from baton.bench.load.traffic.fleet import REFUSALS, Fleet

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
OK, NOTHING, INVALID, INTERRUPTED = 0, 1, 3, 130
PRECISION = 0.05
LEAST_RATE, MOST_RATE = 1e-2, 1e5
"""Of a search, in sessions per second."""


async def measure(options: Options, output: OutputOptions) -> int:
    """Measures one run. Returns the exit code."""
    started = _now()
    with _Interrupt() as interrupt:
        outcome = await _one(options, output, "run", interrupt)
    if not isinstance(outcome, Outcome):
        return outcome
    report = results.report_of(outcome, started, output.json)
    table.console().print(table.render(report.as_dict()))
    _write(report, output)
    if output.jsonl is not None:
        results.write_requests(outcome, output.jsonl)
    return _code(outcome)


async def sweep_over(points: Sequence[Options], output: OutputOptions) -> int:
    """Measures one run after another, each with other prompts. Returns the exit code."""
    started = _now()
    done: list[tuple[str, Report]] = []
    codes: list[int] = []
    with _Interrupt() as interrupt:
        for number, options in enumerate(points):
            title = f"{number + 1}/{len(points)} {_prefix(options)}"
            outcome = await _point(options, number, output, title, interrupt)
            if not isinstance(outcome, Outcome):
                codes.append(outcome)
                break
            done.append((_prefix(options), results.report_of(outcome, started)))
            codes.append(_code(outcome))
            if outcome.incomplete:
                break
    return _finish_sweep(done, None, started, output, max(codes))


async def search(options: Options, output: OutputOptions, first: float) -> int:
    """Measures until the highest rate within the objectives is known. Returns the exit code."""
    started = _now()
    done: list[tuple[str, Report]] = []
    asked = highest_rate(first)
    rate, best, code = next(asked), None, None
    with _Interrupt() as interrupt:
        while code is None:
            point = dataclasses.replace(options, shape=dataclasses.replace(options.shape, rate=rate))
            outcome = await _point(point, len(done), output, f"{rate:.4g}/s", interrupt)
            if not isinstance(outcome, Outcome):
                code = outcome
                break
            done.append((_prefix(point), results.report_of(outcome, started)))
            if outcome.incomplete or not outcome.valid:
                code = _code(outcome)  # the run says nothing about the server
                break
            try:
                rate = asked.send(
                    bool(outcome.summary.slo_met) and outcome.summary.steadiness.steady is not False
                )
            except StopIteration as found:
                best = found.value
                code = NOTHING if best is None else OK
    row = None if best is None else Row("max_rate", best, "sessions/s")
    if code == NOTHING and done:
        typer.secho(f"No rate meets {options.slo.objectives}.", fg="yellow", err=True)
    return _finish_sweep(done, row, started, output, code)


def highest_rate(first: float) -> Generator[float, bool, float | None]:
    """Yields rates to measure and gets whether each was good. Returns the highest good rate, or None.

    Doubles the first rate until a run misses, or halves it until a run meets the objective. Then it bisects
    geometrically. Ends when the lowest bad rate is at most `1 + PRECISION` times the highest good rate.
    """
    assert first > 0
    good: float | None = None
    bad: float | None = None
    rate = first
    while LEAST_RATE <= rate <= MOST_RATE:
        if (yield rate):
            good = rate
        else:
            bad = rate
        if good is not None and bad is not None:
            if bad <= good * (1 + PRECISION):
                return good
            rate = math.sqrt(good * bad)
        else:
            rate = rate * 2 if bad is None else rate / 2
    return good


async def _point(
    options: Options, number: int, output: OutputOptions, title: str, interrupt: _Interrupt
) -> Outcome | int:
    """Each run has other prompts, so that no run warms the prefix cache for the next one."""
    return await _one(dataclasses.replace(options, seed=options.seed + number), output, title, interrupt)


async def _one(options: Options, output: OutputOptions, title: str, interrupt: _Interrupt) -> Outcome | int:
    """Returns the outcome, or an exit code if there is none."""
    try:
        plan = await interrupt.guard(experiment.prepare(options))
        if plan is None:
            return INTERRUPTED
        async with Progression(
            title, plan.client.duration, plan.client.sessions, quiet=output.quiet
        ) as progression:

            def watch(fleet: Fleet) -> None:
                progression.watch(fleet.harvest)
                interrupt.then(fleet.stop)

            outcome = await experiment.run(plan, progression.saw, watch)
        if outcome.refused:
            text = (
                f"Error: stopped, because the server refused {REFUSALS} requests in a row: {outcome.refused}"
            )
            typer.secho(text, fg="red", err=True)
        return outcome
    except EndpointError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        return NOTHING


def _finish_sweep(
    done: Sequence[tuple[str, Report]],
    found: Row | None,
    started: str,
    output: OutputOptions,
    code: int,
) -> int:
    if done:
        report = results.report_of_sweep(done, found, started, output.json)
        table.console().print(table.render_sweep(report.as_dict()))
        _write(report, output)
    return code


def _write(report: Report, output: OutputOptions) -> None:
    report.write(indent=1)
    if output.html is not None:
        output.html.write_text(page([report.as_dict()], ["this run"]))
    for path in (output.json, output.html, output.jsonl):
        if path is not None and not output.quiet:
            typer.echo(f"{path} written.", err=True)


def _code(outcome: Outcome) -> int:
    if outcome.refused or (not outcome.summary.ok and not outcome.incomplete):
        return NOTHING
    if outcome.incomplete:
        return INTERRUPTED
    return OK if outcome.valid else INVALID


def _prefix(options: Options) -> str:
    """The prefix of the row names of one run in a sweep."""
    shape = options.shape
    return f"rate={shape.rate:.4g}" if shape.rate is not None else f"concurrency={shape.concurrency}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Interrupt:
    """A context. Within it the first SIGINT or SIGTERM ends the work in order; the second one kills."""

    def __init__(self) -> None:
        self.happened = False
        self._end: Callable[[], object] | None = None

    def __enter__(self) -> _Interrupt:
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._fire)
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def then(self, end: Callable[[], object]) -> None:
        """A signal calls `end` from now on. If a signal has come already, calls `end` at once."""
        self._end = end
        if self.happened:
            end()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of `work`, or None if a signal ended it."""
        task = asyncio.create_task(work)
        self.then(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            if not self.happened:
                raise
            return None

    def _fire(self) -> None:
        self.happened = True
        self._release()
        typer.secho("Stopping. Press Ctrl-C again to stop at once.", fg="yellow", err=True)
        if self._end is not None:
            self._end()

    def _release(self) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
