"""A prefill pool: sessions, routers and workers on one simulated clock. Times are in seconds.

A worker computes one prompt after another and keeps an LRU cache of chunks.
"""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.kv_names import CHUNK_TOKENS
from baton.router.policy.prefill import PrefillPolicy, PrefillRequest
from baton.router.policy.prefill_loads import PrefillLoads, PrefillWork
from baton.rpc import LONGEST_REPORT
from baton.rpc import worker_pb2 as pb
from baton.simulator.cache import KvMemory, Lease
from baton.simulator.clock import Clock, report_interval
from baton.simulator.trace import Session, Trace, Turn, hit_tokens
from baton.steps.averages import Average

Speed = Callable[[int, int], float]
"""Takes the uncached and the cached tokens of one prompt. Returns the seconds that the prompt takes."""


@dataclass(slots=True)
class Queued:
    """A prompt in a worker's queue.

    Attributes:
        finished: called with the time, the worker and the prompt tokens that were cached.
    """

    turn: Turn
    arrived: float
    finished: Callable[[float, "SimWorker", int], None]


class SimWorker:
    """`begin` returns when the prompt will be done. The owner of the clock calls `finish` at that time.

    Attributes:
        busy: seconds that it has computed.
        queue: prompts that have not begun.
        tokens_per_s: uncached tokens per second of computing.
    """

    def __init__(self, name: str, capacity: int, speed: Speed) -> None:
        """`capacity`: of the cache, in chunks."""
        self.name = name
        self.busy = 0.0
        self.queue: deque[Queued] = deque()
        self._speed = speed
        self._kv = KvMemory(capacity)
        self._running: Queued | None = None
        self._lease: Lease | None = None  # of this prompt
        self._hit = 0
        self.tokens_per_s = Average()  # as in engine.core.meters

    @property
    def idle(self) -> bool:
        return self._running is None

    def tokens_waiting(self) -> int:
        """Uncached tokens of all prompts, as the engine reports them.

        The running prompt counts as a whole.
        """
        running = [self._running] if self._running else []
        return sum(q.turn.tokens - hit_tokens(q.turn, self._kv) for q in (*running, *self.queue))

    def begin(self, now: float) -> float:
        """Begins the next prompt. Returns when it will be done. One that does not fit into the cache leaves
        nothing there."""
        queued = self._running = self.queue.popleft()
        chunks = queued.turn.chunks
        self._hit = hit_tokens(queued.turn, self._kv)
        positions = len(chunks) * CHUNK_TOKENS
        self._lease = self._kv.take(chunks, positions, positions)
        seconds = self._speed(queued.turn.tokens - self._hit, self._hit)
        self.busy += seconds
        self.tokens_per_s.add(queued.turn.tokens - self._hit, seconds)
        return now + seconds

    def finish(self) -> tuple[Queued, int, list[int], list[int]]:
        """Returns the prompt that is done, its tokens that were cached, and the chunks evicted and added."""
        queued, self._running = self._running, None
        assert queued is not None
        if self._lease is not None:
            self._kv.publish(self._lease, queued.turn.chunks)
            self._kv.release(self._lease)
        added, evicted = self._kv.reported()
        return queued, self._hit, evicted, added


@dataclass(frozen=True, slots=True)
class Setting:
    """What the trace meets.

    Attributes:
        capacity: chunks that a worker's cache holds.
        rate: sessions per second.
        think: mean time from a first token to the next turn.
        changes: (share of the sessions that have begun, workers that join). A negative number of workers
            drains and leaves.
        warm_up: share of the requests that are not measured.
    """

    workers: int
    routers: int
    capacity: int
    rate: float
    think: float
    speed: Speed
    changes: Sequence[tuple[float, int]] = ()
    warm_up: float = 0.4
    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """What was measured.

    Attributes:
        tokens, hit_tokens: of all prompts; of them, those that a cache held.
        bound_tokens: those that one endless cache of all workers would have held, prompts that still run
            included. No policy can find more.
        busy: time that each worker computed.
        turns, moved: turns after the first of their session; of them, those that changed the worker.
        decisions, deciding: choices of a worker, and the real time that they took.
    """

    ttft: list[float] = field(default_factory=list)
    tokens: int = 0
    hit_tokens: int = 0
    bound_tokens: int = 0
    busy: list[float] = field(default_factory=list)
    turns: int = 0
    moved: int = 0
    decisions: int = 0
    deciding: float = 0.0


class PrefillRouter:
    """Keeps the loads of the workers and chooses a worker for each turn, as a real router does."""

    def __init__(self, policy: PrefillPolicy) -> None:
        self.loads = PrefillLoads()
        self.rows: dict[SimWorker, int] = {}
        self._workers: dict[int, SimWorker] = {}
        self._policy = policy
        self._choices = 0

    def join(self, worker: SimWorker, now: float) -> None:
        row = self.rows[worker] = self.loads.join(worker.name, block_size=CHUNK_TOKENS, now=now)
        self._workers[row] = worker

    def leave(self, worker: SimWorker) -> None:
        row = self.rows.pop(worker)
        del self._workers[row]
        self.loads.leave(row)

    def choose(self, key: int, turn: Turn, now: float) -> tuple[SimWorker, PrefillWork]:
        request = PrefillRequest(key=key, tokens=turn.tokens, chunks=turn.chunks, arrival=self._choices)
        self._choices += 1
        snapshot = self.loads.snapshot(request, now)
        assert snapshot is not None
        row = self._policy(snapshot, request)
        return self._workers[row], PrefillWork(turn.tokens - snapshot.cached.of(row), turn.chunks)


