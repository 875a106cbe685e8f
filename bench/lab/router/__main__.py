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

`stall` is the longest stall of the event loop beside one large request (`ends.longest_stalls`): the median of
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
from baton.bench.lab.router.stand_in import Lanes, StandIn
from baton.bench.report import Row
from baton.kv_names import HINT_BITS
from baton.router.policy.desk import Desk
from baton.router.policy.fleet import Seen
from baton.router.policy.plan import Plan
from baton.router.policy.planner import NOTHING
from baton.router.policy.prefill import PrefillRequest
from baton.rpc import worker_pb2 as pb
from baton.simulator.step_worker import measured
from baton.simulator.steps import H200_8B
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
    with ends.open_streams(cluster.url, 4 * args.streams) as tokens:
        for _ in range(PERIODS):
            began, before, cpu = time.perf_counter(), tokens.value, ends.cpu_seconds(pid)
            time.sleep(args.seconds / PERIODS)
            received = tokens.value - before
            per_second.append(received / (time.perf_counter() - began))
            per_core.append(received / (ends.cpu_seconds(pid) - cpu))
    return per_second, per_core


def decisions(workers: int, count: int, *, busy: float) -> tuple[list[float], list[float]]:
    """Microseconds of CPU time of each plan among `workers` of each pool, and of what a router tells its desk
    about that request, and about the report of one worker.

    Prompts have 2,000 tokens: 8 chunks of a system prompt that every worker has cached, 12 chunks of a
    session that usually one worker of each pool has cached, and 11 new chunks. `busy` is the share of decode
    workers without room.
    """
    rng, now, model = random.Random(1), 0.0, measured(H200_8B)
    desk = Desk(lambda: now, seed=1)
    system = [rng.getrandbits(HINT_BITS) for _ in range(8)]
    sessions = [[rng.getrandbits(HINT_BITS) for _ in range(12)] for _ in range(20 * workers)]
    seen = list[Seen]()

    def report(worker: Seen) -> None:
        decodes = rng.randrange(60) if worker.pool == pb.POOL_DECODE else 0
        worker.status = pb.WorkerStatus(
            pool=worker.pool,
            tokens_waiting=rng.randrange(8_000), prefill_tokens_per_s=rng.uniform(38e3, 42e3),
            requests_running=decodes, requests_decoding=decodes, decode_context=1_000 * decodes,
            blocks_free=0 if decodes and rng.random() < busy else rng.randrange(400, 4_000),
            gap_target_seconds=0.015, gap_cost=0.1 * decodes, prefill_position=1_000, blocks_spare=1_000,
        )  # fmt: skip
        worker.step_model = model.corrected(rng.uniform(0.95, 1.05), rng.uniform(0.95, 1.05))

    for i in range(2 * workers):
        described = pb.WorkerDescription(
            block_size=128, num_blocks=4_000, max_num_seqs=256, max_num_batched_tokens=8_192,
            exchanges_prefixes=True,
        )  # fmt: skip
        address = f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}:7000"
        worker = Seen(address, description=described)
        worker.pool = pb.POOL_PREFILL if i < workers else pb.POOL_DECODE
        report(worker)
        desk.join(worker)
        desk.serve(worker.row, worker.pool, True)
        cached = [chunk for session in sessions[i % workers :: workers] for chunk in session]
        desk.cached(worker.row, pb.CacheEvents(added=[*system, *cached]))
        seen.append(worker)
    plans, others = list[float](), list[float]()
    for i in range(count):
        now += 1e-3
        report(worker := rng.choice(seen))
        chunks = [*system, *rng.choice(sessions), *(rng.getrandbits(HINT_BITS) for _ in range(11))]
        attempt, clock = b"%d" % i, time.thread_time
        began = clock()
        desk.reported(worker.row)
        asked = clock()
        request = PrefillRequest(rng.getrandbits(64), 2_000, chunks, arrival=i, answer=150)
        planned = desk.plan(request, NOTHING)
        ended = clock()
        plans.append(1e6 * (ended - asked))
        assert isinstance(planned, Plan)
        assert planned.decode is not None
        computes = planned.ranges[0].worker
        desk.sent(attempt, computes, planned.work(computes, chunks))
        desk.reserved(planned.decode, 2_001)
        desk.ended(attempt, computed=True)
        desk.released(planned.decode, 2_001)
        others.append(1e6 * (clock() - ended + asked - began))
    return plans, others


def measure(run: Run) -> None:
    args = run.args
    run.parameters |= {"prompt_tokens": ends.PROMPT_TOKENS, "output_tokens": ends.OUTPUT_TOKENS}
    for name, busy in (("", 0.2), (".full", 0.98)):
        plans, others = decisions(1_000, 2_000, busy=busy)
        run.add_median(f"router.plan.w1000{name}", plans, "µs")
        share = 1e-3 * (statistics.mean(plans) + statistics.mean(others))
        run.add(Row(f"router.plan.share.w1000{name}", share, "of the loop at 1,000 requests/s"))
    secret, step = secrets.token_hex(16), ends.FORK.Value("d", 0.0)

    def worker(pool: pb.Pool, lanes: Lanes) -> StandIn:
        return StandIn(pool, lanes, list(range(1000, 1400)), secret=secret.encode())

    with ends.fakes(worker, [0, 0], 1, step) as workers:

        def routed(*flags: str) -> LocalCluster:
            given = [*ends.to(workers), *flags]
            return LocalCluster(run.directory, prefill=0, decode=0, secret=secret, router_flags=given)

        with routed() as cluster:
            url = cluster.url
            uvloop.run(until_ready(url))

            def added() -> Pairs:
                with collector_off():
                    return uvloop.run(measure_added(url, workers[0], secret.encode(), args.pairs))

            add_rows(run, "router.added", added())
            answer, step.value = ends.fake_answer(url), LOCKSTEP_S
            stalls = ends.longest_stalls(url, ends.large_requests(answer), MIN_PAIRS)
            worst = max(map(statistics.median, stalls.values()))
            p99 = percentile([ms for series in stalls.values() for ms in series], 0.99)
            run.add(Row("router.stall.large_request", worst, "ms", p99=p99, goal=50))
            step.value = LOADED_STEP_S
            with ends.open_streams(url, args.streams):
                add_rows(run, f"router.added.streams{args.streams}", added(), bound=False)
            step.value = SATURATED_STEP_S
            seconds, cores = saturated(cluster, args)
            per_core, per_second = statistics.median(cores), statistics.median(seconds)
            spread = max(cores) - min(cores)
            name = "router.tokens_per_core"
            run.add(Row(name, per_core, "tokens/s", spread=spread, goal=32_000, better="higher"))
            run.add(Row("router.cpu_per_token", 1e6 / per_core, "µs"))
            run.add(Row("router.processes1.tokens_per_s", per_second, "tokens/s"))
        with routed("--router-processes", "2") as cluster:
            uvloop.run(until_ready(cluster.url))
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
