"""Two deployments under the same load, in turns: TTFT and gaps of each, and their ratios with intervals.

Each turn starts one side, measures all loads with one seed, and ends the side. The side that begins changes
with each seed. Both sides get the same prompts at the same times, and no prompt comes twice.

COMMAND runs COUNT times, with its own {port} and, if COUNT is above 1, its own GPU. Requests take turns among
these processes. {model} is a directory with the shape and a tokenizer of --model-shape, for
`--load-format dummy`. The requests of all seeds are pooled. Intervals (95 %) are bootstraps over requests.

Without --side, Baton with a prefill and a decode worker is compared with Baton whose two workers do both. The
rates of the loads suit the 8B shape on two GPUs. On a CPU the embedded model gets smaller loads.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from baton.bench import contract
from baton.bench.contract import Report, Row
from baton.bench.disagg.loads import LOADS, SHORT, Load, command, warm_up
from baton.bench.harness.processes import Server
from baton.bench.shapes import DENSE, SHAPES, write_shape
from baton.machine.python_path import python_path
from baton.machine.system import free_port

START_S = 900.0
DRAWS = 1000
FIGURES = {"ttft.p50": ("ttft", 50), "ttft.p99": ("ttft", 99), "gap.p99": ("gap", 99)}
TOTALS = {"throughput.output_tokens": "tokens/s", "goodput.share": "share", "requests.failed": "requests"}
"""Rows of `baton bench` → their units. The report has their means over the seeds."""
REQUESTS = {"cuda": (300, 50), "cpu": (20, 4)}  # of each rate and seed; with --short
SERVE = f"{sys.executable} -m baton.cluster.cli serve --port {{port}} "
ON_DEVICE = {
    "cpu": "--device cpu --dtype float32 --num-threads 1",
    "cuda": "--model {model} --load-format dummy --max-model-len 33000",
}
Request = dict[str, np.ndarray]  # "ttft" and "gap", in ms


class Side(NamedTuple):
    """One deployment: its name, and the command line that runs `count` times."""

    name: str
    count: int
    command: str

    @classmethod
    def parse(cls, text: str) -> Self:
        name, count, command = text.split(maxsplit=2)
        return cls(name, int(count), command)


@dataclass
class Measured:
    """One side at one level of a load. `totals` has the rows `TOTALS` of each run."""

    requests: list[Request] = field(default_factory=list)
    totals: list[dict[str, float]] = field(default_factory=list)


Found = dict[str, dict[str, Measured]]
"""By load and level, then by side."""


@contextlib.contextmanager
def started(side: Side, model: Path) -> Iterator[str]:
    """Starts the processes of a side. Yields their URLs when each has answered."""
    servers: dict[str, Server] = {}
    body = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
    with contextlib.ExitStack() as until_the_end:
        for number in range(side.count):
            port = str(free_port())
            gpu = {"CUDA_VISIBLE_DEVICES": str(number)} if side.count > 1 else {}
            words = shlex.split(side.command)
            words = [word.replace("{port}", port).replace("{model}", str(model)) for word in words]
            server = servers[f"http://127.0.0.1:{port}"] = Server(str(side), words, None, gpu)
            until_the_end.callback(server.stop)
        deadline = time.monotonic() + START_S
        for url, server in servers.items():
            server.until_answers(f"{url}/v1/completions", deadline, body)
        yield ",".join(servers)


def run(url: str, arguments: Sequence[str], out: Path) -> dict[str, Any]:
    """Runs `baton bench ARGUMENTS` in a child process. Returns its report.

    Prints what a reader needs to judge the results. A run whose client was too slow counts: with few cores
    every client is too slow. Raises RuntimeError if there is no report.
    """
    out.unlink(missing_ok=True)
    line = [
        sys.executable, "-m", "baton.cluster.cli", "bench", *arguments,
        "--url", url, "--quiet", "--json", str(out),
    ]  # fmt: skip
    environment = os.environ | python_path()
    code = subprocess.run(line, stdout=subprocess.DEVNULL, check=False, env=environment).returncode
    if not out.exists():
        raise RuntimeError(f"{' '.join(line)}: exit code {code}")
    report = json.loads(out.read_text())
    detail = report["detail"]
    slow = [f"the client could not keep up: {reason}" for reason in detail["invalid_reasons"]]
    for said in (*slow, *detail["notes"]):
        print(f"bench.disagg: {' '.join(arguments)}: {said}", file=sys.stderr)
    return report


def requests_of(lines: Path) -> list[Request]:
    """The answered requests of a run, from the file of `baton bench --jsonl`."""
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    return [
        {"ttft": np.array([r["ttft_ms"]]), "gap": np.diff(r["arrivals"]) * 1e3}
        for r in records
        if "ttft_ms" in r
    ]


def figure(requests: Sequence[Request], name: str) -> float:
    """In ms. Tokens that are read together have no gap, and a ratio to none would be infinite."""
    kind, percentile = FIGURES[name]
    found = np.percentile(np.concatenate([request[kind] for request in requests]), percentile)
    return max(1e-3, float(found))


def ratio(ours: Sequence[Request], theirs: Sequence[Request], name: str) -> tuple[float, float, float]:
    """Ours divided by theirs, and its 95 % interval."""
    rng = np.random.default_rng(0)

    def drawn(requests: Sequence[Request]) -> float:
        return figure([requests[i] for i in rng.integers(len(requests), size=len(requests))], name)

    low, high = np.percentile([drawn(ours) / drawn(theirs) for _ in range(DRAWS)], (2.5, 97.5))
    return figure(ours, name) / figure(theirs, name), float(low), float(high)


def measure(
    sides: Sequence[Side], loads: Sequence[Load], args: Any, reports: Path, model: Path
) -> Iterator[Found]:
    """Yields what was found so far, after each seed."""
    found: Found = {}
    for seed in range(args.seeds):
        for side in sides if seed % 2 == 0 else sides[::-1]:
            with started(side, model) as url:
                for load in loads:
                    for arguments in () if args.short else warm_up(load, seed):
                        run(url, arguments, reports / "warm-up")
                    for level in load.levels:
                        name = load.name_at(level)
                        files = [reports / f"{name}.{side.name}.{seed}.{kind}" for kind in ("json", "jsonl")]
                        count = min(args.requests, round(level * args.seconds) or 1)
                        arguments = command(load, level, count, seed, reports)
                        report = run(url, [*arguments, "--jsonl", str(files[1])], files[0])
                        values = {row["name"]: row["value"] for row in report["results"]}
                        measured = found.setdefault(name, {}).setdefault(side.name, Measured())
                        measured.requests += requests_of(files[1])
                        measured.totals.append({total: values[total] for total in TOTALS})
        yield found


def rows(found: Found) -> Iterator[Row]:
    """The figures of each side, then the ratios of the first side to the second."""
    for load, of_sides in found.items():
        for side, measured in of_sides.items():
            name = f"disagg.{load}.{side}"
            yield Row(f"{name}.answered", len(measured.requests), "requests")
            for which in FIGURES if measured.requests else ():
                yield Row(f"{name}.{which}", figure(measured.requests, which), "ms")
            for total, unit in TOTALS.items():
                mean = float(np.mean([totals[total] for totals in measured.totals]))
                yield Row(f"{name}.{total}", mean, unit)
        (_, ours), (other, theirs) = of_sides.items()
        for which in FIGURES if ours.requests and theirs.requests else ():
            value, low, high = ratio(ours.requests, theirs.requests, which)
            yield Row(f"disagg.{load}.{which}", value, "ratio", ratio_to=other, low=low, high=high)


def chosen_loads(args: Any) -> list[Load]:
    """Raises ValueError for a name that is no load."""
    named = {load.name: load for load in LOADS}
    names = args.loads or (SHORT if args.short or args.device == "cpu" else named)
    if unknown := set(names) - named.keys():
        raise ValueError(f"--loads {','.join(sorted(unknown))}: there are {', '.join(named)}")
    loads = [named[name].small() if args.device == "cpu" else named[name] for name in names]
    return [replace(load, levels=args.rates or load.levels[: 1 if args.short else None]) for load in loads]


def rates(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def main() -> int:
    p = contract.parser(__doc__ or "")
    add = p.add_argument
    add("--side", type=Side.parse, action="append", metavar="'NAME COUNT COMMAND'", help="twice, or never")
    add("--seeds", type=int, metavar="N", help="turns of each side (default: 3; 1 with --short)")
    every = ", ".join(load.name for load in LOADS)
    add("--loads", type=lambda text: text.split(","), metavar="LOAD,…", help=every)
    add("--rates", type=rates, metavar="R,…", help="requests/s, or users (default: those of each load)")
    add("--requests", type=int, metavar="N", help="of each rate and seed (default: 300 on GPUs)")
    most = "of each rate and seed, about, for fewer requests at low rates (default: 600)"
    add("--seconds", type=float, default=600.0, metavar="S", help=most)
    add("--model-shape", choices=SHAPES, default=DENSE, metavar="NAME", help=f"{{model}} (default: {DENSE})")
    add("--reports", type=Path, metavar="DIR", help="keep the reports of all runs, for `baton bench compare`")
    args = p.parse_args()
    args.seeds = args.seeds or (1 if args.short else 3)
    args.requests = args.requests or REQUESTS[args.device][args.short]
    serve = SERVE + ON_DEVICE[args.device]
    sides = args.side or [Side("1p1d", 1, serve), Side("colocated", 1, f"{serve} --prefill 0 --decode 2")]
    if len({side.name for side in sides}) != 2 or len(sides) != 2:
        p.error("--side: give it twice, with two names")
    try:
        loads = chosen_loads(args)
    except ValueError as error:
        p.error(str(error))
    report = Report.of("disagg", args)
    with tempfile.TemporaryDirectory(prefix="baton-disagg-") as temporary:
        reports = args.reports or Path(temporary)
        reports.mkdir(parents=True, exist_ok=True)
        model = write_shape(args.model_shape, Path(temporary), tokenizer=True)
        for found in measure(sides, loads, args, reports, model):
            report.rows = [*rows(found)]
            report.write()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
