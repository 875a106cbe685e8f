"""Kills, stops, cuts off and flips the workers of a real cluster under load: `python -m baton.bench.chaos`.

The cluster has two workers of each role and a router, in float32 on a CPU, or in bfloat16 with
`--batch-invariant`. Clients send one request after
another, greedy or seeded. Every answer must equal the answer that the same cluster gave without faults.
Processes of every kind are killed (SIGKILL), engines are stopped (SIGSTOP), lanes are cut, workers are moved
to the other pool and back. A client asks again if its router is killed. At the end every pool must be whole.
"""

import argparse
import asyncio
import random
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from baton.bench.chaos.faults import plan, torment
from baton.bench.contract import Report, Row, parser
from baton.bench.harness.cluster import LocalCluster, leaks_when_idle
from baton.bench.harness.streams import Happened, Load, Stream, cases, expected, judge, pauses

WORKERS = ("prefill", "decode")
ROLES = (*WORKERS, "router")
WORKER_FLAGS = (
    "--device", "cpu", "--num-threads", "1", "--num-blocks", "600",
    "--max-num-batched-tokens", "64", "--engine-timeout", "2", "--peer-timeout", "3",
)  # fmt: skip
COUNTS = {
    "kills": (12, 3, "kills of each role"),
    "stalls": (2, 0, "stopped engines of each role"),
    "routers": (3, 0, "kills of the router"),
    "breaks": (6, 2, "times that lanes are cut"),
    "flips": (6, 2, "flips of workers of each role"),
}
"""How often each fault happens: usually, and with --short."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = parser("Kill, stall and cut off the processes of a real cluster under load.", devices=("cpu",))
    for name, (usual, short, what) in COUNTS.items():
        told = f"{what} (default: {usual}; {short} with --short)"
        p.add_argument(f"--{name}", type=int, metavar="N", help=told)
    p.add_argument("--clients", type=int, default=8, metavar="N", help="streams at a time (default: 8)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of cases, moments and victims")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the workers (default: float32)")
    p.add_argument("--batch-invariant", action="store_true", help="give the workers this flag, in bfloat16")
    p.add_argument("--speculative-config", metavar="JSON", help="give the workers this flag")
    p.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of all processes there")
    args = p.parse_args(argv)
    for name, (usual, short, _) in COUNTS.items():
        if getattr(args, name) is None:
            setattr(args, name, short if args.short else usual)
    return args


async def measure(args: argparse.Namespace, cluster: LocalCluster) -> Report:
    rng = random.Random(args.seed)
    asked = cases(6 if args.short else 16, 24, repeat=4)
    right = await expected(cluster.url, asked, at_once=args.clients)
    load = Load(cluster.url, asked, rng)
    quiet = (0.2, 1.5) if args.short else (0.2, 4.0)
    plans = {role: plan(role, args.kills, args.stalls, args.breaks, args.flips, rng) for role in WORKERS}
    plans["router"] = plan("router", args.routers, 0, 0, 0, rng)
    # So that all tracks end at about the same time.
    longer = quiet[0], quiet[1] * args.kills / max(1, args.routers)
    tracks = (
        torment(cluster, role, faults, longer if role == "router" else quiet, rng)
        for role, faults in plans.items()
    )
    async with load.of(args.clients):
        happened = [one for track in await asyncio.gather(*tracks) for one in track]
    leaks = await asyncio.to_thread(leaks_when_idle, cluster.url)
    verdict = judge(load.streams, right, [one for one in happened if one.role == "router"])
    report = Report.of("chaos", args)
    verdict.add_to(report, "chaos", leaks)
    report.add(Row("chaos.reconnected", verdict.reconnected, "connections"))
    report.add(Row("chaos.tokens", verdict.tokens, "tokens"))
    _add_faults(report, happened, load.streams)
    return report


def _add_faults(report: Report, happened: list[Happened], streams: list[Stream]) -> None:
    """Rows with the number of faults, the time that a worker was away, and the pauses that clients saw."""
    counts = Counter(f"{one.role}.{one.fault}" for one in happened)
    for name, count in sorted(counts.items()):
        report.add(Row(f"chaos.{name}", count, "times"))
    for role in ROLES:
        _add_seconds(
            report, f"away.{role}", [x.back - x.at for x in happened if x.role == role and x.back > x.at]
        )
    seen: defaultdict[str, list[float]] = defaultdict(list)
    for one in happened:
        seen[f"{one.role}.{one.fault}"] += pauses(streams, one)
    _add_seconds(report, "pause", everywhere := [gap for gaps in seen.values() for gap in gaps])
    report.add(Row("chaos.pause.max", max(everywhere, default=0.0), "s"))
    for name, gaps in sorted(seen.items()):
        _add_seconds(report, f"pause.{name}", gaps)
    report.detail = {"pauses": {name: sorted(round(gap, 3) for gap in gaps) for name, gaps in seen.items()}}


def _add_seconds(report: Report, name: str, seconds: list[float]) -> None:
    if seconds:
        report.add_median(f"chaos.{name}", seconds, "s")


def _worker_flags(args: argparse.Namespace) -> tuple[str, ...]:
    exact = ("--batch-invariant",) if args.batch_invariant else ()
    dtype = args.dtype or ("bfloat16" if exact else "float32")
    drafts = ("--speculative-config", args.speculative_config) if args.speculative_config else ()
    return (*WORKER_FLAGS, "--dtype", dtype, "--quantization", "none", *exact, *drafts)


def main(argv: list[str] | None = None) -> Report:
    args = arguments(argv)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="baton-chaos-") as temporary,
        LocalCluster(args.logs or Path(temporary), worker_flags=_worker_flags(args)) as cluster,
    ):
        report = asyncio.run(measure(args, cluster))
    report.finish()
    return report


if __name__ == "__main__":
    main()
