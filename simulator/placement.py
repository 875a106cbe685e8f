"""Where requests are computed, step by step: workers that decode and compute prompts, behind routers.

    arrives ─▶ the router's window ─▶ plan ─▶ handover: a worker of each pool
                                            ├▶ decode or prefill: one worker
                                            └▶ split: several workers

The plans are those of the router. A worker is an engine step by step (`step_worker`), and reports once a
second. The KV of a handover arrives `HANDOVER_SECONDS` after the first token.

Two simpler placements compare: `split` hands each request over, and `colocated` stands for engines that
decode and compute prompts in steps of a fixed size. Each router gives them requests in turn.
"""

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Literal

from baton.engine.core.meters import LONG
from baton.router.policy import placement as policy
from baton.router.policy.decode import DecodeCaches, DecodeLoad, DecodePool
from baton.router.policy.fleet import Fleet
from baton.router.policy.plan import Plan
from baton.router.policy.planner import NOTHING, Lack, plan
from baton.router.policy.prefill import PrefillRequest, sticky
from baton.router.policy.prefill_loads import PrefillLoads, PrefillWork
from baton.rpc import worker_pb2 as pb
from baton.simulator.clock import Clock, report_interval
from baton.simulator.placement_outcome import PlacementOutcome
from baton.simulator.step_worker import BLOCK, BLOCKS, BUDGET, Part, Request, SharedPrompt, Worker
from baton.simulator.steps import DOUBLES_AT, LAYERS
from baton.simulator.trace import Load, arrivals

SEATS = 256
HANDOVER_SECONDS = (1.2e-3, 2.5e-3)
"""Least and most time from the first token until a request can join a decode step."""
AUTOSCALER_INTERVAL = 1.0
"""Seconds between two looks of the autoscaler."""
WARM_UP = 0.1
"""Share of the requests that are not measured. Costs are unknown when the first ones arrive."""
SPREAD = 0x9E3779B97F4A7C15
"""Each request is a session of its own, and no worker has its prompt cached. Multiples of this are far apart,
modulo 2⁶⁴."""

Kind = Literal["policy", "split", "colocated"]
Pool = Literal["prefill", "decode"]
POOLS: tuple[Pool, Pool] = ("prefill", "decode")
FlipPolicy = Callable[[float, Mapping[Pool, Sequence[pb.WorkerStatus]]], Mapping[Pool, int]]
"""Takes the time and the reports of each pool. Returns the sizes that the pools should have."""


@dataclass(eq=False)
class SeenWorker:
    """What a router knows of a worker (`Seen`)."""

    row: int
    address: str
    seats: InitVar[int]
    status: pb.WorkerStatus = field(default_factory=pb.WorkerStatus)
    ready: bool = True

    def __post_init__(self, seats: int) -> None:
        self.load = DecodeLoad(self.address, BLOCK, BLOCKS, seats, BLOCKS)
        self.prefix_links: dict[tuple[int, int], pb.PrefixLink] = {}
        self.description = pb.WorkerDescription(
            max_num_batched_tokens=BUDGET, attention_doubles_at=round(DOUBLES_AT), num_layers=LAYERS
        )

    def ready_in(self, pool: "pb.Pool") -> bool:
        return True


