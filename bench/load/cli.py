"""The command `baton bench`: run, sweep, replay, compare, report.

Exit codes: 0 measured; 1 nothing could be measured, the server refused many requests in a row, or a --fail-if
holds; 2 what was asked for is wrong; 3 the client could not keep up, the numbers are invalid; 130 stopped by
Ctrl-C.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from bench.load.flags import takes_options
from bench.load.options import (
    Options,
    OutputOptions,
    PaceOptions,
    ShapeOptions,
    SloOptions,
    TargetOptions,
    TraceOptions,
    WorkloadOptions,
)
from bench.load.traffic.datasets import SAMPLE_TRACE

app = typer.Typer(
    name="bench",
    help="Load tests of any OpenAI-compatible server: TTFT, TTIT, throughput and goodput to rely on.\n\n"
    "Latency counts from the intended send time, failed requests are misses, and a run in which this client "
    "could not keep up is marked invalid.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _epilog(*examples: str) -> str:
    return "[dim]Examples[/dim]\n\n" + "\n\n".join(f"[cyan]{line}[/cyan]" for line in examples)


@app.command(
    epilog=_epilog(
        "baton bench run --url http://127.0.0.1:8000",
        "baton bench run --rate 8 --duration 60 --preset 2000/150 --slo ttft=500,ttit=50 --html report.html",
        "baton bench run --concurrency 32 --turns uniform:2,6 --think-time exponential:3 --api chat",
    )
)
@takes_options
def run(
    target: TargetOptions,
    workload: WorkloadOptions,
    shape: ShapeOptions,
    pace: PaceOptions,
    slo: SloOptions,
    output: OutputOptions,
) -> int:
    """Measure a server under one load: closed loop by default, open loop with --rate."""
    from bench.load.commands import measure

    return asyncio.run(measure(_options(target, workload, shape, pace, slo, output), output))


@app.command(
    epilog=_epilog(
        "baton bench sweep --rates 1,2,4,8 --html sweep.html",
        "baton bench sweep --concurrencies 1,4,16,64 --preset 2000/150",
        "baton bench sweep --find-rate 4 --slo ttft.p99=300,ttit.p99=8.5",
    )
)
@takes_options
def sweep(
    target: TargetOptions,
    workload: WorkloadOptions,
    shape: ShapeOptions,
    pace: PaceOptions,
    slo: SloOptions,
    output: OutputOptions,
    rates: Annotated[
        str,
        typer.Option(
            metavar="R,R,…", help="Open loops of these rates.", show_default="none", rich_help_panel="Sweep"
        ),
    ] = "",
    concurrencies: Annotated[
        str,
        typer.Option(
            metavar="N,N,…", help="Closed loops of so many users.", show_default="none",
            rich_help_panel="Sweep",
        ),
    ] = "",
    find_rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER_SECOND", help="Search the highest rate within --slo, from this one on.",
            show_default="none",
            rich_help_panel="Sweep",
        ),
    ] = None,
    precision: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the rate found, by bisection.", rich_help_panel="Sweep")
    ] = 0.05,
) -> int:  # fmt: skip
    """Measure a row of loads, or search the highest rate that keeps to --slo."""
    from bench.load.commands import search, sweep_over

    if sum(map(bool, (rates, concurrencies, find_rate))) != 1:
        raise ValueError("a sweep needs one of --rates, --concurrencies and --find-rate.")
    if shape.rate is not None:
        raise ValueError(f"--rate {shape.rate:g}: a sweep sets the rate itself. Leave it out.")
    if find_rate is not None and not slo.slo:
        raise ValueError("--find-rate needs an objective: give --slo, like ttft.p99=300,ttit.p99=50.")
    if not precision > 0:
        raise ValueError(f"--precision {precision:g} must be a positive number, like 0.05.")
    if concurrencies:
        users = _numbers("--concurrencies", concurrencies)
        shapes = [dataclasses.replace(shape, concurrency=_whole("--concurrencies", n)) for n in users]
    else:
        first = [find_rate] if find_rate is not None else _numbers("--rates", rates)
        shapes = [dataclasses.replace(shape, rate=rate) for rate in first]
    points = [_options(target, workload, s, pace, slo, output) for s in shapes]
    if find_rate is not None:
        return asyncio.run(search(points[0], output, find_rate, precision))
    # The prompts of all points follow from one seed.
    points = [dataclasses.replace(point, seed=points[0].seed) for point in points]
    return asyncio.run(sweep_over(points, output))


@app.command(
    epilog=_epilog(
        "baton bench replay mooncake_trace.jsonl --speed 0.5",
        "baton bench replay --length-scale 0.02 --duration 60",
    )
)
@takes_options
def replay(
    target: TargetOptions,
    trace_options: TraceOptions,
    pace: PaceOptions,
    slo: SloOptions,
    output: OutputOptions,
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="TRACE", help="JSONL in Mooncake's format.", show_default="a small sample"),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "--max-concurrency", metavar="N", help="Most in flight.", show_default="no limit"
        ),
    ] = None,
) -> int:
    """Replay a trace: its times, lengths and shared prefixes."""
    from bench.load.commands import measure

    options = dataclasses.replace(
        _options(target, WorkloadOptions(), ShapeOptions(concurrency=concurrency), pace, slo, output),
        trace=trace or SAMPLE_TRACE,
        replay=trace_options,
    )
    return asyncio.run(measure(options, output))


@app.command(
    epilog=_epilog(
        "baton bench compare before.json after.json --fail-if 'ttit.p99>+5%' --fail-if 'requests.failed>0'"
    )
)
@takes_options
def compare(
    reports: Annotated[list[Path], typer.Argument(metavar="OLD NEW [NEW…]", help="Files that --json wrote.")],
    fail_if: Annotated[
        list[str],
        typer.Option(
            metavar="CONDITION", help="Exit with 1 if it holds; may be repeated. A row of the reports: "
            "ttit.p99>+5%, throughput.requests<-5%, ttft.p50>+20 (ms more), requests.failed>0.",
            show_default="never",
        ),
    ] = [],  # noqa: B006 - typer's default, never changed
) -> int:  # fmt: skip
    """Compare runs row by row; decide for CI with --fail-if."""
    from bench.load.report import compare as comparing
    from bench.load.report.table import console

    if len(reports) < 2:
        raise ValueError(f"compare {reports[0]}: with what? Give two reports or more.")
    conditions = [comparing.Condition.parse(text) for text in fail_if]
    loaded = [comparing.load(path) for path in reports]
    verdicts = [comparing.judge(loaded[0], new, conditions) for new in loaded[1:]]
    whole = comparing.Verdict(
        tuple(f for v in verdicts for f in v.failed),
        tuple(dict.fromkeys(w for v in verdicts for w in v.warnings)),
    )
    console().print(comparing.render(loaded, [path.stem for path in reports], whole))
    return 1 if whole.failed else 0


@app.command(epilog=_epilog("baton bench report before.json after.json --html report.html"))
@takes_options
def report(
    reports: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Files that --json wrote.")],
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
) -> int:
    """Draw one HTML page of one run or sweep, or of several side by side."""
    from bench.load.report import compare as comparing
    from bench.load.report.page import page

    html.write_text(page([comparing.load(path) for path in reports], [path.stem for path in reports]))
    typer.echo(f"{html} written.")
    return 0


def _options(
    target: TargetOptions,
    workload: WorkloadOptions,
    shape: ShapeOptions,
    pace: PaceOptions,
    slo: SloOptions,
    output: OutputOptions,
) -> Options:
    options = Options(target=target, workload=workload, shape=shape, pace=pace, slo=slo, label=output.label)
    return options if pace.seed is None else dataclasses.replace(options, seed=pace.seed)


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(x) for x in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(n > 0 for n in numbers):
        raise ValueError(f"{option} {text!r}: give positive numbers separated by commas, like 1,2,4,8.")
    return numbers


def _whole(option: str, number: float) -> int:
    if number != int(number):
        raise ValueError(f"{option} {number:g}: users are whole numbers.")
    return int(number)
