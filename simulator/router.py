"""A router of simulated workers: plans each request as the real one does, and runs the plan."""

import random
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Literal

from baton.kv_names import CHUNK_TOKENS, Tier
from baton.router.admission.keys import ANY_CLIENT, Account
from baton.router.admission.queue import Admission, Turn, TurnResult
from baton.router.policy.desk import Desk
from baton.router.policy.fleet import Seen
from baton.router.policy.plan import Plan
from baton.router.policy.planner import NOTHING, Lack
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.settings import PlanSettings
from baton.rpc import worker_pb2 as pb
from baton.simulator.cache import KvMemory
from baton.simulator.clock import Clock
from baton.simulator.placement_outcome import PlacementOutcome
from baton.simulator.requests import Part, Request, SharedPrompt
from baton.simulator.step_worker import BLOCK, BUDGET, Worker
from baton.simulator.steps import KV_TOKEN_BYTES

HANDOVER_SECONDS = (1.2e-3, 2.5e-3)
"""Least and most time from the first token until a request can join a decode step."""
FETCH_SECONDS, FETCH_TOKEN_SECONDS = 6e-3, 0.5e-6
"""To fetch a prefix from another worker, and for each token of it: from GPU to GPU."""

Pool = Literal["prefill", "decode"]


ALL_LINKS = 0
"""Incarnation of all workers if their links are equal. Others have their rows, from 1 on."""


def _links(worker: Worker) -> dict[tuple[int, int], pb.PrefixLink]:
    if worker.links is not None:
        return {(row + 1, Tier.DEVICE): link for row, link in worker.links.items()}
    wait = worker.fetch_wait.value or FETCH_SECONDS
    return {(ALL_LINKS, Tier.DEVICE): pb.PrefixLink(wait=wait, tokens_per_s=1 / FETCH_TOKEN_SECONDS)}


def _seen(worker: Worker, seats: int) -> Seen:
    description = pb.WorkerDescription(
        block_size=BLOCK,
        num_blocks=worker.blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=BUDGET,
        attention_doubles_at=round(worker.machine.doubles_at),
        num_layers=worker.machine.layers,
        kv_token_bytes=KV_TOKEN_BYTES,
        exchanges_prefixes=True,
    )
    return Seen(
        worker.name,
        description=description,
        status=worker.status(),
        step_model=worker.step_model,
        prefix_links=_links(worker),
    )


