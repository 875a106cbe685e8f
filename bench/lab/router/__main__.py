"""What a router adds to a request, what a token costs it, and how long it takes to choose workers.

Three processes run: fake workers behind their real gRPC service (`stand_in`), a router, started as
a user starts it, and this client. Prompts are token ids, so the router tokenizes nothing. Two kinds of
request alternate:

A  a streamed completion through the router: from the request to the first event
B  the same prompt, submitted to the fake prefill worker: from the message to the first token

`added` is A − B, pair by pair. It is measured on an idle router, and again while another process keeps
streams open through it, each with a token every 20 ms.

`tokens_per_core` is measured with more streams than the router can keep up with: tokens that clients
received, divided by the CPU seconds of the router with all its threads and processes. It is measured again
with two router processes.

`stall` is the longest stall of the event loop beside one large request (`ends.Watch`): the median of
five for each kind of request, and the largest of these medians.
"""

import asyncio
import contextlib
import gc
import random
import secrets
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop

from baton.bench.lab.driver import MIN_PAIRS, Bench, Option, Run
from baton.bench.lab.harness.cluster import START_S, LocalCluster
from baton.bench.lab.router import ends
from baton.bench.report import Row
from baton.kv_names import CHUNK_TOKENS, HINT_BITS
from baton.router.policy.decode import DecodeCaches, DecodeLoad, DecodePool
from baton.router.policy.prefill import PrefillRequest, sticky
from baton.router.policy.prefill_loads import PrefillLoads
from baton.rpc import worker_pb2 as pb
from baton.steps.quantiles import percentile

LOADED_STEP_S = 0.02
SATURATED_STEP_S = 0.005
LOCKSTEP_S = 0.001
"""Between the tokens of large requests, so that all choices have as many tokens at any time."""
WARM_UP = 50
PERIODS = 5


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
    pairs_ms = Pairs([], [])
    async with ends.through(url) as ask, ends.Direct(prefill, secret) as direct:
        for i in range(WARM_UP + pairs):
            prompt = ends.prompt_of(i)
            a, b = await ends.first_event(ask, prompt), await direct.first_token(prompt)
            if i >= WARM_UP:
                pairs_ms.routed.append(a)
                pairs_ms.direct.append(b)
    return pairs_ms


def saturated(cluster: LocalCluster, args: Namespace) -> tuple[list[float], list[float]]:
    """Tokens that clients received in each period, per second and per CPU second of the router."""
    per_second, per_core, pid = [], [], cluster.report("router")["pid"]
    with ends.OpenStreams(cluster.url, 4 * args.streams) as load:
        for _ in range(PERIODS):
            began, tokens, cpu = time.perf_counter(), load.tokens.value, ends.cpu_seconds(pid)
            time.sleep(args.seconds / PERIODS)
            received = load.tokens.value - tokens
            per_second.append(received / (time.perf_counter() - began))
            per_core.append(received / (ends.cpu_seconds(pid) - cpu))
    return per_second, per_core


def decisions(workers: int, count: int, *, busy: float) -> list[float]:
    """Microseconds of each choice of a prefill and a decode worker, among `workers` of each.

    Prompts have 2,000 tokens: 8 chunks of a system prompt that every worker has cached, 12 chunks of a
    session that usually one worker of each pool has cached, and 11 new chunks. `busy` is the share of decode
    workers without room.
    """
    rng = random.Random(1)
    loads = prefill_loads(workers, rng)
    system = [rng.getrandbits(HINT_BITS) for _ in range(8)]
    sessions = [[rng.getrandbits(HINT_BITS) for _ in range(12)] for _ in range(20 * workers)]
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
    pool = DecodePool(decodes)
    everywhere = (1 << 2 * workers) - 1
    microseconds: list[float] = []
    for i in range(count):
        key, session = rng.getrandbits(64), rng.choice(sessions)
        chunks = [*system, *session, *(rng.getrandbits(HINT_BITS) for _ in range(11))]
        began = time.perf_counter()
        request = PrefillRequest(key=key, tokens=2_000, chunks=chunks, arrival=i)
        snapshot = loads.snapshot(request, 0.05)
        assert snapshot is not None
        sticky(snapshot, request)
        decode = pool.choose(2_150, rng)
        if decode is not None:
            caches.nearest(rows[decode], request, rng)
        loads.index.overlap(chunks, 2_000, CHUNK_TOKENS, everywhere)  # the source of a prefix
        microseconds.append(1e6 * (time.perf_counter() - began))
        assert decode is not None
    return microseconds


