"""A router of simulated workers: plans each request as the real one does, and runs the plan."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Literal

from baton.kv_names import CHUNK_TOKENS, Tier
from baton.router.admission.fairness import FairQueue
from baton.router.policy import placement as policy
from baton.router.policy import regime
from baton.router.policy.answers import AnswerLengths
from baton.router.policy.decode import DecodeCaches, DecodeLoad, DecodePool
from baton.router.policy.fleet import Fleet
from baton.router.policy.plan import Plan
from baton.router.policy.planner import NOTHING, Lack, plan
from baton.router.policy.prefill import PrefillRequest, sticky
from baton.router.policy.prefill_loads import PrefillLoads, PrefillWork
from baton.rpc import worker_pb2 as pb
from baton.simulator.cache import KvMemory
from baton.simulator.clock import Clock
from baton.simulator.placement_outcome import PlacementOutcome
from baton.simulator.requests import Part, Request, SharedPrompt
from baton.simulator.step_worker import BLOCK, BUDGET, Worker
from baton.simulator.steps import LAYERS
from baton.steps.step_model import StepModel

HANDOVER_SECONDS = (1.2e-3, 2.5e-3)
"""Least and most time from the first token until a request can join a decode step."""
FETCH_SECONDS, FETCH_TOKEN_SECONDS = 6e-3, 0.5e-6
"""To fetch a prefix from another worker, and for each token of it: from GPU to GPU."""

Kind = Literal["policy", "split", "colocated"]
Pool = Literal["prefill", "decode"]


@dataclass(eq=False)
class SeenWorker:
    """What a router knows of a worker (`Seen`)."""

    row: int
    worker: InitVar[Worker]
    seats: InitVar[int]
    address: str = ""
    status: pb.WorkerStatus = field(default_factory=pb.WorkerStatus)
    ready: bool = True
    shown_images: Sequence[bytes] = ()

    def __post_init__(self, worker: Worker, seats: int) -> None:
        self.address = worker.name
        self.load = DecodeLoad(self.address, BLOCK, worker.blocks, seats, worker.blocks)
        link = pb.PrefixLink(wait=FETCH_SECONDS, tokens_per_s=1 / FETCH_TOKEN_SECONDS)
        self.prefix_links: dict[tuple[int, int], pb.PrefixLink] = {(0, Tier.DEVICE): link}
        self.step_model: StepModel | None = None
        self.description = pb.WorkerDescription(
            max_num_batched_tokens=BUDGET,
            attention_doubles_at=round(worker.machine.doubles_at),
            num_layers=LAYERS,
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
        ttft_target: seconds. None: as of a router without this option.
    """

    workers: list[Worker]
    seats: int
    kind: Kind
    splits: bool
    clock: Clock
    rng: random.Random
    outcome: PlacementOutcome
    ttft_target: float | None = None

    def __post_init__(self) -> None:
        self._prefills: set[int] = set()
        self._loads = PrefillLoads()
        self._caches = DecodeCaches(self._loads.index)
        self._decoders = DecodePool()
        self._views = {row: SeenWorker(row, worker, self.seats) for row, worker in enumerate(self.workers)}
        self._named = {worker.address: worker for worker in self._views.values()}
        self._answers = AnswerLengths()
        self._queue: FairQueue[None, Request] = FairQueue()
        self._sent_tokens = 0  # prompt tokens in the window: workers have them, without a first token
        self._window = policy.PrefillWindow()
        self._apart = False
        for row, worker in self._views.items():
            self._loads.join(worker.address, block_size=BLOCK, now=self.clock.now, serving=False)
            self._caches.join(row, worker.load)
            self._caches.serve(row, True)
            self._decoders.add(worker.load)

    def move(self, row: int, pool: Pool) -> None:
        """New work of the pool goes to this worker. What it has goes on to its end."""
        if pool == "prefill":
            self._prefills.add(row)
            self._decoders.remove(self._views[row].load)
        else:
            self._prefills.remove(row)
            self._decoders.add(self._views[row].load)
        self._loads.serve(row, pool == "prefill")
        self._caches.serve(row, pool == "decode")
        self._dispatch()

    @property
    def idle(self) -> bool:
        """Whether nothing is left in its view of the workers."""
        rows = range(len(self.workers))
        work = [self._loads.router_tokens(row) or self._views[row].load.router_requests for row in rows]
        return not (len(self._queue) or self._sent_tokens or any(work))

    def add(self, request: Request) -> None:
        rows = (1 << len(self.workers)) - 1
        cached = self._loads.index.overlap(request.prompt_names, request.prompt, CHUNK_TOKENS, rows).most
        request.ticket = self._queue.push(None, 0, request, tokens=request.prompt - cached)
        self._dispatch()

    def reported(self, row: int, status: pb.WorkerStatus) -> None:
        view = self._views[row]
        view.status, view.step_model = status, self.workers[row].step_model
        self._loads.reported(row, status, self.clock.now, alone=row in self._prefills)
        running = status.requests_running + status.reservations
        self._views[row].load.reported(blocks_free=status.blocks_free, running=running)
        if row == len(self.workers) - 1:
            self._update_window()
        self._dispatch()

    def cached(self, row: int, added: Sequence[int], evicted: Sequence[int]) -> None:
        """The cache of a worker has changed."""
        index = self._loads.index
        index.discard(row, evicted)
        index.add(row, added)
        for holder, chunks in index.sole_holders(evicted).items():
            self.workers[holder].kv.only_here(chunks)

    def _update_window(self) -> None:
        decodes = [view.status for row, view in self._views.items() if row not in self._prefills]
        speed = self._loads.tokens_per_s()
        budgets = len(self._prefills) * [BUDGET]
        self._window = policy.prefill_window(budgets, speed, decodes if self.kind == "policy" else [])
        of_prefill, of_decode = (
            [view for row, view in self._views.items() if (row in self._prefills) is prefills]
            for prefills in (True, False)
        )
        self._apart = regime.apart(of_prefill, of_decode, self._loads.demand())

    def _dispatch(self) -> None:
        while not (self._sent_tokens and self._sent_tokens >= self._window.tokens):
            request = self._queue.pop()
            if request is None:
                return
            planned = self._plan(request)
            if isinstance(planned, Lack):
                assert request.ticket is not None
                self._queue.put_back(None, 0, request, request.ticket)
                return
            request.due, request.gap_cost = request.arrived + planned.within, planned.gap_cost
            self.outcome.places[planned.place] += 1
            assert planned.decode is not None
            if planned.place == "split":
                self._share(request, planned, planned.decode)
            else:
                self._submit(request, planned, planned.ranges[-1].worker, planned.decode)

    def _plan(self, request: Request) -> Plan | Lack:
        fleet = Fleet(
            now=self.clock.now,
            rng=self.rng,
            named=self._named,
            workers=self._views,
            decodes=self._decoders,
            decoders=self._decoders,
            loads=self._loads,
            caches=self._caches,
            policy=sticky,
            ttft_target=self.ttft_target,
            overflow=self.kind == "policy",
            splits=self.kind == "policy" and self.splits,
            attached_rows=(1 << len(self.workers)) - 1,
            prefix_fetches=self.kind == "policy",
            apart=self._apart,
        )
        answer = self._answers.expected(request.answer_names, 0, request.max_answer)
        prefill_request = PrefillRequest(
            request.key, request.prompt, request.prompt_names, answer=answer, may_split=True
        )
        return plan(prefill_request, NOTHING, fleet)

    def _share(self, request: Request, planned: Plan, decode: int) -> None:
        ranges = [
            (self.workers[part.worker], range(part.start or planned.cached, part.stop))
            for part in planned.ranges
        ]
        shared, final = SharedPrompt(ranges, self.clock), planned.ranges[-1].worker
        for row in dict.fromkeys(part.worker for part in planned.ranges):
            part = Part(
                request.number, request.prompt, request.answer, request.arrived,
                measured=request.measured and row == final,
                key=request.key,
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
                self._submit(part, planned, row, decode)
            else:
                part.positions = request.prompt
                part.first_token = partial(self._part_computed, part, self._sent(part, planned, row), row)
                self.workers[row].prefill(part)

    def _part_computed(self, part: Request, work: PrefillWork, row: int) -> None:
        self.workers[row].release(part)
        self._computed(part, work, row)

    def _sent(self, request: Request, planned: Plan, computes: int) -> PrefillWork:
        work = planned.work(computes, request.prompt_names)
        self._loads.sent(computes, work, self.clock.now)
        request.in_window = self._window.counted(work.tokens)
        self._sent_tokens += request.in_window
        return work

    def _computed(self, request: Request, work: PrefillWork, computes: int) -> None:
        self._loads.ended(computes, work, computed=True, now=self.clock.now)
        self._sent_tokens -= request.in_window
        self._dispatch()

    def _submit(self, request: Request, planned: Plan, computes: int, decodes: int) -> None:
        work, worker = self._sent(request, planned, computes), self.workers[computes]
        request.first_token = partial(self._first_token, request, work, computes, decodes)
        request.ended = partial(self._ended, request, decodes)
        request.positions = request.prompt
        if computes == decodes:
            request.positions += request.answer
            self._views[decodes].load.sent(request.prompt + 1)
        else:
            request.ends = partial(self._expect, request, decodes)
            if planned.order == "prefill":
                request.started = partial(self._reserve, request, decodes)
            else:
                self._reserve(request, decodes)
        if planned.source is None:
            worker.prefill(request)
            return
        holder, names = self.workers[planned.source.holder.row], request.prompt_names
        cached, fetched = worker.usable(request), holder.usable(request)
        self.clock.after(
            FETCH_SECONDS + max(0, fetched - cached) * FETCH_TOKEN_SECONDS,
            partial(self._fetched, request, worker, holder.kv, names[: fetched // CHUNK_TOKENS]),
        )

    def _fetched(self, request: Request, worker: Worker, holder: KvMemory, names: Sequence[int]) -> None:
        worker.imported(names)
        holder.fetched(names)
        worker.prefill(request)

    def _expect(self, request: Request, decode: int, computed: float) -> None:
        self.workers[decode].arriving[request.number] = computed + HANDOVER_SECONDS[1]

    def _reserve(self, request: Request, decode: int) -> None:
        self._views[decode].load.sent(request.prompt + 1)
        self.workers[decode].reserve(request)

    def _first_token(self, request: Request, work: PrefillWork, computes: int, decodes: int) -> None:
        if computes == decodes:
            self.workers[decodes].decode(request)
        else:
            seconds = self.rng.uniform(*HANDOVER_SECONDS)
            self.clock.after(seconds, partial(self._handed_over, request, computes, decodes))
        self._computed(request, work, computes)

    def _handed_over(self, request: Request, computes: int, decodes: int) -> None:
        self.workers[decodes].join(request)
        self.workers[computes].release(request, handed_over=True)

    def _ended(self, request: Request, decodes: int) -> None:
        cut = request.answer == request.max_answer
        self._answers.ended(request.answer_names, request.answer, cut=cut)
        self._views[decodes].load.ended(request.prompt + 1)
        request.then()
        self._dispatch()
