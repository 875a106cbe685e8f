"""Disaggregated against colocated, with the same engine, devices and load: TTFT and gaps by rate.

    python -m bench.disagg [--rate R …] [--duration S] [--json PATH] [--short]

Each deployment has two workers. All deployments run, and one at a time is under load:

    1p1d        one prefill and one decode worker; every prompt is handed over
    overflow    the same workers; the decode worker computes prompts for which the prefill worker is late, in
                chunks that the target for gaps bounds. One deployment for each --ttit-target
    colocated   two decode workers; each computes its prompts in chunks within the last of these targets

`baton bench run` sends an open loop (Poisson) with each rate, the same requests at the same times to all
deployments. At the end a closed loop measures the throughput. On two GPUs the 8B Llama shape with random
weights gets prompts of 2,000 tokens and writes 150; on a CPU the embedded model gets less.
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

# Goals on two H200, in ms: rate -> (TTFT p50, TTFT p99, gap p99).
GOALS = {4.0: (60, 240, 8), 8.0: (60, 240, 8), 10.0: (60, 240, 8), 12.0: (75, 300, 8.5)}

SEED = 0
"""All deployments get the same prompts and arrivals, so prefix caches are off. With random arrivals the
number of
requests would vary: 220 ± 15 in 10 s at 22/s. Near the limit of a prefill worker that would decide the
result."""


@dataclass(frozen=True)
class Load:
    input_len: int
    output_len: int
    duration: float
    concurrency: int  # of the closed loop


def deployments(roles: Roles, args: argparse.Namespace, directory: Path) -> dict[str, str]:
    """Starts all deployments. Returns the URL of the router of each."""
    if args.device == "cuda":
        model = str(write_shape("llama-3.1-8b", directory, tokenizer=True))
        engine = ["--model", model, "--load-format", "dummy", "--dtype", "bfloat16", "--device", "cuda"]
        engine += ["--max-model-len", "8192", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192"]
        engine += ["--gpu-memory-utilization", "0.42" if args.gpus > 1 else "0.21", "--engine-timeout", "120"]
        engine += ["--kv-lanes", "8", "--kv-slot-bytes", str(2 << 20), "--kv-slots", "256"]
        router = ["--model", model]
    else:
        engine, router = ["--dtype", "float32", "--num-threads", "1"], []
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
    """Runs `baton bench` in a child process. Returns value by row name.

    Reports a run whose client was too slow, but keeps it: with few cores every client is too slow.
    """
    out = directory / "load.json"
    command = [
        sys.executable, "-m", "cluster.cli", "bench", "run", "--url", url, "--json", str(out), *how,
        "--input-len", str(load.input_len), "--output-len", str(load.output_len),
        "--duration", str(load.duration), "--seed", str(SEED),
        # A detected warm-up would exclude different requests for each deployment.
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
                report.write()  # keeps the results if the bench is stopped
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
    p.add_argument(
        "--ttit-target", type=float, action="append", metavar="MS", help="of decode workers; may be repeated"
    )
    gpus = len(contract.gpus())
    p.set_defaults(device="cuda" if gpus >= 2 else "cpu")
    args = p.parse_args()
    args.gpus = gpus
    if args.device == "cuda" and args.gpus == 1:
        print("bench.disagg: all workers share one GPU, so the figures mean nothing", file=sys.stderr)
    on_cpu = args.device == "cpu"
    args.rate = args.rate or ([0.5] if args.short else [0.5, 1.0] if on_cpu else [4.0, 8.0, 12.0, 16.0, 20.0])
    duration = args.duration or (5.0 if args.short else 30.0 if on_cpu else 20.0)
    load = Load(256, 32, duration, 4) if on_cpu else Load(2000, 150, duration, 128)
    parameters = {k: v for k, v in vars(args).items() if k != "json"}
    report = Report("disagg", parameters | {"input": load.input_len, "output": load.output_len}, args.json)
    measure(args, load, report)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