@dataclass(eq=False)
class Router:
    """Sees its own requests at once, and those of other routers in reports.

    Attributes:
        workers: they begin in the decode pool (`move`).
        seats: requests that a worker decodes at once.
        splits: whether several workers may compute a prompt.
    """

    workers: list[Worker]
    seats: int
    kind: Kind
    splits: bool
    clock: Clock
    rng: random.Random
    outcome: PlacementOutcome

    def __post_init__(self) -> None:
        self._prefills: set[int] = set()
        self._loads = PrefillLoads()
        self._caches = DecodeCaches(self._loads.index)
        self._decoders = DecodePool()
        self._seen = {
            row: SeenWorker(row, worker.name, self.seats) for row, worker in enumerate(self.workers)
        }
        self._named = {worker.address: worker for worker in self._seen.values()}
        self._queue: deque[Request] = deque()
        self._sent_tokens = 0  # prompt tokens without a first token that workers have
        self._window = policy.PrefillWindow()
        for row, worker in self._seen.items():
            self._loads.join(worker.address, block_size=BLOCK, now=self.clock.now, serving=False)
            self._caches.join(row, worker.load)
            self._decoders.add(worker.load)

    def move(self, row: int, pool: Pool) -> None:
        """New work of the pool goes to this worker. What it has goes on to its end."""
        if pool == "prefill":
            self._prefills.add(row)
            self._decoders.remove(self._seen[row].load)
        else:
            self._prefills.remove(row)
            self._decoders.add(self._seen[row].load)
        self._loads.serve(row, pool == "prefill")
        self._dispatch()

    @property
    def idle(self) -> bool:
        """Whether nothing is left in its view of the workers."""
        rows = range(len(self.workers))
        left = [self._loads.tokens_waiting(row, math.inf) or self._seen[row].load.own for row in rows]
        return not (self._queue or self._sent_tokens or any(left))

    def add(self, request: Request) -> None:
        self._queue.append(request)
        self._dispatch()

    def reported(self, row: int, status: pb.WorkerStatus) -> None:
        self._seen[row].status = status
        self._loads.reported(row, status, self.clock.now, alone=row in self._prefills)
        running = status.requests_running + status.reservations
        self._seen[row].load.reported(blocks_free=status.blocks_free, running=running)
        if row == len(self.workers) - 1:
            self._update_window()
        self._dispatch()

    def _update_window(self) -> None:
        paces = [policy.pace(seen.status) for row, seen in self._seen.items() if row not in self._prefills]
        speed = self._loads.tokens_per_s()
        budgets = len(self._prefills) * [BUDGET]
        self._window = policy.prefill_window(budgets, speed, paces if self.kind == "policy" else [])

    def _dispatch(self) -> None:
        while self._queue:
            if self._sent_tokens and self._sent_tokens >= self._window.holding(self._queue[0].prompt):
                return
            found = self._plan(self._queue[0])
            if isinstance(found, Lack):
                return
            request = self._queue.popleft()
            request.due = request.arrived + found.within
            self.outcome.places[found.place] += 1
            assert found.decode is not None
            if found.place == "split":
                self._share(request, found, found.decode)
            else:
                self._submit(request, found, found.ranges[-1].worker, found.decode)

    def _plan(self, request: Request) -> Plan | Lack:
        fleet = Fleet(
            now=self.clock.now,
            rng=self.rng,
            named=self._named,
            workers=self._seen,
            attached_rows=0,
            decodes=self._decoders,
            decoders=self._decoders,
            loads=self._loads,
            caches=self._caches,
            policy=sticky,
            overflow=self.kind == "policy",
            splits=self.kind == "policy" and self.splits,
            prefix_fetches=False,
        )
        key = request.number * SPREAD % 2**64
        return plan(
            PrefillRequest(key, request.prompt, answer=request.answer, may_split=True), NOTHING, fleet
        )

    def _share(self, request: Request, found: Plan, decode: int) -> None:
        ranges = [(self.workers[part.worker], range(part.start, part.stop)) for part in found.ranges]
        shared, final = SharedPrompt(ranges, self.clock), found.ranges[-1].worker
        for row in dict.fromkeys(part.worker for part in found.ranges):
            part = Part(
                request.number, request.prompt, request.answer, request.arrived,
                measured=request.measured and row == final,
                due=request.due,
                prompt_of=shared,
                own=deque(number for number, other in enumerate(found.ranges) if other.worker == row),
            )  # fmt: skip
            if row == final:
                self._submit(part, found, row, decode)
            else:
                part.first_token = partial(self._computed, part, self._sent(part, row), row)
                self.workers[row].prefill(part)

    def _sent(self, request: Request, computes: int) -> PrefillWork:
        work = PrefillWork(request.tokens)
        self._loads.sent(computes, work, self.clock.now)
        self._sent_tokens += request.tokens
        return work

    def _computed(self, request: Request, work: PrefillWork, computes: int) -> None:
        self._loads.ended(computes, work, computed=True, now=self.clock.now)
        self._sent_tokens -= request.tokens
        self._dispatch()

    def _submit(self, request: Request, found: Plan, computes: int, decodes: int) -> None:
        work = self._sent(request, computes)
        request.first_token = partial(self._first_token, request, work, computes, decodes)
        request.ended = partial(self._ended, request, decodes)
        if computes != decodes:
            request.ends = partial(self._expect, request, decodes)
        if computes == decodes:
            self._seen[decodes].load.sent(request.prompt + 1)
        elif found.order == "prefill":
            request.started = partial(self._reserve, request, decodes)
        else:
            self._reserve(request, decodes)
        self.workers[computes].prefill(request)

    def _expect(self, request: Request, decode: int, computed: float) -> None:
        self.workers[decode].arriving[request.number] = computed + HANDOVER_SECONDS[1]

    def _reserve(self, request: Request, decode: int) -> None:
        self._seen[decode].load.sent(request.prompt + 1)
        self.workers[decode].reserve(request)

    def _first_token(self, request: Request, work: PrefillWork, computes: int, decodes: int) -> None:
        worker = self.workers[decodes]
        if computes == decodes:
            worker.decode(request)
        else:
            self.clock.after(self.rng.uniform(*HANDOVER_SECONDS), partial(worker.join, request))
        self._computed(request, work, computes)

    def _ended(self, request: Request, decodes: int) -> None:
        self._seen[decodes].load.ended(request.prompt + 1)
        self._dispatch()


