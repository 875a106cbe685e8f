"""Two deployments under the same load, in turns: TTFT and gaps of each, and their ratios with intervals.

Each turn starts one side, measures all loads with one seed, and ends the side. The side that begins changes
with each seed. Both sides get the same prompts at the same times, and no prompt comes twice.

COMMAND runs COUNT times, with its own {port} and, if COUNT is above 1, its own GPU. COUNTxGPUS gives each so
many GPUs. Requests take turns among these processes. With --at-once both sides run at the same time, each on
its own GPUs, which takes half as long. {model} is a directory with the shape and a tokenizer of
--model-shape, for `--load-format dummy`. A figure or ratio is the median over the seeds, each seed on its
own. Intervals (95 %) are bootstraps over blocks of requests that follow each other. No p99 is of fewer than
100 values.

A load is fixed lengths, agents (`baton bench agents`), or a trace: give its file, FILE.jsonl, as a load. A
session, or the requests of a trace that begin with the same two blocks, go to one process of a side.

Without --side, Baton with a prefill and a decode worker is compared with Baton whose two workers do both. The
levels of the loads suit the 8B shape on two GPUs. On a CPU the embedded model gets smaller loads.

A side that did not start, or a machine that was taken away, costs only what it did not measure: give the
same line again with --resume, and the reports of the earlier run in --reports. Beside the report of a run
stand its requests (.jsonl) and, of Baton, what routers and workers said every two seconds (.status.jsonl).
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from baton.bench.lab.disagg.loads import (
    ENGINE_LOADS,
    LOADS,
    SHORT,
    TRACE_S,
    Load,
    command,
    trace_load,
    warm_up,
)
from baton.bench.lab.driver import Bench, Option, Run
from baton.bench.lab.harness.sides import SERVE, SIDE, Side, in_order, started, two_sides, watched
from baton.bench.lab.shapes import DENSE, SHAPES, write_shape
from baton.bench.load.measurement.quantiles import MIN_BLOCKS, QUANTILES, Series, interval
from baton.bench.report import Row
from baton.system.python_path import python_path

FIXED = ("ttft.p50", "ttft.p99", "gap.p99")
FIGURES = {
    "agents": (
        "e2e.per_token.p50", "e2e.per_token.p90", "ttft.first.p50", "ttft.first.p90",
        "ttft.later.p50", "ttft.later.p90", "ttft.later.p99", "gap.p50", "gap.p99",
    ),
    "trace": ("e2e.per_token.p50", "e2e.per_token.p90", "ttft.p50", "ttft.p99", "gap.p99"),
    "batch": ("gap.p50", "gap.p99"),
    "closed": ("ttft.p50", "ttft.p99", "gap.p50", "gap.p99"),
}  # fmt: skip
"""By kind of load; the others have `FIXED`."""
SPEED = "throughput.output_tokens"
TOTALS = {
    SPEED: "tokens/s", "goodput.share": "share", "requests.failed": "requests",
    "requests.refused": "requests", "input.cached": "share",
}  # fmt: skip
"""Rows of `baton bench` → their units. The report has their means over the seeds."""
ON_DEVICE = {
    "cpu": "--device cpu --dtype float32 --advanced.num-threads 1",
    "cuda": "--model {model} --load-format dummy --max-model-len {context}",
}
Request = dict[str, np.ndarray]
"""In ms: "ttft", "gap", "e2e.per_token", and "ttft.first" or "ttft.later"; one has no values."""


@dataclass
class Measured:
    """One side at one level of a load. `totals` has the rows `TOTALS` of each run, `requests` those of each
    seed."""

    kind: str
    requests: list[list[Request]] = field(default_factory=list)
    totals: list[dict[str, float]] = field(default_factory=list)


Found = dict[str, dict[str, Measured]]
"""By load and level, then by side."""


def run(url: str, arguments: Sequence[str], file: Path) -> None:
    """Runs `baton bench ARGUMENTS` in a child process, which writes its report to `file`.

    Prints what a reader needs to judge the results. A run whose client was too slow counts: with few cores
    every client is too slow. Raises RuntimeError if there is no report.
    """
    file.unlink(missing_ok=True)
    line = [
        sys.executable, "-m", "baton.cluster.cli", "bench", *arguments,
        "--url", url, "--quiet", "--json", str(file),
    ]  # fmt: skip
    environment = os.environ | python_path()
    code = subprocess.run(line, stdout=subprocess.DEVNULL, check=False, env=environment).returncode
    if not file.exists():
        raise RuntimeError(f"{' '.join(line)}: exit code {code}")
    report = json.loads(file.read_text())
    detail = report["detail"]
    slow = [f"the client could not keep up: {reason}" for reason in detail["invalid_reasons"]]
    for note in (*slow, *detail["notes"]):
        print(f"bench.disagg: {' '.join(arguments)}: {note}", file=sys.stderr)


def requests_of(lines: Path) -> list[Request]:
    """The answered requests of a run, from the file of `baton bench --advanced.jsonl`."""
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    return [
        {
            "ttft": np.array([r["ttft_ms"]]),
            "ttft.first": np.array([] if r["turn"] else [r["ttft_ms"]]),
            "ttft.later": np.array([r["ttft_ms"]] if r["turn"] else []),
            "gap": np.diff(r["arrivals"]) * 1e3,
            "e2e.per_token": np.array([r["e2e_ms"] / max(1, r["output_tokens"] or len(r["arrivals"]))]),
        }
        for r in records
        if "ttft_ms" in r
    ]


def series(seeds: Sequence[Sequence[Request]], name: str) -> tuple[list[Series], float]:
    """The samples of a figure, by seed, and its quantile. No samples if there are too few in a seed."""
    kind, _, quantile = name.rpartition(".")
    groups, q = [Series.of([r[kind] for r in requests]) for requests in seeds], QUANTILES[quantile]
    return (groups if all(len(each.values) and (q <= 0.5 or each.knows(q)) for each in groups) else []), q


def at_least(values: Any) -> Any:
    """Tokens that are read together have no gap, and a ratio to none would be infinite."""
    return np.maximum(1e-3, values)


def figure(seeds: Sequence[Sequence[Request]], name: str) -> float | None:
    """In ms: the median over the seeds; None if a seed has too few values."""
    samples, q = series(seeds, name)
    return statistics.median(float(at_least(each.quantile(q))) for each in samples) if samples else None


def ratio(
    first_seeds: Sequence[Sequence[Request]], second_seeds: Sequence[Sequence[Request]], name: str
) -> tuple[float, float | None, float | None] | None:
    """Ours divided by theirs, and its 95 % interval; None if there are too few values for either."""
    (first, q), (second, _) = series(first_seeds, name), series(second_seeds, name)
    if not (first and second):
        return None
    pairs = list(zip(first, second, strict=True))
    value = statistics.median(float(at_least(a.quantile(q)) / at_least(b.quantile(q))) for a, b in pairs)
    if any(each.block_count < MIN_BLOCKS for each in (*first, *second)):
        return value, None, None
    draws = [
        at_least(a.draws(q, 2 * seed)) / at_least(b.draws(q, 2 * seed + 1))
        for seed, (a, b) in enumerate(pairs)
    ]
    return value, *interval(np.median(draws, axis=0))


def files(reports: Path, load: Load, level: float, side: Side, seed: int) -> tuple[Path, Path]:
    """The report of a run, which is written last, and its requests."""
    name = f"{load.name_at(level)}.{side.name}.{seed}"
    return reports / f"{name}.json", reports / f"{name}.jsonl"


def measure_side(
    side: Side, loads: Sequence[Load], args: Any, reports: Path, model: Path, seed: int, first_gpu: int
) -> None:
    """Writes the files of all loads. With `--resume` only those that are not there."""

    def is_left(load: Load, level: float) -> bool:
        return not (args.resume and files(reports, load, level, side, seed)[0].exists())

    missing = {load: [level for level in load.levels if is_left(load, level)] for load in loads}
    if not any(missing.values()):
        return
    with started(side, model, first_gpu) as servers:
        url = ",".join(servers)
        for load, levels in missing.items():
            for arguments in () if args.short or not levels else warm_up(load, seed):
                run(url, arguments, reports / f"warm-up.{side.name}")
            for level in levels:
                report, lines = files(reports, load, level, side, seed)
                count = min(args.requests, round(level * args.seconds) or 1)
                arguments = command(load, level, count, seed, reports)
                with watched([*servers], report.with_suffix(".status.jsonl")):
                    run(url, [*arguments, "--advanced.jsonl", str(lines)], report)


def found(
    sides: Sequence[Side], loads: Sequence[Load], args: Any, reports: Path, model: Path
) -> Iterator[Found]:
    """Yields what was found so far, after each seed."""
    results: Found = {}

    def turn(side: Side, seed: int, first_gpu: int) -> None:
        measure_side(side, loads, args, reports, model, seed, first_gpu)
        for load in loads:
            for level in load.levels:
                report, lines = files(reports, load, level, side, seed)
                values = {row["name"]: row["value"] for row in json.loads(report.read_text())["results"]}
                measured = results[load.name_at(level)][side.name]
                measured.requests.append(requests_of(lines))
                measured.totals.append({total: values[total] for total in TOTALS if total in values})

    for load in loads:
        for level in load.levels:
            results[load.name_at(level)] = {side.name: Measured(load.kind) for side in sides}
    for seed in range(args.seeds):
        if args.at_once:
            firsts = 0, sides[0].count * (sides[0].gpus or 1)
            with ThreadPoolExecutor(len(sides)) as threads:
                for done in [
                    threads.submit(turn, side, seed, first) for side, first in zip(sides, firsts, strict=True)
                ]:
                    done.result()
        else:
            for side in in_order(sides, seed):
                turn(side, seed, 0)
        yield results


def rows(results: Found) -> Iterator[Row]:
    """The figures of each side, then the ratios of the first side to the second."""
    for load, of_sides in results.items():
        for side, measured in of_sides.items():
            name = f"disagg.{load}.{side}"
            yield Row(f"{name}.answered", sum(map(len, measured.requests)), "requests")
            for metric in FIGURES.get(measured.kind, FIXED):
                if (value := figure(measured.requests, metric)) is not None:
                    yield Row(f"{name}.{metric}", value, "ms")
            for total, unit in TOTALS.items():
                if values := [totals[total] for totals in measured.totals if total in totals]:
                    yield Row(f"{name}.{total}", statistics.fmean(values), unit)
        (_, first), (other, second) = of_sides.items()
        for metric in FIGURES.get(first.kind, FIXED):
            if (compared := ratio(first.requests, second.requests, metric)) is not None:
                value, low, high = compared
                yield Row(f"disagg.{load}.{metric}", value, "ratio", ratio_to=other, low=low, high=high)
        speeds = [a[SPEED] / b[SPEED] for a, b in zip(first.totals, second.totals, strict=True) if b[SPEED]]
        if speeds:
            yield Row(f"disagg.{load}.{SPEED}", statistics.median(speeds), "ratio", ratio_to=other)


def chosen_loads(args: Any) -> list[Load]:
    """A name may have levels of its own, `agents@16@48`. Raises ValueError for a name that is no load."""
    named = {load.name: load for load in (*LOADS, *ENGINE_LOADS)}
    default = SHORT if args.short or args.device == "cpu" else [load.name for load in LOADS]
    chosen = [text.split("@") for text in args.loads or default]
    named |= {name: trace_load(Path(name), args.first) for name, *_ in chosen if name.endswith(".jsonl")}
    if unknown := {name for name, *_ in chosen} - named.keys():
        raise ValueError(
            f"--loads {','.join(sorted(unknown))}: there are {', '.join(named)}, and traces: FILE.jsonl"
        )
    loads = []
    for name, *levels in chosen:
        load = named[name].small() if args.device == "cpu" else named[name]
        rates_of_load = rates(",".join(levels)) if levels else args.rates
        loads.append(replace(load, levels=rates_of_load or load.levels[: 1 if args.short else None]))
    return loads


def rates(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def sides_of(args: Any) -> list[Side]:
    context = str(max(load.context for load in chosen_loads(args)))
    serve = SERVE + ON_DEVICE[args.device].replace("{context}", context)
    sides = two_sides(args, Side("1p1d", 1, serve), Side("colocated", 1, f"{serve} --prefill 0 --decode 2"))
    if args.at_once and any(side.count == 1 and side.gpus is None for side in sides):
        raise ValueError(
            "--at-once: say how many GPUs each process of a side has, as in --side 'baton 1x2 …'"
        )
    return sides


def measure(run: Run) -> None:
    args, reports = run.args, run.args.reports or run.directory
    reports.mkdir(parents=True, exist_ok=True)
    model = write_shape(args.model_shape, run.directory, tokenizer=True)
    for results in found(sides_of(args), chosen_loads(args), args, reports, model):
        run.rows = [*rows(results)]
        run.write()


def check(args: Any) -> None:
    if args.resume and args.reports is None:
        raise ValueError("--resume: name the reports of the earlier run with --reports DIR")
    sides_of(args)


NAMES = ", ".join(load.name for load in (*LOADS, *ENGINE_LOADS))
BENCH = Bench(
    "disagg",
    measure,
    __doc__,
    options=(
        SIDE,
        Option("--at-once", "both sides at the same time, each on its own GPUs", False),
        Option("--seeds", "turns of each side", 3, short=1),
        Option(
            "--loads",
            f"{NAMES}, FILE.jsonl; with levels of its own: LOAD@R@R",
            type=lambda text: text.split(","),
            metavar="LOAD,…",
        ),
        Option(
            "--rates",
            "requests/s, users, agents, or speeds of a trace (default: those of each load)",
            type=rates,
            metavar="R,…",
        ),
        Option("--first", "seconds of a trace", TRACE_S, type=float, metavar="S"),
        Option("--requests", "of each rate and seed", {"cpu": 20, "cuda": 300}, short={"cpu": 4, "cuda": 50}),
        Option("--seconds", "of each rate and seed, about, for fewer requests at low rates", 600.0),
        Option("--model-shape", "{model}", DENSE, choices=SHAPES, metavar="NAME"),
        Option(
            "--reports", "keep the reports of all runs, for `baton bench compare`", type=Path, metavar="DIR"
        ),
        Option(
            "--resume",
            "measure only what has no report in --reports yet, with the same options as before",
            False,
        ),
    ),
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