class Simulation:
    """`run` it once."""

    def __init__(self, trace: Trace, policy: PrefillPolicy, setting: Setting) -> None:
        self._trace = trace
        self._setting = setting
        self._rng = random.Random(setting.seed)
        self._clock = Clock()
        self._routers = [PrefillRouter(policy) for _ in range(setting.routers)]
        self._workers: list[SimWorker] = []
        self._names = itertools.count()
        self._unfinished = sum(len(session.turns) for session in trace)
        self._measured_from = int(self._unfinished * (1 - setting.warm_up))  # measured once so many are left
        self._outcome = Outcome()
        self._asked_for: set[int] = set()
        self._busy_before: dict[SimWorker, float] = {}

    def run(self) -> Outcome:
        self._join(self._setting.workers)
        self._schedule_sessions()
        self._clock.run()
        self._outcome.busy = [w.busy - self._busy_before.get(w, 0.0) for w in self._workers]
        return self._outcome

    # ------------------------------------------------------------ sessions and workers come and go

    def _schedule_sessions(self) -> None:
        when = 0.0
        for session in self._trace:
            when += self._rng.expovariate(self._setting.rate)
            self._clock.at(when, lambda session=session: self._ask(session, 0, None))
        for share, count in self._setting.changes:
            change = self._join if count > 0 else self._drain
            self._clock.at(share * when, lambda change=change, count=count: change(abs(count)))

    def _join(self, count: int) -> None:
        for _ in range(count):
            name = f"10.0.{next(self._names)}:7000"
            worker = SimWorker(name, self._setting.capacity, self._setting.speed)
            self._workers.append(worker)
            for router in self._routers:
                router.join(worker, self._clock.now)
            self._clock.after(self._rng.uniform(0, LONGEST_REPORT), lambda w=worker: self._report(w))

    def _drain(self, count: int) -> None:
        for worker in self._rng.sample([w for w in self._workers if w in self._routers[0].rows], count):
            for router in self._routers:
                router.leave(worker)

    def _report(self, worker: SimWorker) -> None:
        if not self._unfinished or worker not in self._routers[0].rows:
            return
        waiting, speed = worker.tokens_waiting(), worker.tokens_per_s.value
        for router in self._routers:
            row = router.rows[worker]
            tokens = max(0, waiting - router.loads.router_tokens(row))
            status = pb.WorkerStatus(
                tokens_waiting=waiting, tokens_of_others=tokens, prefill_tokens_per_s=speed
            )
            router.loads.reported(row, status, self._clock.now)
        interval = report_interval(len(self._workers), len(self._routers))
        self._clock.after(interval, lambda: self._report(worker))

    # ------------------------------------------------------------ requests

    def _ask(self, session: Session, number: int, before: SimWorker | None) -> None:
        turn, outcome = session.turns[number], self._outcome
        router = self._rng.choice(self._routers)
        began = time.perf_counter()
        worker, work = router.choose(session.key, turn, self._clock.now)
        seconds = time.perf_counter() - began
        row = router.rows[worker]
        router.loads.sent(row, work, self._clock.now)
        measured = self._unfinished <= self._measured_from
        if measured:
            outcome.bound_tokens += hit_tokens(turn, self._asked_for)
            outcome.deciding += seconds
            outcome.decisions += 1
            outcome.turns += before is not None
            outcome.moved += before is not None and before is not worker
        self._asked_for.update(turn.chunks)

        def finished(now: float, at: SimWorker, hit: int) -> None:
            if at in router.rows:
                router.loads.ended(row, work, computed=True, now=now)
            if measured:
                outcome.ttft.append(now - queued.arrived)
                outcome.tokens += turn.tokens
                outcome.hit_tokens += hit
            if number + 1 < len(session.turns):
                think = turn.think * self._setting.think
                self._clock.after(think, lambda: self._ask(session, number + 1, at))

        queued = Queued(turn, self._clock.now, finished)
        worker.queue.append(queued)
        if worker.idle:
            self._begin(worker)

    def _begin(self, worker: SimWorker) -> None:
        self._clock.at(worker.begin(self._clock.now), lambda: self._finish(worker))

    def _finish(self, worker: SimWorker) -> None:
        queued, hit, evicted, added = worker.finish()
        for router in self._routers:  # a worker reports its cache before it sends the token
            if worker in router.rows:
                router.loads.index.discard(router.rows[worker], evicted)
                router.loads.index.add(router.rows[worker], added)
        queued.finished(self._clock.now, worker, hit)
        self._unfinished -= 1
        if self._unfinished == self._measured_from:
            self._busy_before = {w: w.busy for w in self._workers}
        if worker.queue:
            self._begin(worker)