@dataclass
class _Cluster:
    """All workers and routers, and the requests that arrive."""

    arrivals: Sequence[tuple[float, Load]]
    kind: Kind
    workers: list[Worker]
    routers: list[Router]
    clock: Clock
    rng: random.Random
    outcome: PlacementOutcome

    def __post_init__(self) -> None:
        self._arrived = 0
        count, routers = len(self.workers), len(self.routers)
        self._turns = [itertools.count(router * count // routers) for router in range(routers)]
        self._pools: dict[int, Pool] = dict.fromkeys(range(count), "decode")

    def run(self, prefills: int, flips: FlipPolicy | None) -> None:
        for row in range(prefills):
            self._move(row, "prefill")
        for number, (at, load) in enumerate(self.arrivals):
            self.clock.after(at, partial(self._arrive, number, load))
        for row in range(len(self.workers)):
            self.clock.after(0.0, partial(self._report, row))
        if flips is not None:
            self.clock.after(AUTOSCALER_INTERVAL, partial(self._balance, flips))
        self.clock.run()
        assert all(worker.idle for worker in self.workers), "requests left at workers"
        assert all(router.idle for router in self.routers), "requests left in the view of a router"

    def _arrive(self, number: int, load: Load) -> None:
        now, outcome = self.clock.now, self.outcome
        self._arrived += 1
        outcome.measures = self._arrived > WARM_UP * len(self.arrivals)
        request = Request(number, load.prompt, load.answer, now, outcome.measures)
        router = self.rng.randrange(len(self.routers))
        if self.kind != "colocated":
            self.routers[router].add(request)
            return
        worker = self.workers[next(self._turns[router]) % len(self.workers)]
        request.first_token = partial(worker.decode, request)
        worker.prefill(request)

    def _report(self, row: int) -> None:
        status = self.workers[row].status()
        for router in self.routers:
            router.reported(row, status)
        if self._arrived < len(self.arrivals) or not all(worker.idle for worker in self.workers):
            interval = report_interval(len(self.workers), len(self.routers))
            self.clock.after(interval, partial(self._report, row))

    def _move(self, row: int, pool: Pool) -> None:
        self._pools[row] = pool
        for router in self.routers:
            router.move(row, pool)

    def _balance(self, flips: FlipPolicy) -> None:
        """Moves the worker with the least work if one pool should shrink and the other grow."""
        statuses = [worker.status() for worker in self.workers]
        rows: dict[Pool, list[int]] = {"prefill": [], "decode": []}
        for row, pool in self._pools.items():
            rows[pool].append(row)
        wanted = flips(self.clock.now, {pool: [statuses[row] for row in rows[pool]] for pool in rows})
        more = wanted["prefill"] - len(rows["prefill"])
        if more and wanted["decode"] - len(rows["decode"]) == -more:
            source, target = POOLS if more < 0 else POOLS[::-1]
            row = min(rows[source], key=lambda r: (statuses[r].tokens_waiting, statuses[r].requests_running))
            self._move(row, target)
            self.outcome.flips += 1
        if self._arrived < len(self.arrivals):
            self.clock.after(AUTOSCALER_INTERVAL, partial(self._balance, flips))


def simulate(
    load: Load | Callable[[float], Load],
    kind: Kind,
    *,
    requests: int,
    workers: int = 2,
    prefills: int = 0,
    flips: FlipPolicy | None = None,
    routers: int = 1,
    seed: int = 1,
    seats: int = SEATS,
    target_steps: float = LONG,
    splits: bool = True,
) -> PlacementOutcome:
    """Serves requests that arrive at random times. The times depend on the load and the seed only.

    `load`: what arrives, or what arrives at a time. `requests`: their number.
    `prefills`: workers of the prefill pool; 0: half of them.
    `flips` moves workers between the pools. None: nothing does. `seats` and `target_steps`: of each worker,
    as `--max-num-seqs` and the gap target in fastest steps. `splits`: whether the policy may split prompts.

    Ends when every request is answered. Asserts that nothing is left at workers and in the views of routers.
    """
    clock, rng, outcome = Clock(), random.Random(seed), PlacementOutcome()
    at_a_time = (lambda now: load) if isinstance(load, Load) else load
    asked = list(arrivals(at_a_time, requests, workers, rng))
    engines = [
        Worker(str(row), clock, outcome, colocated=kind == "colocated", target_steps=target_steps)
        for row in range(workers)
    ]
    seen_by = [
        Router(engines, seats, kind, splits, clock, random.Random(seed), outcome) for _ in range(routers)
    ]
    _Cluster(asked, kind, engines, seen_by, clock, rng, outcome).run(prefills or workers // 2, flips)
    return outcome
