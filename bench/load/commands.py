"""The commands: measure, show, write. After Ctrl-C they report what was measured, marked as incomplete."""

import asyncio
import dataclasses
import math
import signal
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import typer

from baton.bench.load import experiment
from baton.bench.load.options import Options
from baton.bench.load.report import page, table
from baton.bench.load.report.live import Progression
from baton.bench.load.target.answer import Record
from baton.bench.load.target.endpoint import EndpointError
from baton.bench.load.traffic.fleet import REFUSALS, Fleet, Harvest
from baton.bench.report import Report, Row
from baton.processes.tree import StopSignals

OK, NOTHING, INVALID, INTERRUPTED = 0, 1, 3, 130
PRECISION = 0.05
LEAST_RATE, MOST_RATE = 1e-2, 1e5
"""Of a search, in sessions per second."""


Run = tuple[Report, Harvest]
"""What was measured, and what the clients reported."""


async def measure(options: Options) -> int:
    """Measures one run. Returns the exit code."""
    done = await _one(options, "run", _signals())
    if isinstance(done, int):
        return done
    report, harvest = done
    table.console().print(table.render(report.as_dict()))
    if options.jsonl is not None:
        write_requests(harvest.records, options.jsonl)
    _write(report, options)
    return _code(done)


async def sweep_over(points: Sequence[Options]) -> int:
    """Measures one run after another, each with other prompts. Returns the exit code."""
    done: list[tuple[str, Report]] = []
    codes: list[int] = []
    signals = _signals()
    for number, options in enumerate(points):
        run = await _point(options, number, f"{number + 1}/{len(points)} {_prefix(options)}", signals)
        codes.append(run if isinstance(run, int) else _code(run))
        if isinstance(run, int):
            break
        done.append((_prefix(options), run[0]))
        if run[1].interrupted:
            break
    _show_sweep(done, None, points[0])
    return max(codes)


async def search(options: Options) -> int:
    """Measures from the rate of `options` until the highest one within the objectives is known. Returns the
    exit code."""
    assert options.rate is not None
    done: list[tuple[str, Report]] = []
    rates = highest_rate(options.rate)
    rate, best, code = next(rates), None, None
    signals = _signals()
    while code is None:
        point = dataclasses.replace(options, rate=rate)
        run = await _point(point, len(done), f"{rate:.4g}/s", signals)
        if isinstance(run, int):
            code = run
            break
        report, harvest = run
        done.append((_prefix(point), report))
        if harvest.interrupted or not report.detail["valid"]:
            code = _code(run)  # the run says nothing about the server
            break
        try:
            rate = rates.send(bool(report.detail["slo_met"]) and report.detail["steady"] is not False)
        except StopIteration as found:
            best = found.value
            code = NOTHING if best is None else OK
    if code == NOTHING and done:
        typer.secho(f"No rate meets {options.objectives}.", fg="yellow", err=True)
    found = (
        None if best is None else Row("max_rate", best, "sessions/s", low=best, high=best * (1 + PRECISION))
    )
    _show_sweep(done, found, options)
    return code


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


async def _point(options: Options, number: int, title: str, signals: StopSignals) -> Run | int:
    """Each run has other prompts, so that no run warms the prefix cache for the next one."""
    seed = None if options.seed is None else options.seed + number
    return await _one(dataclasses.replace(options, seed=seed), title, signals)


def _signals() -> StopSignals:
    signals = StopSignals()
    signals.install()
    return signals


async def _one(options: Options, title: str, signals: StopSignals) -> Run | int:
    """Returns the run, or an exit code if there is none."""
    try:
        preparing = asyncio.create_task(experiment.prepare(options))
        await signals.unless_stopped(preparing)
        if signals.stop.is_set():
            preparing.cancel()
            return INTERRUPTED
        setup = preparing.result()
        fleet, started = Fleet(setup.clients()), datetime.now(UTC).isoformat(timespec="seconds")
        async with Progression(
            title, setup.client.duration, setup.requests, fleet.harvest, quiet=options.quiet
        ) as progression:
            running = asyncio.create_task(fleet.run(progression.saw))
            await signals.unless_stopped(running)
            if signals.stop.is_set():
                typer.secho("Stopping. Press Ctrl-C again to stop at once.", fg="yellow", err=True)
                fleet.stop()
                for number in (signal.SIGINT, signal.SIGTERM):  # the next one kills this process
                    asyncio.get_running_loop().remove_signal_handler(number)
            harvest = await running
        if harvest.refused:
            text = (
                f"Error: stopped, because the server refused {REFUSALS} requests in a row: {harvest.refused}"
            )
            typer.secho(text, fg="red", err=True)
        return experiment.report_of(setup, harvest, started), harvest
    except EndpointError as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        return NOTHING


def report_of_sweep(points: Sequence[tuple[str, Report]], best: Row | None) -> Report:
    """`points`: the prefix of the row names and the report of each run.

    `best`: the highest rate within the SLO.
    """
    parameters = dict(points[0][1].parameters)
    parameters["load"] = f"sweep: {', '.join(prefix for prefix, _ in points)}"
    rows = [] if best is None else [best]
    for prefix, point in points:
        rows += [dataclasses.replace(row, name=f"{prefix}.{row.name}") for row in point.rows]
    runs = [point.as_dict() for _, point in points]
    detail = {
        "valid": all(run["detail"]["valid"] for run in runs),
        "incomplete": any(run["detail"]["incomplete"] for run in runs),
        "points": runs,
        "loads": [float(prefix.partition("=")[2]) for prefix, _ in points],
    }
    return Report("load", parameters, started=points[0][1].started, rows=rows, detail=detail)


def _show_sweep(done: Sequence[tuple[str, Report]], best: Row | None, options: Options) -> None:
    if done:
        report = report_of_sweep(done, best)
        table.console().print(table.render_sweep(report.as_dict()))
        _write(report, options)


def write_requests(records: Sequence[Record], path: Path) -> None:
    """Writes one JSON object per line, in order of the intended send time."""
    ordered = sorted(records, key=lambda r: (r.intended, r.index, r.turn))
    path.write_bytes(b"".join(msgspec.json.encode(record.as_line()) + b"\n" for record in ordered))


def _write(report: Report, options: Options) -> None:
    report.json_path = options.json
    report.write(indent=1)
    if options.html is not None:
        page.write(options.html, [report.as_dict()], [options.html.stem])
    for path in (options.json, options.jsonl, options.html):
        if path is not None and not options.quiet:
            typer.echo(f"{path} written.", err=True)


def _code(run: Run) -> int:
    report, harvest = run
    answered = any(row.name == "requests.ok" and row.value for row in report.rows)
    if harvest.refused or not (answered or harvest.interrupted):
        return NOTHING
    if harvest.interrupted:
        return INTERRUPTED
    return OK if report.detail["valid"] else INVALID


def _prefix(options: Options) -> str:
    """The prefix of the row names of one run in a sweep."""
    if options.rate is not None:
        return f"rate={options.rate:.4g}"
    return f"concurrency={options.concurrency}"
