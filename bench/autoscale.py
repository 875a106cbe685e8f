"""Does the autoscaler follow a load, and do clients notice? `python -m bench.autoscale [--svg PATH]`

`baton serve --prefill 1:3 --decode 1:2` with the embedded model under an open-loop load (Poisson arrivals): a
quiet phase, a busy one, and a quiet one that is long enough to shrink again. Loads are shares of what one
prefill worker can do here, measured first. The TTFT target is ambitious, so that a load that leaves two cores
some air is too much for one worker, and decode has blocks for three requests. Without overflow, so that each
pool has a load of its own. Reported: requests that failed, how large the pools became, and TTFT by phase;
with `--svg`, load, replicas and TTFT over time as a picture.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.chaos.streams import Case, Stream, new_session, read
from bench.contract import Report, Row, parser, percentile
from bench.serving import Serving
from bench.timeline import Panel, Series, timeline

_TEXT = (
    "Explain to a child, in simple words, why water boils and what a pot of it has to do with the weather. "
)
_FLAGS = (
    "--dtype", "float32", "--num-threads", "1", "--num-blocks", "32", "--block-size", "16",
    "--prefill", "1:3", "--decode", "1:2", "--drain-timeout", "30", "--no-overflow",
)  # fmt: skip
PHASES = {"before": 20.0, "busy": 80.0, "after": 70.0}  # seconds


@dataclass(frozen=True)
class Phase:
    name: str
    seconds: float
    rate: float  # requests/s


@dataclass
class Seen:
    """What was seen from outside. Times are seconds since the load began."""

    streams: list[Stream] = field(default_factory=list)
    sizes: list[tuple[float, dict[str, Any]]] = field(default_factory=list)


def case(output: int, rng: random.Random) -> Case:
    """A request of some 120 tokens that no other one shares its beginning with."""
    return Case(f"({rng.random()}) {_TEXT * 5}", output, 0.0, 1)


async def alone(serving: Serving, output: int) -> float:
    """Seconds to the first token of a request that has the cluster to itself; the median of five."""
    rng, found = random.Random(0), []
    async with new_session() as http:
        for _ in range(6):
            stream = await read(http, serving.url, case(output, rng))
            found.append(stream.arrivals[0] - stream.started)
    return statistics.median(found[1:])


async def drive(serving: Serving, phases: Sequence[Phase], output: int, rng: random.Random) -> Seen:
    """Offers the load, phase by phase, and reads every answer to its end."""
    seen, begin = Seen(), time.monotonic()
    over = asyncio.Event()

    async def sample() -> None:
        while not over.is_set():
            status = await asyncio.to_thread(serving.status)
            seen.sizes.append((time.monotonic() - begin, status["cluster"]["pools"]))
            await asyncio.sleep(1)

    sampling = asyncio.create_task(sample())
    async with new_session() as http, asyncio.TaskGroup() as requests:
        due = begin
        for phase in phases:
            end = due + phase.seconds
            while (due := due + rng.expovariate(phase.rate)) < end:
                await asyncio.sleep(due - time.monotonic())
                stream = Stream(case(output, rng))
                seen.streams.append(stream)
                requests.create_task(read(http, serving.url, stream.case, into=stream))
            due = end
            await asyncio.sleep(end - time.monotonic())
    over.set()
    await sampling
    for stream in seen.streams:
        stream.started -= begin
        stream.ended -= begin
        stream.arrivals = [at - begin for at in stream.arrivals]
    return seen


def rows(seen: Seen, phases: Sequence[Phase]) -> list[Row]:
    failed = [stream for stream in seen.streams if stream.failed]
    found = [
        Row("autoscale.requests", len(seen.streams), "requests"),
        Row("autoscale.failed", len(failed), "requests", goal=0, better="lower"),
    ]
    for role in ("prefill", "decode"):
        ready = [pools[role]["ready"] for _, pools in seen.sizes if role in pools]
        sizes = [pools[role]["size"] for _, pools in seen.sizes if role in pools]
        steps = sum(a != b for a, b in pairwise(sizes))
        goal = {"prefill": 3, "decode": 2}[role]
        found += [
            Row(f"autoscale.{role}.most", max(ready), "workers", goal=goal, better="higher"),
            Row(f"autoscale.{role}.last", ready[-1], "workers", goal=1, better="lower"),
            Row(f"autoscale.{role}.steps", steps, "steps"),
        ]
    begin = 0.0
    for phase in phases:
        within = [s for s in seen.streams if begin <= s.started < begin + phase.seconds and s.arrivals]
        ttft = [1000 * (s.arrivals[0] - s.started) for s in within]
        if ttft:
            found.append(
                Row(f"autoscale.ttft.{phase.name}", percentile(ttft, 0.5), "ms", p99=percentile(ttft, 0.99))
            )
        begin += phase.seconds
    return found


def picture(seen: Seen, phases: Sequence[Phase]) -> str:
    load, at = [], 0.0
    for phase in phases:
        load += [(at, phase.rate), (at := at + phase.seconds, phase.rate)]
    waiting = {
        role: [(at, float(pools[role]["ready"])) for at, pools in seen.sizes if role in pools]
        for role in ("prefill", "decode")
    }
    ttft = [(s.started, s.arrivals[0] - s.started) for s in seen.streams if s.arrivals]
    return timeline(
        "baton serve --prefill 1:3 --decode 1:2",
        [
            Panel("requests/s offered", [Series("load", load)]),
            Panel("workers ready", [Series(role, points, steps=True) for role, points in waiting.items()]),
            Panel("TTFT of each request, s", [Series("TTFT", ttft, dots=True)]),
        ],
    )


def main(argv: Sequence[str] | None = None) -> Report:
    p = parser(__doc__ or "", devices=("cpu",))
    p.add_argument("--svg", type=Path, metavar="PATH", help="write the picture here")
    p.add_argument(
        "--low", type=float, default=0.04, metavar="S", help="load of the quiet phases, as a share"
    )
    p.add_argument(
        "--high", type=float, default=0.6, metavar="S", help="… and of the busy phase, of one worker"
    )
    p.add_argument("--output-len", type=int, default=16, metavar="N", help="tokens of an answer")
    p.add_argument("--ttft-target", type=float, default=300, metavar="MS")
    p.add_argument("--shrink-after", type=float, default=15, metavar="S")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args(argv)
    scale = 0.5 if args.short else 1.0
    shown = {
        name: getattr(args, name)
        for name in ("low", "high", "output_len", "ttft_target", "shrink_after", "seed")
    }
    report = Report("autoscale", shown | {"short": args.short}, args.json)
    targets = (
        "--ttft-target",
        str(args.ttft_target),
        "--ttit-target",
        "1000",
        "--shrink-after",
        str(args.shrink_after),
    )
    with tempfile.TemporaryDirectory() as directory, Serving(Path(directory), *_FLAGS, *targets) as serving:
        prefills = 1 / asyncio.run(alone(serving, args.output_len))
        phases = [
            Phase(name, seconds * scale, share * prefills)
            for (name, seconds), share in zip(PHASES.items(), (args.low, args.high, args.low), strict=True)
        ]
        seen = asyncio.run(drive(serving, phases, args.output_len, random.Random(args.seed)))
    for row in rows(seen, phases):
        report.add(row)
    report.detail = {
        "phases": [[phase.name, phase.seconds, phase.rate] for phase in phases],
        "pools": [[round(at, 2), pools] for at, pools in seen.sizes],
        "requests": [
            [
                round(s.started, 3),
                round(s.arrivals[0] - s.started, 3) if s.arrivals else None,
                s.error or None,
            ]
            for s in seen.streams
        ],
    }
    if args.svg is not None:
        args.svg.write_text(picture(seen, phases))
    report.finish()
    return report


if __name__ == "__main__":
    main()
