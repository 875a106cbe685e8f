"""The command `baton bench`: run, sweep, agents, replay, compare.

Exit codes: 0 measured; 1 nothing could be measured, the server refused many requests in a row, or a --fail-if
holds; 2 a mistake in the options; 3 the client could not keep up, so the numbers are invalid; 130 stopped by
Ctrl-C.
"""

import asyncio
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.bench.load import options as groups
from baton.bench.load.options import Options, Runs
from baton.bench.load.traffic.trace import SAMPLE_TRACE
from baton.cluster.options.command import Command
from baton.cluster.options.parameters import group_parameters, with_clear_errors

app = typer.Typer(
    name="bench",
    help="Load tests of any OpenAI-compatible server: TTFT, ITL, throughput and goodput.\n\n"
    "Latency counts from the intended send time. A failed request counts as a miss. A run in which this "
    "client could not keep up is marked invalid.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(
    *examples: str, takes: tuple[type, ...] = (), given: Callable[..., Any] = Options
) -> Callable[[Callable[..., int]], Callable[..., Any]]:
    """Registers a function that returns the exit code.

    `takes`: groups of flags; of a name that two have, the later one counts. The function gets their values as
    `given` makes them of it, by default as one `Options`, in which the other groups have their defaults.
    Without groups it has ordinary typer parameters.
    """

    def register(function: Callable[..., int]) -> Callable[..., Any]:
        def run(**values: Any) -> int:
            return function(given(**values)) if takes else function(**values)

        parameters = [*inspect.signature(function, eval_str=True).parameters.values()]
        if takes:
            named = {p.name: p for group in takes for p in group_parameters(group, variables=False)}
            parameters = [*named.values()]
        registered = app.command(cls=Command, epilog="\n".join(examples))
        return registered(with_clear_errors(run, function, parameters))

    return register


@command(
    "baton bench run --url http://127.0.0.1:8000",
    "baton bench run --rate 8 --duration 60 --input-len 2000 --output-len 150 --json report.json",
    "baton bench run --concurrency 32 --turns uniform:2,6 --think-time exponential:3 --api chat",
    takes=(groups.Target, groups.Workload, groups.Rate, groups.Load, groups.Output),
)
def run(options: Options) -> int:
    """Measure a server under one load: closed loop by default, open loop with --rate."""
    from baton.bench.load.commands import measure

    return asyncio.run(measure(options))


@command(
    "baton bench sweep --rate 1,2,4,8 --json sweep.json",
    "baton bench sweep --concurrency 1,4,16,64 --input-len 2000 --output-len 150",
    "baton bench sweep --find-rate 4 --slo ttft.p99=300,itl.p99=8.5",
    takes=(groups.Target, groups.Workload, groups.Rate, groups.Load, groups.Output, groups.Sweep),
    given=Runs.of,
)
def sweep(runs: Runs) -> int:
    """Measure several loads one after another, or search the highest rate that meets --slo."""
    from baton.bench.load.commands import search, sweep_over

    return asyncio.run(search(runs.points[0]) if runs.searches else sweep_over(runs.points))


@command(
    "baton bench agents --url http://127.0.0.1:8000",
    "baton bench agents --concurrency 48 --sessions 96 --turns 8 --json agents.json",
    "baton bench agents --url http://127.0.0.1:8001,http://127.0.0.1:8002 --seed 1",
    "baton bench agents --concurrency 2 --prefix-len 200 --context-len 100 --input-len 40 --output-len 16",
    takes=(groups.Target, groups.Agents, groups.Load, groups.Output),
)
def agents(options: Options) -> int:
    """Measure what agents feel: sessions of many turns, most of each prompt cached.

    --concurrency sessions run at a time and start at once. docs/load-tests.md explains the report.
    """
    from baton.bench.load.commands import measure

    agents = options.concurrency or groups.DEFAULT_AGENTS
    unlimited = options.requests is None and options.duration is None
    return asyncio.run(
        measure(
            dataclasses.replace(
                options,
                concurrency=agents,
                requests=2 * agents if unlimited else options.requests,
                warmup=options.warmup or 0.0,
            )
        )
    )


@command(
    "baton bench replay mooncake_trace.jsonl --advanced.first 150 --speed 0.5",
    "baton bench replay mooncake_trace.jsonl --url http://127.0.0.1:8001,http://127.0.0.1:8002",
    "baton bench replay --advanced.length-scale 0.02 --duration 60",
    takes=(groups.Target, groups.Trace, groups.Load, groups.Output),
)
def replay(options: Options) -> int:
    """Replay a trace: its times, lengths and shared prefixes.

    A line of the trace is a request: timestamp (ms), input_length, output_length, and hash_ids, one for each
    block of the prompt. Equal ids are equal tokens, so a cache can do what it did for the trace. Requests
    that begin alike (--advanced.session-blocks) are one session.
    """
    from baton.bench.load.commands import measure

    return asyncio.run(measure(dataclasses.replace(options, trace=options.trace or SAMPLE_TRACE)))


@command("baton bench compare before.json after.json --fail-if 'itl.p99>+5%' --fail-if 'requests.failed>0'")
def compare(
    reports: Annotated[list[Path], typer.Argument(metavar="OLD NEW [NEW…]", help="Files that --json wrote.")],
    fail_if: Annotated[
        list[str],
        typer.Option(
            metavar="CONDITION", help="Exit with 1 if this holds for a row; may be repeated: "
            "itl.p99>+5%, throughput.requests<-5%, ttft.p50>+20 (ms more), requests.failed>0.",
            show_default="never",
        ),
    ] = [],  # noqa: B006 - typer's default, never changed
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a page that draws the runs over each other.", show_default="none"
        ),
    ] = None,
) -> int:  # fmt: skip
    """Compare runs row by row. For CI, --fail-if turns a change into an exit code."""
    from baton.bench.load.report import compare as comparing
    from baton.bench.load.report import page
    from baton.bench.load.report.table import console

    if len(reports) < 2:
        raise ValueError(f"compare {reports[0]}: with what? Give two reports or more.")
    conditions = [comparing.Condition.parse(text) for text in fail_if]
    loaded = [comparing.load(path) for path in reports]
    verdict = comparing.judge(loaded, conditions)
    names = [path.stem for path in reports]
    console().print(comparing.render(loaded, names, verdict))
    if html is not None:
        page.write(html, loaded, names, verdict)
    return 1 if verdict.failed else 0
