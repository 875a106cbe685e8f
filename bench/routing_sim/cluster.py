"""The discrete-event loop: sessions, routers and workers on one clock."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.routing_sim.trace import Session, Trace, Turn, hit_tokens
from bench.routing_sim.worker import Queued, SimWorker, Speed
from router.policy import PrefillLoads, PrefillPolicy, PrefillRequest, PrefillWork
from rpc import CHUNK_TOKENS

STATUS_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What the trace meets."""

    workers: int
    routers: int
    capacity: int
    """Chunks that a worker's cache holds."""
    rate: float
    """Sessions per second."""
    think: float
    """Mean seconds between turns."""
    speed: Speed
    changes: Sequence[tuple[float, int]] = ()
    """(share of the sessions that have begun, workers that join; negative: that drain and leave)."""
    warm_up: float = 0.4
    """Of the requests, which are not measured."""
    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """Of what was measured."""

    ttft: list[float] = field(default_factory=list)
    """Seconds."""
    tokens: int = 0
    hit_tokens: int = 0
    bound_tokens: int = 0
    """That one endless cache for all would have had, also of prompts still being computed: none finds
    more."""
    busy: list[float] = field(default_factory=list)
    """Seconds that each worker computed."""
    fill: float = 0.0
    """Of the caches, at the end."""
    turns: int = 0
    """That were not the first of their session."""
    moved: int = 0
    """Of these, those that went to another worker than the turn before."""
    decisions: int = 0
    deciding: float = 0.0
    """Real seconds that all decisions took."""


class Router:
    """As `router.workers.members` does it, with rows for connections."""

    def __init__(self, policy: PrefillPolicy) -> None:
        self.loads = PrefillLoads()
        self.rows: dict[SimWorker, int] = {}
        self.workers: dict[int, SimWorker] = {}
        self._policy = policy
        self.choices = 0

    def join(self, worker: SimWorker, now: float) -> None:
        row = self.rows[worker] = self.loads.join(worker.name, block_size=CHUNK_TOKENS, now=now)
        self.workers[row] = worker

    def leave(self, worker: SimWorker) -> None:
        row = self.rows.pop(worker)
        del self.workers[row]
        self.loads.leave(row)

    def choose(self, key: int, turn: Turn, now: float) -> tuple[SimWorker, PrefillWork]:
        request = PrefillRequest(key=key, tokens=turn.tokens, chunks=turn.chunks, arrival=self.choices)
        self.choices += 1
        snapshot = self.loads.snapshot(request, now)
        assert snapshot is not None
        row = self._policy(snapshot, request)
        return self.workers[row], PrefillWork(turn.tokens - snapshot.cached.of(row), turn.chunks)


class Simulation:
    def __init__(self, trace: Trace, policy: PrefillPolicy, setting: Setting) -> None:
        self._trace = trace
        self._setting = setting
        self._rng = random.Random(setting.seed)
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._routers = [Router(policy) for _ in range(setting.routers)]
        self._workers: list[SimWorker] = []
        self._names = itertools.count()
        self._left = trace.requests
        self._begins = int(trace.requests * (1 - setting.warm_up))  # measured: when so many are left
        self._outcome = Outcome()
        self._asked_for: set[int] = set()
        self._busy_before: dict[SimWorker, float] = {}

    def run(self) -> Outcome:
        self._join(self._setting.workers)
        self._schedule_sessions()
        while self._events and self._left:
            self._now, _, event = heapq.heappop(self._events)
            event()
        outcome = self._outcome
        outcome.busy = [worker.busy - self._busy_before.get(worker, 0.0) for worker in self._workers]
        outcome.fill = sum(worker.fill for worker in self._workers) / len(self._workers)
        return outcome

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    # ------------------------------------------------------------ who comes and goes

    def _schedule_sessions(self) -> None:
        when, sessions = 0.0, self._trace.sessions
        for session in sessions:
            when += self._rng.expovariate(self._setting.rate)
            self._at(when, lambda session=session: self._ask(session, 0, None))
        for share, count in self._setting.changes:
            if count > 0:
                self._at(share * when, lambda count=count: self._join(count))
            else:
                self._at(share * when, lambda count=count: self._drain(-count))

    def _join(self, count: int) -> None:
        for _ in range(count):
            name = f"10.0.{next(self._names)}:7000"
            worker = SimWorker(name, self._setting.capacity, self._setting.speed)
            self._workers.append(worker)
            for router in self._routers:
                router.join(worker, self._now)
            self._at(self._now + self._rng.uniform(0, STATUS_INTERVAL), lambda w=worker: self._report(w))

    def _drain(self, count: int) -> None:
        for worker in self._rng.sample([w for w in self._workers if w in self._routers[0].rows], count):
            for router in self._routers:
                router.leave(worker)

    def _report(self, worker: SimWorker) -> None:
        if worker not in self._routers[0].rows:
            return
        waiting, speed = worker.tokens_waiting(), worker.tokens_per_s()
        for router in self._routers:
            router.loads.reported(
                router.rows[worker], tokens_waiting=waiting, tokens_per_s=speed, now=self._now
            )
        self._at(self._now + STATUS_INTERVAL, lambda: self._report(worker))

    # ------------------------------------------------------------ requests

    def _ask(self, session: Session, number: int, before: SimWorker | None) -> None:
        turn = session.turns[number]
        router = self._rng.choice(self._routers)
        began = time.perf_counter()
        worker, work = router.choose(session.key, turn, self._now)
        took = time.perf_counter() - began
        row = router.rows[worker]
        router.loads.sent(row, work, self._now)
        measured = self._left <= self._begins
        if measured:
            self._outcome.bound_tokens += hit_tokens(turn, self._asked_for)
            self._outcome.deciding += took
            self._outcome.decisions += 1
            self._outcome.turns += before is not None
            self._outcome.moved += before is not None and before is not worker

        self._asked_for.update(turn.chunks)

        def finished(now: float, at: SimWorker, hit: int) -> None:
            if at in router.rows:
                router.loads.ended(row, work, computed=True, now=now)
            if measured:
                self._outcome.ttft.append(now - queued.arrived)
                self._outcome.tokens += turn.tokens
                self._outcome.hit_tokens += hit
            if number + 1 < len(session.turns):
                think = turn.think * self._setting.think
                self._at(now + think, lambda: self._ask(session, number + 1, at))

        queued = Queued(turn, self._now, finished)
        worker.queue.append(queued)
        if worker.idle:
            self._begin(worker)

    def _begin(self, worker: SimWorker) -> None:
        self._at(worker.begin(self._now), lambda: self._finish(worker))

    def _finish(self, worker: SimWorker) -> None:
        queued, hit = worker.finish()
        added, evicted = worker.take_changes()
        for router in self._routers:  # before the token, as a worker sends it
            if worker in router.rows:
                router.loads.index.discard(router.rows[worker], evicted)
                router.loads.index.add(router.rows[worker], added)
        queued.finished(self._now, worker, hit)
        self._left -= 1
        if self._left == self._begins:
            self._busy_before = {w: w.busy for w in self._workers}
        if worker.queue:
            self._begin(worker)
