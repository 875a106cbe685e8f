"""Where requests are computed, step by step: workers that decode and compute prompts, behind routers.

    arrives ─▶ the router's window ─▶ two_choices, sticky, place ─▶ handover: a worker of each pool
                                                                 └▶ decode or prefill: one worker

The policies are those of the router. A worker is an engine step by step (`step_worker`), and reports once a
second. The KV of a handover arrives `HANDOVER_SECONDS` after the first token.

Two simpler placements compare: `split` hands each request over, and `colocated` stands for engines that
decode and compute prompts in steps of a fixed size. Each router gives them requests in turn.
"""

import itertools
import math
import random
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Literal

from engine.core.chunk_limit import LONG
from router.policy import (
    DecodeLoad,
    Placement,
    PrefillLoads,
    PrefillRequest,
    PrefillSnapshot,
    PrefillWindow,
    PrefillWork,
    apply_report,
    decode_offer,
    pace,
    patience,
    place,
    prefill_offer,
    prefill_window,
    sticky,
    two_choices,
)
from rpc import worker_pb2 as pb
from simulator.step_worker import BLOCK, BLOCKS, BUDGET, Clock, PlacementOutcome, Request, Worker

STATUS_INTERVAL = 1.0
SEATS = 256
HANDOVER_SECONDS = (1.2e-3, 2.5e-3)
"""Least and most time from the first token until a request can join a decode step."""
WARM_UP = 0.1
"""Share of the requests that are not measured. Costs are unknown when the first ones arrive."""
SPREAD = 0x9E3779B97F4A7C15
"""Each request is a session of its own. Multiples of this are far apart, modulo 2⁶⁴."""

