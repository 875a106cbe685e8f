"""The command `baton bench`: run, sweep, replay, compare, report.

Exit codes: 0 measured; 1 nothing could be measured, the server refused many requests in a row, or a --fail-if
holds; 2 a mistake in the options; 3 the client could not keep up, so the numbers are invalid; 130 stopped by
Ctrl-C.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from baton.bench.load.flags import takes_options
from baton.bench.load.options import (
    Options,
    OutputOptions,
    PaceOptions,
    ShapeOptions,
    SloOptions,
    SweepOptions,
    TargetOptions,
    TraceOptions,
    WorkloadOptions,
)
from baton.bench.load.traffic.datasets import SAMPLE_TRACE

app = typer.Typer(
    name="bench",
    help="Load tests of any OpenAI-compatible server: TTFT, TTIT, throughput and goodput.\n\n"
    "Latency counts from the intended send time. A failed request counts as a miss. A run in which this "
    "client could not keep up is marked invalid.",
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
    from baton.bench.load.commands import measure

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
    loads: SweepOptions,
) -> int:
    """Measure several loads one after another, or search the highest rate that meets --slo."""
    from baton.bench.load.commands import search, sweep_over

    if shape.rate is not None:
        raise ValueError(f"--rate {shape.rate:g}: a sweep sets the rate itself. Leave it out.")
    if loads.find_rate is not None and not slo.slo:
        raise ValueError("--find-rate needs an objective: give --slo, like ttft.p99=300,ttit.p99=50.")
    shapes = [dataclasses.replace(shape, **load) for load in loads.loads]
    points = [_options(target, workload, each, pace, slo, output) for each in shapes]
    if loads.find_rate is not None:
        return asyncio.run(search(points[0], output, loads.find_rate))
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
    from baton.bench.load.commands import measure

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
            metavar="CONDITION", help="Exit with 1 if this holds for a row; may be repeated: "
            "ttit.p99>+5%, throughput.requests<-5%, ttft.p50>+20 (ms more), requests.failed>0.",
            show_default="never",
        ),
    ] = [],  # noqa: B006 - typer's default, never changed
) -> int:  # fmt: skip
    """Compare runs row by row. For CI, --fail-if turns a change into an exit code."""
    from baton.bench.load.report import compare as comparing
    from baton.bench.load.report.table import console

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
    from baton.bench.load.report import compare as comparing
    from baton.bench.load.report.page import page

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
    options = Options(target=target, workload=workload, shape=shape, pace=pace, slo=slo)
    return options if pace.seed is None else dataclasses.replace(options, seed=pace.seed)
