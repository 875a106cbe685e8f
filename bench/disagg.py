"""Disaggregated against colocated: the same engine, devices and load; time to first token and gaps by rate.

    python -m bench.disagg [--rate R …] [--duration S] [--json PATH] [--short]

Deployments of two workers each, all of them up, one under load at a time:

    1p1d        one prefill, one decode worker; every prompt is handed over
    overflow    the same workers; decode takes what prefill is late with, in chunks that its target for gaps
                bounds: one deployment for each --ttit-target
    colocated   two decode workers and no prefill worker: each computes its prompts itself, in chunks within
                the last of these targets

`baton bench run` sends an open loop (Poisson) of each rate, the same requests at the same times to all, and
at the end a closed one for the throughput. On two GPUs the 8B Llama shape with random weights takes 2000
tokens in and 150 out; on a CPU the embedded model takes less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench.contract as contract
from bench.contract import Report, Row
from bench.load.commands import INVALID as EXIT_INVALID
from bench.roles import Roles
from bench.shapes import write_shape

# What a deployment of two H200 shall reach, in ms: rate → (TTFT p50, TTFT p99, gap p99).
GOALS = {4.0: (60, 240, 8), 8.0: (60, 240, 8), 10.0: (60, 240, 8), 12.0: (75, 300, 8.5)}

SEED = 0
"""Of prompts and arrivals, the same for each deployment: so prefix caches are off. At 22/s there are 220 ± 15
requests in 10 s: near what one prefill worker can do, a draw for each deployment would decide more than what
is compared."""


@dataclass(frozen=True)
class Load:
    input_len: int
    output_len: int
    duration: float
    concurrency: int  # of the closed loop


def deployments(roles: Roles, args: argparse.Namespace, directory: Path) -> dict[str, str]:
    """Starts them all. Returns the URL of each one's router."""
    if args.device == "cuda":
        model = str(args.model or write_shape("llama-3.1-8b", directory, tokenizer=True))
        engine = ["--model", model, "--load-format", "dummy", "--dtype", "bfloat16", "--device", "cuda"]
        engine += ["--max-model-len", "8192", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192"]
        engine += ["--gpu-memory-utilization", "0.42" if args.gpus > 1 else "0.21", "--engine-timeout", "120"]
        engine += ["--kv-lanes", "8", "--kv-slot-bytes", str(2 << 20), "--kv-slots", "256"]
        router = ["--model", model]
    else:
        named = ["--model", str(args.model)] if args.model else []
        engine, router = [*named, "--dtype", "float32", "--num-threads", "1"], named
    engine += ["--no-enable-prefix-caching"]

    def start(role: str, index: int, device: int, *more: str) -> str:
        environment = {"CUDA_VISIBLE_DEVICES": str(device)} if args.device == "cuda" else None
        return roles.start(role, "--index", str(index), *engine, *more, environment=environment)["address"]

    def front(*addresses: str, flags: tuple[str, ...] = ()) -> str:
        workers = [flag for address in addresses for flag in ("--worker", address)]
        return roles.start("router", "--port", "0", *router, *workers, *flags)["url"]

    def start_decode(index: int, device: int, target: float | None) -> str:
        return start("decode", index, device, *(("--ttit-target", str(target)) if target else ()))

    other, targets = min(args.gpus, 2) - 1, args.ttit_target or [None]
    prefill = start("prefill", 0, 0)
    decodes = [start_decode(index, other, target) for index, target in enumerate(targets)]
    names = ["overflow" if target is None else f"overflow_{target:g}ms" for target in targets]
    return {
        "1p1d": front(prefill, decodes[0], flags=("--no-overflow",)),
        **{name: front(prefill, decode) for name, decode in zip(names, decodes, strict=True)},
        "colocated": front(decodes[-1], start_decode(len(targets), 0, targets[-1])),
    }


def run_load(url: str, load: Load, directory: Path, *how: str) -> dict[str, float]:
    """One run of `baton bench`, in a process of its own. Returns value by row name.

    A run whose client was too slow is told to the reader, not dropped: on few cores all of them are.
    """
    out = directory / "load.json"
    command = [
        sys.executable, "-m", "cluster.cli", "bench", "run", "--url", url, "--json", str(out), *how,
        "--input-len", str(load.input_len), "--output-len", str(load.output_len),
        "--duration", str(load.duration), "--seed", str(SEED),
        # Detected, it is a burst for one deployment, and for another the time before its queue.
        "--warmup", "0",
    ]  # fmt: skip
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code not in (0, EXIT_INVALID):
        raise RuntimeError(f"{' '.join(command)}: exit code {code}")
    if code == EXIT_INVALID:
        print(f"bench.disagg: {' '.join(how)} on {url}: the client could not keep up", file=sys.stderr)
    return {row["name"]: row["value"] for row in json.loads(out.read_text())["results"]}


def measure(args: argparse.Namespace, load: Load, report: Report) -> None:
    series: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, Roles() as roles:
        directory = Path(name)
        urls = deployments(roles, args, directory)
        for url in urls.values():
            run_load(url, Load(load.input_len, 8, 3.0, 1), directory, "--concurrency", "1")
        for rate in args.rate:
            for deployment, url in urls.items():
                found = run_load(url, load, directory, "--rate", str(rate))
                series[f"{deployment}.r{rate:g}"] = found
                rows(report, f"disagg.{deployment}.r{rate:g}", found, GOALS.get(rate), args.device)
                report.write()  # what is measured stays, whenever somebody stops it
        saturated = {
            deployment: run_load(url, load, directory, "--concurrency", str(load.concurrency))
            for deployment, url in urls.items()
        }
    series["saturated"] = saturated
    rate_of = {d: found["throughput.output_tokens"] for d, found in saturated.items()}
    for deployment, tokens in rate_of.items():
        report.add(
            Row(
                f"disagg.{deployment}.throughput", tokens, "tokens/s",
                ratio=tokens / rate_of["colocated"], ratio_to="colocated",
            )
        )  # fmt: skip
    report.detail = series


def rows(
    report: Report, name: str, found: dict[str, float], goals: tuple[float, float, float] | None, device: str
) -> None:
    bounds = goals if goals is not None and device == "cuda" and ".overflow" in name else (None,) * 3
    wanted = (("ttft.p50", bounds[0]), ("ttft.p99", bounds[1]), ("ttit.p50", None), ("ttit.p99", bounds[2]))
    for metric, goal in wanted:
        better = "lower" if goal is not None else None
        report.add(Row(f"{name}.{metric}", found[metric], "ms", goal=goal, better=better))
    if found["requests.failed"]:
        report.add(Row(f"{name}.failed", found["requests.failed"], "requests"))


def main() -> int:
    p = contract.parser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--rate", type=float, action="append", help="requests a second; may be repeated")
    p.add_argument("--duration", type=float, help="seconds of each run (default: 30 on a CPU, 20 on GPUs)")
    p.add_argument("--model", type=Path, help="default: the embedded model, or the 8B shape on GPUs")
    p.add_argument(
        "--ttit-target", type=float, action="append", metavar="MS", help="of decode workers; may be repeated"
    )
    gpus = len(contract.gpus())
    p.set_defaults(device="cuda" if gpus >= 2 else "cpu")
    args = p.parse_args()
    args.gpus = gpus
    if args.device == "cuda" and args.gpus == 1:
        print("bench.disagg: all workers share one GPU: a rehearsal, which measures nothing", file=sys.stderr)
    on_cpu = args.device == "cpu"
    args.rate = args.rate or ([0.5] if args.short else [0.5, 1.0] if on_cpu else [4.0, 8.0, 12.0, 16.0, 20.0])
    duration = args.duration or (5.0 if args.short else 30.0 if on_cpu else 20.0)
    load = Load(256, 32, duration, 4) if on_cpu else Load(2000, 150, duration, 128)
    parameters = {k: v for k, v in vars(args).items() if k not in ("json", "model")}
    report = Report("disagg", parameters | {"input": load.input_len, "output": load.output_len}, args.json)
    measure(args, load, report)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