def prefill_loads(workers: int, rng: random.Random) -> PrefillLoads:
    loads = PrefillLoads()
    for i in range(workers):
        row = loads.join(f"10.0.{i // 256}.{i % 256}:7000", block_size=128, now=0)
        waiting, speed = rng.randrange(8_000), rng.uniform(38_000, 42_000)
        loads.reported(row, pb.WorkerStatus(tokens_waiting=waiting, prefill_tokens_per_s=speed), 0)
    return loads


def measure(run: Run) -> None:
    args = run.args
    run.parameters |= {"prompt_tokens": ends.PROMPT_TOKENS, "output_tokens": ends.OUTPUT_TOKENS}
    for name, busy in (("", 0.2), (".full", 0.98)):
        microseconds = decisions(1_000, 2_000, busy=busy)
        run.add_median(f"router.decision.w1000{name}", microseconds, "µs", goal=None if name else 50)
    secret = secrets.token_hex(16)
    with (
        contextlib.closing(ends.FakeWorkers(secret.encode())) as workers,
        LocalCluster(
            run.directory, prefill=0, decode=0, secret=secret, router_flags=workers.flags
        ) as cluster,
    ):
        url = cluster.url
        uvloop.run(until_ready(url))

        def added() -> Pairs:
            with collector_off():
                return uvloop.run(measure_added(url, workers.prefill, secret.encode(), args.pairs))

        add_rows(run, "router.added", added())
        answer, workers.step.value = ends.fake_answer(url), LOCKSTEP_S
        stalls = ends.longest_stalls(url, ends.large_requests(answer), MIN_PAIRS)
        worst = max(map(statistics.median, stalls.values()))
        p99 = percentile([ms for series in stalls.values() for ms in series], 0.99)
        run.add(Row("router.stall.large_request", worst, "ms", p99=p99, goal=50))
        workers.step.value = LOADED_STEP_S
        with ends.OpenStreams(url, args.streams):
            add_rows(run, f"router.added.streams{args.streams}", added(), bound=False)
        workers.step.value = SATURATED_STEP_S
        seconds, cores = saturated(cluster, args)
        per_core, per_second = statistics.median(cores), statistics.median(seconds)
        spread = max(cores) - min(cores)
        name = "router.tokens_per_core"
        run.add(Row(name, per_core, "tokens/s", spread=spread, goal=32_000, better="higher"))
        run.add(Row("router.cpu_per_token", 1e6 / per_core, "µs"))
        run.add(Row("router.processes1.tokens_per_s", per_second, "tokens/s"))
        cluster.restart_router("--router-processes", "2")
        uvloop.run(until_ready(url))
        seconds, cores = saturated(cluster, args)
        several = statistics.median(seconds)
        growth = {"ratio": several / per_second, "ratio_to": "processes1"}
        run.add(Row("router.processes2.tokens_per_s", several, "tokens/s", **growth))
        run.add(Row("router.processes2.tokens_per_core", statistics.median(cores), "tokens/s"))


async def until_ready(url: str) -> None:
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(RuntimeError):
                async with ends.through(url) as ask:
                    async for _ in ask([1], 1):
                        pass
                    return
            await asyncio.sleep(0.1)


def add_rows(run: Run, name: str, series_of: Pairs, *, bound: bool = True) -> None:
    """`bound`: whether the median and the p99 have goals."""
    goals = (1, 3) if bound else (None, None)
    run.add_median(f"{name}.p50", series_of.added, "ms", goal=goals[0])
    run.add(Row(f"{name}.p99", percentile(series_of.added, 0.99), "ms", goal=goals[1]))
    for way, series in (("direct", series_of.direct), ("routed", series_of.routed)):
        run.add_median(f"{name}.{way}", series, "ms", scale=1e3)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """A pause of the client must not count as the router's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check(args: Namespace) -> None:
    if args.pairs < 100:
        raise ValueError("--pairs: at least 100, or there is no p99")


BENCH = Bench(
    "router",
    measure,
    __doc__,
    options=(
        Option("--pairs", "requests each way", 2_000, short=400),
        Option("--streams", "open at the same time", 32),
        Option("--seconds", "of saturation", 20.0, short=5.0),
    ),
    devices=("cpu",),
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