Kind = Literal["policy", "split", "colocated"]


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of each request, and requests per second for each two workers."""

    prompt: int
    answer: int
    rate: float


class Router:
    """Sees its own requests at once, and those of other routers in reports."""

    def __init__(
        self,
        workers: list[Worker],
        seats: int,
        kind: Kind,
        clock: Clock,
        rng: random.Random,
        outcome: PlacementOutcome,
    ) -> None:
        """The first half of the workers is the prefill pool, the second half the decode pool.

        `seats`: requests that a worker decodes at once.
        """
        self._workers = workers
        self._prefills = len(workers) // 2
        self._kind: Kind = kind
        self._clock = clock
        self._rng = rng
        self._outcome = outcome
        self._loads = PrefillLoads()
        self._decodes = [DecodeLoad(w.name, BLOCK, BLOCKS, seats, BLOCKS) for w in workers]
        self._status = [pb.WorkerStatus() for _ in workers]
        self._queue: deque[Request] = deque()
        self._sent_tokens = 0  # prompt tokens without a first token that workers have
        self._window = PrefillWindow()
        for row, worker in enumerate(workers):
            self._loads.join(worker.name, block_size=BLOCK, now=clock.now)
            self._loads.serve(row, row < self._prefills)

    @property
    def idle(self) -> bool:
        """Whether nothing is left in its view of the workers."""
        rows = range(len(self._workers))
        left = [self._loads.tokens_waiting(row, math.inf) or self._decodes[row].own for row in rows]
        return not (self._queue or self._sent_tokens or any(left))

    def add(self, request: Request) -> None:
        self._queue.append(request)
        self._dispatch()

    def reported(self, row: int, status: pb.WorkerStatus) -> None:
        self._status[row] = status
        apply_report(self._loads, row, status, row < self._prefills, self._clock.now)
        running = status.requests_running + status.reservations
        self._decodes[row].reported(blocks_free=status.blocks_free, running=running)
        if row == len(self._workers) - 1:
            self._update_window()
        self._dispatch()

    def _update_window(self) -> None:
        paces = [pace(status) for status in self._status[self._prefills :]]
        speed = self._loads.tokens_per_s()
        self._window = prefill_window(
            self._prefills * [BUDGET], speed, paces if self._kind == "policy" else []
        )

    def _dispatch(self) -> None:
        while self._queue:
            if self._sent_tokens and self._sent_tokens >= self._window.holding(self._queue[0].prompt):
                return
            tokens = self._queue[0].prompt + 1
            decode = two_choices(self._decodes[self._prefills :], tokens=tokens, rng=self._rng)
            if decode is None:
                return
            self._send(self._queue.popleft(), int(decode))

    def _send(self, request: Request, decode: int) -> None:
        now = self._clock.now
        asked = PrefillRequest(key=request.number * SPREAD % 2**64, tokens=request.prompt)
        snapshot = self._loads.snapshot(asked, now)
        assert snapshot is not None
        prefill = sticky(snapshot, asked)
        found = Placement("handover")
        if self._kind == "policy":
            found = self._place(request, asked, snapshot, prefill, decode)
        alone = request.prompt / float(snapshot.speed[prefill])
        if found.place == "decode":
            alone = request.prompt * pace(self._status[decode]).token_seconds
        request.due = request.arrived + patience(alone)
        self._outcome.places[found.place] += 1
        if found.place == "decode":
            self._submit(request, decode, decode)
        elif found.place == "prefill":
            self._submit(request, prefill, prefill)
        else:
            self._submit(request, prefill, decode, queued=self._loads.tokens_queued(prefill, now) > BUDGET)

    def _place(
        self,
        request: Request,
        asked: PrefillRequest,
        snapshot: PrefillSnapshot,
        prefill: int,
        decode: int,
    ) -> Placement:
        load, utilisation = self._decodes[prefill], self._loads.utilisation(prefill)
        first = prefill_offer(snapshot, asked, prefill, self._status[prefill], load, utilisation)
        waiting = self._loads.tokens_waiting(decode, self._clock.now)
        offer = decode_offer(self._status[decode], self._decodes[decode], waiting, cached=0)
        return place(request.prompt, request.answer, first, [offer])

    def _submit(self, request: Request, computes: int, decodes: int, *, queued: bool = False) -> None:
        """`queued`: the decode worker gets the request when its prefill starts."""
        work = PrefillWork(request.prompt)
        self._loads.sent(computes, work, self._clock.now)
        self._sent_tokens += request.prompt
        request.first_token = partial(self._first_token, request, work, computes, decodes)
        request.ended = partial(self._ended, request, decodes)
        if computes != decodes:
            request.ends = partial(self._expect, request, decodes)
        if computes == decodes:
            self._decodes[decodes].sent(request.prompt + 1)
        elif queued:
            request.started = partial(self._reserve, request, decodes)
        else:
            self._reserve(request, decodes)
        self._workers[computes].prefill(request)

    def _expect(self, request: Request, decode: int, computed: float) -> None:
        self._workers[decode].arriving[request.number] = computed + HANDOVER_SECONDS[1]

    def _reserve(self, request: Request, decode: int) -> None:
        self._decodes[decode].sent(request.prompt + 1)
        self._workers[decode].reserve(request)

    def _first_token(self, request: Request, work: PrefillWork, computes: int, decodes: int) -> None:
        self._loads.ended(computes, work, computed=True, now=self._clock.now)
        self._sent_tokens -= request.prompt
        worker = self._workers[decodes]
        if computes == decodes:
            worker.decode(request)
        else:
            self._clock.after(self._rng.uniform(*HANDOVER_SECONDS), partial(worker.join, request))
        self._dispatch()

    def _ended(self, request: Request, decodes: int) -> None:
        self._decodes[decodes].ended(request.prompt + 1)
        self._dispatch()


def simulate(
    load: Load,
    kind: Kind,
    *,
    requests: int,
    workers: int = 2,
    routers: int = 1,
    seed: int = 1,
    seats: int = SEATS,
    target_steps: float = LONG,
) -> PlacementOutcome:
    """Serves requests that arrive at random times. The times depend on the seed only.

    `seats` and `target_steps`: of each worker, as `--max-num-seqs` and the gap target in fastest steps.

    Ends when every request is answered. Asserts that nothing is left at workers and in the views of routers.
    """
    clock, outcome, rng, arrived = Clock(), PlacementOutcome(), random.Random(seed), 0
    fleet = [
        Worker(str(row), clock, outcome, colocated=kind == "colocated", target_steps=target_steps)
        for row in range(workers)
    ]
    turns = [itertools.count(router * workers // routers) for router in range(routers)]
    views = [Router(fleet, seats, kind, clock, random.Random(seed), outcome) for _ in range(routers)]

    def arrive(number: int) -> None:
        nonlocal arrived
        arrived += 1
        outcome.measures = arrived > WARM_UP * requests
        request = Request(number, load.prompt, load.answer, clock.now, outcome.measures, load.prompt)
        router = rng.randrange(routers)
        if kind != "colocated":
            views[router].add(request)
            return
        worker = fleet[next(turns[router]) % workers]
        request.first_token = partial(worker.decode, request)
        worker.prefill(request)

    def report(row: int) -> None:
        status = fleet[row].status()
        for view in views:
            view.reported(row, status)
        if arrived < requests or not all(worker.idle for worker in fleet):
            clock.after(STATUS_INTERVAL, partial(report, row))

    arrival = 0.0
    for number in range(requests):
        arrival += rng.expovariate(load.rate * workers / 2)
        clock.after(arrival, partial(arrive, number))
    for row in range(workers):
        clock.after(0.0, partial(report, row))
    clock.run()
    assert all(worker.idle for worker in fleet), "requests left at workers"
    assert all(view.idle for view in views), "requests left in the view of a router"
    return outcome
