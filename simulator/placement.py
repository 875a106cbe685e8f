"""Where requests are computed, step by step: workers that decode and compute prompts, behind routers.

    arrives ─▶ the router's window ─▶ plan ─▶ handover: a worker of each pool
                                            ├▶ decode or prefill: one worker
                                            └▶ split: several workers

The plans are those of the router (`router`). A worker is an engine step by step (`step_worker`) with a prefix
cache (`cache`), and reports once a second.

Three simpler placements compare: `split` hands each request over, `colocated` stands for engines of vLLM,
which decode and compute prompts in steps of a fixed size, and `sglang` for engines of SGLang. Each router
gives engines sessions in turn, and a session stays at its engine.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

from baton.engine.core.meters import LONG
from baton.router.policy.desk import Listener
from baton.router.policy.plan import Plan
from baton.router.policy.prefill import PrefillPolicy, sticky
from baton.router.policy.prefill_loads import report_seconds
from baton.router.policy.settings import PlanSettings
from baton.rpc import LONGEST_REPORT
from baton.rpc import worker_pb2 as pb
from baton.simulator.clock import Clock
from baton.simulator.placement_outcome import PlacementOutcome
from baton.simulator.requests import Request
from baton.simulator.router import Pool, Router
from baton.simulator.step_worker import Rule, Worker
from baton.simulator.steps import H200_8B, Machine, of_vllm
from baton.simulator.trace import Load, Session, arrivals
from baton.steps.step_model import StepModel

SEATS = 256
AUTOSCALER_INTERVAL = 1.0
"""Seconds between two looks of the autoscaler."""
WARM_UP = 0.1
"""Share of the requests that are not measured. Costs are unknown when the first ones arrive."""
RULES: Mapping[str, Rule] = {"colocated": "vllm", "sglang": "sglang"}
"""Of engines that decode and compute prompts, by kind of placement."""
Kind = Literal["policy", "split", "colocated", "sglang"]
POOLS: tuple[Pool, Pool] = ("prefill", "decode")
FlipPolicy = Callable[[float, Mapping[Pool, Sequence[pb.WorkerStatus]]], Mapping[Pool, int]]
"""Takes the time and the reports of each pool. Returns the sizes that the pools should have."""


class Change(NamedTuple):
    """At this time a worker gets the new work of a pool. None: it gets none, and its requests go on."""

    at: float
    row: int
    pool: Pool | None


class Measured(NamedTuple):
    """What a real worker has reported at this time. From then on the steps of this one cost as much.

    Attributes:
        machine: with these steps.
        model: of its steps.
        fastest: seconds of its fastest step that only decoded.
        links: over which it fetches prefixes, by the row of the other worker, as far as measured.
    """

    at: float
    row: int
    machine: Machine
    model: StepModel
    fastest: float
    links: Mapping[int, pb.PrefixLink]


@dataclass
class _Cluster:
    """All workers and routers, and the requests that arrive."""

    sessions: Sequence[tuple[float, Session]]
    kind: Kind
    workers: list[Worker]
    routers: list[Router]
    clock: Clock
    rng: random.Random
    outcome: PlacementOutcome
    warm_up: float
    max_answer: int

    def __post_init__(self) -> None:
        self._requests = sum(len(session.turns) for _, session in self.sessions)
        self._arrived = 0
        self._later: Iterator[Session] = iter(())
        count, routers = len(self.workers), len(self.routers)
        # Several routers learn of each other's requests from reports.
        self._interval = LONGEST_REPORT if routers == 1 else report_seconds(count)
        self._turns = [itertools.count(router * count // routers) for router in range(routers)]
        self._silent: set[int] = set()  # rows whose reports would say the same until a request arrives
        self._bound: dict[int, int] = {}  # key of a session → colocated engine
        self._pools: dict[int, Pool] = {}

    def run(
        self,
        prefills: int,
        at_a_time: int,
        flips: FlipPolicy | None,
        changes: Sequence[Change],
        measured: Sequence[Measured],
    ) -> None:
        for row, worker in enumerate(self.workers):
            worker.cache_changed = partial(self._cache_changed, row)
        for row in range(len(self.workers)):
            self._move(row, "prefill" if row < prefills else "decode")
        first = at_a_time or len(self.sessions)
        self._later = (session for _, session in self.sessions[first:])
        for row in range(len(self.workers)):  # before the first request, as when a router attaches
            self.clock.after(0.0, partial(self._report, row))
        for at, session in self.sessions[:first]:
            self.clock.after(at, partial(self._ask, session, 0))
        if flips is not None:
            self.clock.after(AUTOSCALER_INTERVAL, partial(self._balance, flips))
        for change in changes:
            self.clock.after(change.at, partial(self._move, change.row, change.pool))
        for each in measured:
            self.clock.after(each.at, partial(self._measured, each))
        self.clock.run()
        assert all(worker.idle for worker in self.workers), "requests left at workers"
        assert all(router.idle for router in self.routers), "requests left in the view of a router"

    def _ask(self, session: Session, number: int) -> None:
        """A session has its turn of this number."""
        turn, outcome = session.turns[number], self.outcome
        outcome.measures = self._arrived >= self.warm_up * self._requests
        request = Request(
            self._arrived, turn.tokens, turn.answer, self.clock.now, outcome.measures, session.key,
            turn.chunks, first=not number, max_answer=max(turn.answer, self.max_answer),
            then=partial(self._answered, session, number),
        )  # fmt: skip
        self._arrived += 1
        self._report_again()
        request.router = router = self.rng.randrange(len(self.routers))
        if self.kind not in RULES:
            self.routers[router].add(request)
            return
        row = self._bound.get(session.key)
        if row is None:
            row = self._bound[session.key] = next(self._turns[router]) % len(self.workers)
        request.positions = turn.tokens + turn.answer
        request.first_token = partial(self.workers[row].decode, request)
        request.ended = request.then
        self.workers[row].prefill(request)

    def _answered(self, session: Session, number: int) -> None:
        if number + 1 < len(session.turns):
            self.clock.after(session.turns[number].think, partial(self._ask, session, number + 1))
        elif (later := next(self._later, None)) is not None:
            self._ask(later, 0)

    def _cache_changed(self, row: int) -> None:
        added, evicted = self.workers[row].kv.reported()
        if added or evicted:
            for router in self.routers:
                router.cached(row, added, evicted)

    def _measured(self, each: Measured) -> None:
        self.workers[each.row].measured(each.machine, each.model, each.fastest, each.links)
        self._tell(each.row)

    def _tell(self, row: int) -> None:
        status, waiting = self.workers[row].status(), self.workers[row].waiting()
        for number, router in enumerate(self.routers):
            status.tokens_of_others = status.tokens_waiting - waiting[number]  # is read at once
            router.reported(row, status)

    def _report(self, row: int) -> None:
        self._tell(row)
        if all(worker.idle for worker in self.workers) and all(router.idle for router in self.routers):
            self._silent.add(row)
        else:
            self.clock.after(self._interval, partial(self._report, row))

    def _report_again(self) -> None:
        """Of workers that were idle: at the time at which they would have."""
        after = self._interval - self.clock.now % self._interval
        for row in sorted(self._silent):
            self.clock.after(after, partial(self._report, row))
        self._silent.clear()

    def _move(self, row: int, pool: Pool | None) -> None:
        if pool is None:
            self._pools.pop(row, None)
        else:
            self._pools[row] = pool
        for router in self.routers:
            router.move(row, pool)

    def _balance(self, flips: FlipPolicy) -> None:
        """Moves the worker with the least work if one pool should shrink and the other grow."""
        statuses = [worker.status() for worker in self.workers]
        rows: dict[Pool, list[int]] = {"prefill": [], "decode": []}
        for row, pool in self._pools.items():
            rows[pool].append(row)
        sizes = flips(self.clock.now, {pool: [statuses[row] for row in rows[pool]] for pool in rows})
        more = sizes["prefill"] - len(rows["prefill"])
        if more and sizes["decode"] - len(rows["decode"]) == -more:
            source, target = POOLS if more < 0 else POOLS[::-1]
            row = min(rows[source], key=lambda r: (statuses[r].tokens_waiting, statuses[r].requests_running))
            self._move(row, target)
            self.outcome.flips += 1
        if self._arrived < self._requests:
            self.clock.after(AUTOSCALER_INTERVAL, partial(self._balance, flips))


def simulate(
    load: Load | Callable[[float], Load] | Sequence[tuple[float, Session]],
    kind: Kind,
    *,
    requests: int = 0,
    at_a_time: int = 0,
    warm_up: float = WARM_UP,
    max_answer: int = 0,
    workers: int = 2,
    prefills: int | None = None,
    flips: FlipPolicy | None = None,
    routers: int = 1,
    seed: int = 1,
    seats: int = SEATS,
    target_steps: float = LONG,
    ttft_target: float | None = None,
    splits: bool = True,
    machine: Machine = H200_8B,
    prefill_machine: Machine | None = None,
    policy: PrefillPolicy = sticky,
    prefix_fetches: bool = True,
    changes: Sequence[Change] = (),
    slowness: Mapping[int, float] = MappingProxyType({}),
    names: Sequence[str] = (),
    measured: Sequence[Measured] = (),
    given: Mapping[int, Plan] = MappingProxyType({}),
    listener: Listener | None = None,
) -> PlacementOutcome:
    """Serves requests that arrive at random times, or sessions. Times depend on the load and the seed only.

    `load`: what arrives, or what arrives at a time, or sessions with the times at which they begin.
    `requests`: their number, if sessions are not given.
    `at_a_time`: sessions. The next one begins when one ends. 0: all begin at their times.
    `warm_up`: share of the requests that is not measured.
    `max_answer`: tokens that clients allow. 0: as many as they get.
    `prefills`: workers of the prefill pool. None: half of them.
    `flips` moves workers between the pools. None: nothing does. `seats` and `target_steps`: of each worker,
    as `--max-num-seqs` and the gap target in fastest steps. `ttft_target`: in seconds. `splits`: whether the
    policy may split prompts. `machine`: of each worker. `prefill_machine`: of those that begin in the prefill
    pool, if theirs is another one. `policy`: chooses prefill workers. `prefix_fetches`: as of a router.
    `slowness`: how many times as long the
    steps of a worker take, by its row. `names`: of the workers. Empty: their rows. `measured`: by real
    workers, in place of what these measure. `given`: plans of requests by their numbers, in place of those of
    the desks. `listener`: of all desks.

    Ends when every request is answered. Asserts that nothing is left at workers and in the views of routers.
    """
    clock, rng, outcome = Clock(), random.Random(seed), PlacementOutcome()
    if isinstance(load, Load):
        sessions = list(arrivals(lambda _: load, requests, workers, rng))
    else:
        sessions = list(arrivals(load, requests, workers, rng)) if callable(load) else load
    machine = of_vllm(machine) if kind == "colocated" else machine
    of_prefill, prefills = prefill_machine or machine, workers // 2 if prefills is None else prefills
    engines = [
        Worker(
            names[row] if names else str(row),
            clock,
            outcome,
            rule=RULES.get(kind, "baton"),
            target_steps=target_steps,
            machine=of_prefill if row < prefills else machine,
        )
        for row in range(workers)
    ]
    for row, times in slowness.items():
        engines[row].slowness = times
    plans = kind == "policy"
    settings = PlanSettings(
        ttft_target=ttft_target,
        overflow=plans,
        split_prompts=plans and splits,
        prefix_fetches=plans and prefix_fetches,
    )
    seen_by = [
        Router(engines, seats, clock, seed + number, outcome, settings, given)
        for number in range(routers)  # with equal draws all would choose the same workers
    ]
    for router in seen_by:
        router.desk.policy = policy
        router.desk.listener = listener
    cluster = _Cluster(sessions, kind, engines, seen_by, clock, rng, outcome, warm_up, max_answer)
    cluster.run(prefills, at_a_time, flips, changes, measured)
    return outcome
