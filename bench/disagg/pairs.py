"""Two deployments under the same load, in turns: TTFT and gaps of each, and their ratios with intervals.

    python -m baton.bench.disagg.pairs --side 'NAME COUNT COMMAND' --side 'NAME COUNT COMMAND' [--seeds N]
                                 [--loads L,L] [--rates R,R] [--requests N] [--json PATH]

Each turn starts one side, measures all loads with one seed, and ends the side. The side that begins changes
with each seed. Both sides get the same prompts at the same times, and no prompt comes twice.

COMMAND runs COUNT times, with its own {port} and, if COUNT is above 1, its own GPU. Requests take turns among
these processes. The requests of all seeds are pooled. Intervals (95 %) are bootstraps over requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from baton.bench import contract
from baton.bench.chaos.cluster import free_port
from baton.bench.contract import Report, Row
from baton.bench.disagg.loads import LOADS, Load, Pace, command, warm_up
from baton.bench.disagg.results import run

START_S, STOP_S, POLL_S = 900.0, 60.0, 0.5
DRAWS = 1000
FIGURES = {"ttft.p50": ("ttft", 50), "ttft.p99": ("ttft", 99), "gap.p99": ("gap", 99)}
Request = dict[str, np.ndarray]  # "ttft" and "gap", in ms


@contextlib.contextmanager
def started(side: str) -> Iterator[str]:
    """Starts the processes of `NAME COUNT COMMAND`. Yields their URLs when each has answered."""
    _, count, line = side.split(maxsplit=2)
    urls: list[str] = []
    running: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as processes:
        for number in range(int(count)):
            port = free_port()
            gpu = {"CUDA_VISIBLE_DEVICES": str(number)} if int(count) > 1 else {}
            words = shlex.split(line.replace("{port}", str(port)))
            process = subprocess.Popen(words, env=os.environ | gpu, stdout=sys.stderr)
            processes.callback(_end, process)
            running.append(process)
            urls.append(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + START_S
        while not all(map(_answers, urls)):
            if any(process.poll() is not None for process in running):
                raise RuntimeError(f"{side}: a process ended before it answered. Its output is above.")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{side}: no answer within {START_S:.0f} s")
            time.sleep(POLL_S)
        yield ",".join(urls)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    body = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=POLL_S * 20) as response:
            response.read()
            return True
    except OSError:
        return False


def requests_of(lines: Path) -> list[Request]:
    """The answered requests of a run, from the file of `baton bench --jsonl`."""
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    return [
        {"ttft": np.array([r["ttft_ms"]]), "gap": np.diff(r["arrivals"]) * 1e3}
        for r in records
        if "ttft_ms" in r
    ]


def figure(requests: Sequence[Request], name: str) -> float:
    kind, percentile = FIGURES[name]
    return float(np.percentile(np.concatenate([request[kind] for request in requests]), percentile))


def ratio(ours: Sequence[Request], theirs: Sequence[Request], name: str) -> tuple[float, float, float]:
    """Ours divided by theirs, and its 95 % interval."""
    rng = np.random.default_rng(0)

    def drawn(requests: Sequence[Request]) -> float:
        return figure([requests[i] for i in rng.integers(len(requests), size=len(requests))], name)

    low, high = np.percentile([drawn(ours) / drawn(theirs) for _ in range(DRAWS)], (2.5, 97.5))
    return figure(ours, name) / figure(theirs, name), float(low), float(high)


def measure(
    sides: Sequence[str], loads: Sequence[Load], paces: Sequence[Pace]
) -> dict[str, list[list[Request]]]:
    """The requests of each load and level, for the first and for the second side."""
    found: defaultdict[str, list[list[Request]]] = defaultdict(lambda: [[], []])
    with tempfile.TemporaryDirectory(prefix="baton-pairs-") as temporary:
        directory = Path(temporary)
        lines = directory / "requests.jsonl"
        for turn, pace in enumerate(paces):
            for index in (turn % 2, 1 - turn % 2):
                with started(sides[index]) as url:
                    for load in loads:
                        for arguments in warm_up(load, pace):
                            run(url, arguments, directory / "run.json")
                        for level in load.levels:
                            arguments = [*command(load, level, pace, directory), "--jsonl", str(lines)]
                            run(url, arguments, directory / "run.json")
                            found[f"{load.key}.{load.level_key(level)}"][index] += requests_of(lines)
    return found


def main() -> int:
    p = contract.parser(__doc__ or "")
    p.add_argument("--side", action="append", required=True, metavar="'NAME COUNT COMMAND'", help="twice")
    p.add_argument("--seeds", type=int, default=3, metavar="N", help="turns of each side")
    p.add_argument(
        "--loads", default="2000/150", metavar="LOAD,…", help=", ".join(load.name for load in LOADS)
    )
    p.add_argument("--rates", metavar="R,…", help="requests/s, or users (default: those of each load)")
    p.add_argument("--requests", type=int, default=300, metavar="N", help="of each rate and seed, at least")
    args = p.parse_args()
    if len(args.side) != 2:
        p.error("--side: give it twice")
    rates = [float(rate) for rate in args.rates.split(",")] if args.rates else None
    chosen = [load for load in LOADS if load.name in args.loads.split(",")]
    loads = [load.small() if args.device == "cpu" else load for load in chosen]
    loads = [load.at(rates or load.levels) for load in loads]
    first, second = (side.split()[0] for side in args.side)
    report = Report.of("disagg.pairs", args)
    paces = [Pace(args.requests, 0.0, None, seed) for seed in range(args.seeds)]
    for load, (ours, theirs) in measure(args.side, loads, paces).items():
        print(f"{load}: {len(ours)} requests of {first}, {len(theirs)} of {second}")
        for name in FIGURES:
            value, low, high = ratio(ours, theirs, name)
            told = f"{first} {figure(ours, name):.4g} ms, {second} {figure(theirs, name):.4g} ms"
            print(f"  {name}: {told}, ratio {value:.3f} [{low:.3f} to {high:.3f}]", flush=True)
            report.add(Row(f"{load}.{name}", value, "ratio", low=low, high=high))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
