"""Routing policies of the router against simulated clusters, and against policies that are simpler.

Prefill: the traces of `bench.routing_sim.trace`, on 4, 64 and 1,000 workers behind 4 routers (1 before
1,000), at the speed of an H200 (or of a CPU), with caches that live sessions would fill to 90 %, and once
with workers that join and leave. The load is 0.8 of what the workers could do if nothing were ever cached, so
every policy keeps up. Think times shrink with the number of sessions between two turns that a worker has,
which keeps runs short.

Decode: 16 workers behind 4 routers that hear of each other's reservations once a second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import bench.contract as contract
from bench.contract import Report, Row
from bench.load.datasets import SAMPLE_TRACE
from bench.routing_sim import decode
from bench.routing_sim.baselines import POLICIES
from bench.routing_sim.cluster import Outcome, Setting, Simulation
from bench.routing_sim.sizing import size
from bench.routing_sim.trace import Trace, mooncake, multi_turn, shared_prefix
from bench.routing_sim.worker import SPEEDS
from router.policy import two_choices

MAIN = 64
"""Workers of the rows that have bounds."""
SCALES = {4: (4, 400, 60), MAIN: (4, 75, 20), 1_000: (1, 15, 8)}
"""Workers → routers, sessions of the trace per worker, sessions between two turns per worker."""
SHORT = {4: 0.4, MAIN: 0.3, 1_000: 0.12}
"""Share of the sessions of a short run."""
AT_SCALE = ("sticky", "least_loaded")
"""What a short run has patience for with 1,000 workers."""


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Trace, Setting, list[str]]]:
    """Name, trace, setting and policies of each comparison."""
    speed = SPEEDS[args.speed]

    def sized(trace: Trace, workers: int) -> Setting:
        routers, _, sessions = SCALES[workers]
        return size(
            trace,
            workers=workers,
            routers=routers,
            load=args.load,
            full=args.full,
            sessions=sessions,
            speed=speed,
        )

    for workers, (_, sessions, _) in SCALES.items():
        requests = round(6 * sessions * workers * (SHORT[workers] if args.short else 1))
        names = list(AT_SCALE if args.short and workers == max(SCALES) else POLICIES)
        trace = multi_turn(requests, args.seed)
        yield f"multi_turn.w{workers}", trace, sized(trace, workers), names
        if workers == MAIN:
            changes = [(0.5, -4), (0.7, 4)]
            yield (
                f"multi_turn.w{workers}.changes",
                trace,
                replace(sized(trace, workers), changes=changes),
                ["sticky"],
            )
        if workers != max(SCALES):
            trace = shared_prefix(requests // 4, args.seed)
            yield f"shared_prefix.w{workers}", trace, sized(trace, workers), names
    trace = mooncake(args.trace)
    yield "mooncake.w4", trace, sized(trace, 4), list(POLICIES)


def add_rows(report: Report, case: str, policy: str, outcome: Outcome) -> None:
    name = f"routing_sim.{case}.{policy}"
    ttft = [1e3 * seconds for seconds in outcome.ttft]
    report.add(Row(f"{name}.hits", outcome.hit_tokens / outcome.tokens, "of prompt tokens"))
    report.add(Row(f"{name}.ttft", statistics.median(ttft), "ms", p99=contract.percentile(ttft, 0.99)))
    report.add(Row(f"{name}.imbalance", max(outcome.busy) / statistics.mean(outcome.busy), "max busy / mean"))
    if outcome.turns:
        report.add(Row(f"{name}.moved", outcome.moved / outcome.turns, "of later turns"))
    report.add(Row(f"{name}.decisions", outcome.decisions / outcome.deciding, "/s"))


def bound(outcome: Outcome) -> float:
    return outcome.bound_tokens / outcome.tokens


def add_bounds(report: Report, sticky: Outcome, least_loaded: Outcome) -> None:
    """The rows that a release is held to."""
    report.add(Row("routing_sim.hits.bound", bound(sticky), "of prompt tokens"))
    hits = sticky.hit_tokens / sticky.tokens
    report.add(Row("routing_sim.hits.sticky", hits, "of prompt tokens", goal=0.45, better="higher"))
    ours, theirs = (1e3 * contract.percentile(o.ttft, 0.99) for o in (sticky, least_loaded))
    name = "routing_sim.ttft_p99.vs_least_loaded"
    report.add(Row(name, ours, "ms", ratio=ours / theirs, ratio_to="least loaded", goal=1.0, better="lower"))


def add_decode(report: Report, short: bool) -> None:
    for policy in (two_choices, decode.emptiest):
        requests = 4_000 if short else 40_000
        found = decode.simulate(policy, workers=16, routers=4, requests=requests, fill=0.8)
        name = f"routing_sim.decode.{policy.__name__}"
        report.add(Row(f"{name}.above_mean", max(found.spread), "of a pool"))
        report.add(Row(f"{name}.refused", found.refused, "reservations"))


def main() -> int:
    p = contract.parser(__doc__ or "", devices=("cpu",))
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--speed", choices=SPEEDS, default="h200", help="of a worker (default: %(default)s)")
    p.add_argument(
        "--load", type=float, default=0.8, help="of what uncached prompts take (default: %(default)s)"
    )
    p.add_argument(
        "--full", type=float, default=0.9, help="how full live sessions make caches (default: %(default)s)"
    )
    p.add_argument(
        "--trace", type=Path, default=SAMPLE_TRACE, help="in Mooncake's format (default: a sample)"
    )
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    report = Report("routing_sim", {k: str(v) for k, v in vars(args).items() if k != "json"}, args.json)
    for case, trace, setting, names in cases(args):
        outcomes = {name: Simulation(trace, POLICIES[name], setting).run() for name in names}
        report.add(Row(f"routing_sim.{case}.bound", bound(outcomes["sticky"]), "of prompt tokens"))
        for name, outcome in outcomes.items():
            add_rows(report, case, name, outcome)
        if case == f"multi_turn.w{MAIN}":
            add_bounds(report, outcomes["sticky"], outcomes["least_loaded"])
    add_decode(report, args.short)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
