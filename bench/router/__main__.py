"""What a router adds to a request, what a token costs it, and how long it takes to choose workers.

Three processes run: fake workers behind their real gRPC service (`bench.fakes.worker`), a router, started as
a user starts it, and this client. Prompts are token ids, so the router tokenizes nothing. Two kinds of
request alternate:

A  a streamed completion through the router: from the request to the first event
B  the same prompt, submitted to the fake prefill worker: from the message to the first token

`added` is A − B, pair by pair. It is measured on an idle router, and again while another process keeps
streams open through it, each with a token every 20 ms.

`tokens_per_core` is measured with more streams than the router can keep up with: tokens that clients
received, divided by the CPU seconds of the router with all its threads and processes. It is measured again
with two router processes.

`stall` is the longest stall of the event loop beside one large request (`bench.router.stall`): the median of
five for each kind of request, and the largest of these medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop

import baton.bench.contract as contract
from baton.bench.contract import MIN_PAIRS, Report, Row
from baton.bench.roles import Roles
from baton.bench.router.ends import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Direct,
    FakeWorkers,
    OpenStreams,
    cpu_seconds,
    first_event,
    prompt_of,
    through,
)
from baton.bench.router.stall import large_requests, longest_stalls
from baton.cluster.model import EMBEDDED_NAME
from baton.content import CHUNK_TOKENS
from baton.router.policy import DecodeCaches, DecodeLoad, PrefillLoads, PrefillRequest, sticky, two_choices

LOADED_STEP_S = 0.02
SATURATED_STEP_S = 0.005
WARM_UP = 50
PERIODS = 5


# ---------------------------------------------------------------- measuring


@dataclass
class Pairs:
    """Seconds to the first token."""

    routed: list[float]
    direct: list[float]

    @property
    def added(self) -> list[float]:
        """Milliseconds."""
        return [1e3 * (a - b) for a, b in zip(self.routed, self.direct, strict=True)]


async def measure_added(url: str, prefill: str, secret: bytes, pairs: int) -> Pairs:
    found = Pairs([], [])
    async with through(url) as ask, Direct(prefill, secret) as direct:
        for i in range(WARM_UP + pairs):
            prompt = prompt_of(i)
            a, b = await first_event(ask, prompt), await direct.first_token(prompt)
            if i >= WARM_UP:
                found.routed.append(a)
                found.direct.append(b)
    return found


@dataclass
class Saturated:
    """Tokens that clients received in each period, per second and per CPU second of the router."""

    per_second: list[float]
    per_core: list[float]


def saturated(router: dict, args: argparse.Namespace) -> Saturated:
    found = Saturated([], [])
    with OpenStreams(router["url"], 4 * args.streams) as load:
        for _ in range(PERIODS):
            began, tokens, cpu = time.perf_counter(), load.tokens.value, cpu_seconds(router["pid"])
            time.sleep(args.seconds / PERIODS)
            received = load.tokens.value - tokens
            found.per_second.append(received / (time.perf_counter() - began))
            found.per_core.append(received / (cpu_seconds(router["pid"]) - cpu))
    return found


def decisions(workers: int, count: int, *, busy: float) -> list[float]:
    """Microseconds of each choice of a prefill and a decode worker, among `workers` of each.

    Prompts have 2,000 tokens: 8 chunks of a system prompt that every worker has cached, 12 chunks of a
    session that usually one worker of each pool has cached, and 11 new chunks. `busy` is the share of decode
    workers without room.
    """
    rng = random.Random(1)
    loads = prefill_loads(workers, rng)
    system = [rng.getrandbits(64) for _ in range(8)]
    sessions = [[rng.getrandbits(64) for _ in range(12)] for _ in range(20 * workers)]
    loads.index.grow(2 * workers)
    for row in range(2 * workers):
        loads.index.add(row, system)
    for session in sessions:
        loads.index.add(rng.randrange(workers), session)
        loads.index.add(workers + rng.randrange(workers), session)
    decodes = [
        DecodeLoad(
            f"10.1.{i // 256}.{i % 256}:7000", block_size=128, blocks_total=4_000, max_running=256,
            blocks_free=0 if rng.random() < busy else rng.randrange(400, 4_000), running=rng.randrange(200),
        )
        for i in range(workers)
    ]  # fmt: skip
    caches = DecodeCaches(loads.index)
    for row, load in enumerate(decodes, workers):
        caches.join(row, load)
        caches.serve(row, True)
    rows = {load.worker: row for row, load in enumerate(decodes, workers)}
    everywhere = (1 << 2 * workers) - 1
    took: list[float] = []
    for i in range(count):
        key, session = rng.getrandbits(64), rng.choice(sessions)
        chunks = [*system, *session, *(rng.getrandbits(64) for _ in range(11))]
        began = time.perf_counter()
        request = PrefillRequest(key=key, tokens=2_000, chunks=chunks, arrival=i)
        snapshot = loads.snapshot(request, 0.05)
        assert snapshot is not None
        sticky(snapshot, request)
        decode = two_choices(decodes, tokens=2_150, rng=rng)
        if decode is not None:
            caches.nearest(rows[decode], request, rng)
        loads.index.overlap(chunks, 2_000, CHUNK_TOKENS, everywhere)  # the source of a prefix
        took.append(1e6 * (time.perf_counter() - began))
        assert decode is not None
    return took


def prefill_loads(workers: int, rng: random.Random) -> PrefillLoads:
    loads = PrefillLoads()
    for i in range(workers):
        row = loads.join(f"10.0.{i // 256}.{i % 256}:7000", block_size=128, now=0)
        waiting = rng.randrange(8_000)
        loads.reported(row, tokens_waiting=waiting, tokens_per_s=rng.uniform(38_000, 42_000), now=0)
    return loads


def measure(args: argparse.Namespace, report: Report) -> None:
    for name, busy in (("", 0.2), (".full", 0.98)):
        took = decisions(1_000, 2_000, busy=busy)
        goal: dict = {} if name else {"goal": 50, "better": "lower"}
        p99 = contract.percentile(took, 0.99)
        report.add(Row(f"router.decision.w1000{name}", statistics.median(took), "µs", p99=p99, **goal))
    with Roles() as roles, contextlib.closing(FakeWorkers(roles.secret)) as workers:
        router = start_router(roles, workers)
        url = router["url"]

        def added() -> Pairs:
            with collector_off():
                return uvloop.run(measure_added(url, workers.prefill, roles.secret, args.pairs))

        add_rows(report, "router.added", added())
        stalls = longest_stalls(url, large_requests(), MIN_PAIRS)
        worst = max(map(statistics.median, stalls.values()))
        p99 = contract.percentile([ms for series in stalls.values() for ms in series], 0.99)
        report.add(Row("router.stall.large_request", worst, "ms", p99=p99, goal=50, better="lower"))
        workers.step.value = LOADED_STEP_S
        with OpenStreams(url, args.streams):
            add_rows(report, f"router.added.streams{args.streams}", added(), bound=False)
        workers.step.value = SATURATED_STEP_S
        found = saturated(router, args)
        per_core, per_second = statistics.median(found.per_core), statistics.median(found.per_second)
        spread = max(found.per_core) - min(found.per_core)
        report.add(Row("router.tokens_per_core", per_core, "tokens/s", spread=spread))
        report.add(Row("router.cpu_per_token", 1e6 / per_core, "µs"))
        report.add(Row("router.processes1.tokens_per_s", per_second, "tokens/s"))
        found = saturated(start_router(roles, workers, "--router-processes", "2"), args)
        several = statistics.median(found.per_second)
        growth = {"ratio": several / per_second, "ratio_to": "processes1"}
        report.add(Row("router.processes2.tokens_per_s", several, "tokens/s", **growth))
        report.add(Row("router.processes2.tokens_per_core", statistics.median(found.per_core), "tokens/s"))


def start_router(roles: Roles, workers: FakeWorkers, *more: str) -> dict:
    flags = [*more, "--model", EMBEDDED_NAME, "--port", "0"]
    flags += ["--worker", workers.prefill, "--worker", workers.decode]
    router = roles.start("router", *flags)
    uvloop.run(until_ready(router["url"]))
    return router


async def until_ready(url: str) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(RuntimeError):
                async with through(url) as ask:
                    async for _ in ask([1], 1):
                        pass
                    return
            await asyncio.sleep(0.1)


def add_rows(report: Report, name: str, found: Pairs, *, bound: bool = True) -> None:
    """`bound`: whether the median and the p99 have goals."""
    p99 = contract.percentile(found.added, 0.99)
    goals: list[dict] = [{"goal": g, "better": "lower"} if bound else {} for g in (1, 3)]
    report.add(Row(f"{name}.p50", statistics.median(found.added), "ms", p99=p99, **goals[0]))
    report.add(Row(f"{name}.p99", p99, "ms", **goals[1]))
    for way, series in (("direct", found.direct), ("routed", found.routed)):
        took = [1e3 * seconds for seconds in series]
        p99 = contract.percentile(took, 0.99)
        report.add(Row(f"{name}.{way}", statistics.median(took), "ms", p99=p99))


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """A pause of the client must not count as the router's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main() -> int:
    p = contract.parser(__doc__ or "", devices=("cpu",))
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--pairs", type=int, default=2_000, help="requests each way (default: %(default)s)")
    p.add_argument("--streams", type=int, default=32, help="open at the same time (default: %(default)s)")
    p.add_argument("--seconds", type=float, default=20.0, help="of saturation (default: %(default)s)")
    args = p.parse_args()
    if args.short:
        args.pairs, args.seconds = 400, 5.0
    if args.pairs < 100:
        p.error("--pairs: at least 100, or there is no p99")
    parameters = {k: v for k, v in vars(args).items() if k != "json"}
    fixed = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    report = Report("router", parameters | fixed, args.json)
    measure(args, report)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