@dataclass(eq=False)
class Router:
    """Sees its own requests at once, and those of other routers in reports.

    Attributes:
        workers: each is in no pool at first (`move`).
        seats: requests that a worker decodes at once.
        given: plans by the number of the request, in place of its own.
    """

    workers: list[Worker]
    seats: int
    clock: Clock
    seed: InitVar[int]
    outcome: PlacementOutcome
    settings: PlanSettings
    given: Mapping[int, Plan]

    def __post_init__(self, seed: int) -> None:
        def now() -> float:
            return self.clock.now

        self.rng = random.Random(seed)
        self.desk = Desk(now, self.settings, seed=seed)
        self.admission = Admission(sys.maxsize, self.desk.window, self.desk.free_capacity, clock=now)
        self._account = Account(ANY_CLIENT, clock=now)
        self._views = [_seen(worker, self.seats) for worker in self.workers]
        for view in self._views:
            self.desk.join(view)

    def move(self, row: int, pool: Pool | None) -> None:
        """New work of the pool goes to this worker. What it has goes on to its end."""
        view = self._views[row]
        if view.pool:
            self.desk.serve(row, view.pool, False)
        view.retired = pool is None
        if pool is not None:
            view.pool = pb.POOL_PREFILL if pool == "prefill" else pb.POOL_DECODE
            self.desk.serve(row, view.pool, True)
        self.admission.dispatch()

    @property
    def idle(self) -> bool:
        """Whether nothing is left in its view of the workers."""
        loads, admission = self.desk.loads, self.admission
        work = [loads.router_tokens(view.row) or view.load.router_requests for view in self._views]
        return not (len(admission.queue) or admission.uncached_tokens or admission.running or any(work))

    def add(self, request: Request) -> None:
        self.admission.reserve(self._account, request.prompt)
        turn = Turn(self.admission, self._account, 0, request.prompt)
        turn.computes(self.desk.uncached(request.prompt_names, request.prompt))
        turn.wait(partial(self._start, request, turn))

    def reported(self, row: int, status: pb.WorkerStatus) -> None:
        view = self._views[row]
        view.status, view.step_model = status, self.workers[row].step_model
        view.prefix_links = _links(self.workers[row])
        view.description.incarnation = ALL_LINKS if self.workers[row].links is None else row + 1
        self.desk.reported(row)
        self.admission.dispatch()

    def cached(self, row: int, added: Sequence[int], evicted: Sequence[int]) -> None:
        """The cache of a worker has changed."""
        index = self.desk.loads.index
        index.discard(row, evicted)
        index.add(row, added)
        for holder, chunks in index.sole_holders(evicted).items():
            self.workers[holder].kv.only_here(chunks)

    def _start(self, request: Request, turn: Turn) -> TurnResult:
        answer = self.desk.answers.expected(request.answer_names, 0, request.max_answer)
        planned = self.desk.plan(
            PrefillRequest(
                request.key,
                request.prompt,
                request.prompt_names,
                arrival=request.number,
                answer=answer,
                one_token=request.answer == 1,
                may_split=True,
            ),
            NOTHING,
        )
        if isinstance(planned, Lack):
            return TurnResult.NO_CAPACITY
        planned = self.given.get(request.number, planned)
        request.due, request.gap_cost = request.arrived + planned.within, planned.gap_cost
        self.outcome.places[planned.place] += 1
        if planned.place == "split":
            self._share(request, planned, turn)
        else:
            self._submit(request, planned, turn, planned.ranges[-1].worker)
        turn.computes(request.prompt - planned.cached)
        return TurnResult.SENT

    def _share(self, request: Request, planned: Plan, turn: Turn) -> None:
        ranges = [
            (self.workers[part.worker].wake, range(part.start or planned.cached, part.stop))
            for part in planned.ranges
        ]
        final = planned.ranges[-1].worker
        shared = SharedPrompt(ranges, self.workers[final].machine.layers, self.clock)
        for row in dict.fromkeys(part.worker for part in planned.ranges):
            part = Part(
                request.number, request.prompt, request.answer, request.arrived,
                measured=request.measured and row == final,
                key=request.key,
                router=request.router,
                names=request.names,
                first=request.first,
                max_answer=request.max_answer,
                cached=planned.cached,
                due=request.due,
                gap_cost=request.gap_cost,
                then=request.then,
                prompt_of=shared,
                range_numbers=deque(i for i, each in enumerate(planned.ranges) if each.worker == row),
            )  # fmt: skip
            if row == final:
                self._submit(part, planned, turn, row)
            else:
                part.positions = request.prompt
                part.first_token = partial(self._part_computed, part, self._sent(part, planned, row), row)
                self.workers[row].prefill(part)

    def _part_computed(self, part: Request, attempt: bytes, row: int) -> None:
        self.workers[row].release(part)
        self.desk.ended(attempt, computed=True)

    def _sent(self, request: Request, planned: Plan, computes: int) -> bytes:
        """Returns the name of the attempt."""
        attempt = b"%d %d" % (request.number, computes)
        self.desk.sent(attempt, computes, planned.work(computes, request.prompt_names))
        return attempt

    def _submit(self, request: Request, planned: Plan, turn: Turn, computes: int) -> None:
        attempt, worker, decodes = (
            self._sent(request, planned, computes),
            self.workers[computes],
            planned.decode,
        )
        request.first_token = partial(self._first_token, request, turn, attempt, computes, decodes)
        request.positions = request.prompt
        if decodes is not None:
            request.ended = partial(self._ended, request, turn, decodes)
        if decodes is not None and computes == decodes:
            request.positions += request.answer
            self.desk.reserved(decodes, request.prompt + 1)
        elif decodes is not None:
            request.ends = partial(self._expect, request, computes, decodes)
            request.started = partial(self._started, request, decodes, reserves=planned.order == "prefill")
            if planned.order != "prefill":
                self._reserve(request, decodes)
        if planned.source is None:
            worker.prefill(request)
            return
        holder, names = self.workers[planned.source.holder], request.prompt_names
        cached, fetched = worker.usable(request), holder.usable(request)
        wait = FETCH_SECONDS + worker.fetch_delay(holder)
        worker.fetch_wait.add(wait)
        self.clock.after(
            wait + max(0, fetched - cached) * FETCH_TOKEN_SECONDS,
            partial(self._fetched, request, worker, holder.kv, names[: fetched // CHUNK_TOKENS]),
        )

    def _fetched(self, request: Request, worker: Worker, holder: KvMemory, names: Sequence[int]) -> None:
        worker.imported(names)
        holder.fetched(names)
        worker.prefill(request)

    def _started(self, request: Request, decode: int, *, reserves: bool) -> None:
        request.began = self.clock.now
        if reserves:
            self._reserve(request, decode)

    def _expect(self, request: Request, prefill: int, decode: int, computed: float) -> None:
        """Its KV goes over the link while the prompt is computed, behind what was sent before."""
        sender, receiver = self.workers[prefill], self.workers[decode]
        tokens = request.prompt - receiver.usable(request)
        begins = max(request.began, sender.sends_until, receiver.receives_until)
        ends = begins + tokens / min(sender.machine.link, receiver.machine.link)
        sender.sends_until = receiver.receives_until = ends
        request.comes = max(computed, ends)
        receiver.arriving[request.number] = request.comes + HANDOVER_SECONDS[1]

    def _reserve(self, request: Request, decode: int) -> None:
        self.desk.reserved(decode, request.prompt + 1)
        self.workers[decode].reserve(request)

    def _first_token(
        self, request: Request, turn: Turn, attempt: bytes, computes: int, decodes: int | None
    ) -> None:
        if decodes is None:
            self.workers[computes].release(request)
            if request.measured:
                self.outcome.answers.append(request.answered(self.clock.now))
        elif computes == decodes:
            self.workers[decodes].decode(request)
        else:
            seconds = self.rng.uniform(*HANDOVER_SECONDS)
            self.clock.after(
                max(0.0, request.comes - self.clock.now) + seconds,
                partial(self._handed_over, request, computes, decodes),
            )
        self.desk.ended(attempt, computed=True)
        turn.generated()
        if decodes is None:
            request.then()
            turn.end()

    def _handed_over(self, request: Request, computes: int, decodes: int) -> None:
        self.workers[decodes].join(request)
        self.workers[computes].release(request, handed_over=True)

    def _ended(self, request: Request, turn: Turn, decodes: int) -> None:
        cut = request.answer == request.max_answer
        self.desk.answers.ended(request.answer_names, request.answer, cut=cut)
        self.desk.released(decodes, request.prompt + 1)
        request.then()
        turn.end()
