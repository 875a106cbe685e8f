"""The desk of a router: what it knows of all workers, the prefill window, and the plans.

    events of workers and requests ──▶ tables ──▶ window ──▶ admission queue
                                          └─────▶ plan

It does no I/O, and its clock is given. The router tells it the events of its streams, and the simulator those
of simulated workers. A record of the events gives the same plans again (`recording`).

An attached worker has one row in all tables, and gets the new work of at most one pool. So a worker that
moves to the other pool keeps its prefix cache, its load and its open work in the tables.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from baton.kv_names import CHUNK_TOKENS
from baton.router.policy import placement, regime
from baton.router.policy.answers import AnswerLengths
from baton.router.policy.decode import DecodeLoad, DecodePool, FreeCapacity
from baton.router.policy.fleet import Fleet, Seen
from baton.router.policy.placement import PrefillWindow
from baton.router.policy.plan import Plan
from baton.router.policy.planner import NOTHING, Held, Lack, plan
from baton.router.policy.prefill import PREFILL_POLICIES, PrefillRequest
from baton.router.policy.prefill_loads import PrefillLoads, PrefillWork
from baton.router.policy.settings import DEFAULT_SETTINGS, PlanSettings
from baton.rpc import LONGEST_REPORT
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import LARGE

WINDOW_SECONDS = LONGEST_REPORT
"""How often the prefill window and the regime are updated: as often as workers report. No simulated row
changes by 3 % with 0.25 or 4 s."""

Listener = Callable[[float, str, Sequence[Any]], None]
"""Takes the time, the name and the arguments of an event."""


class Desk(Fleet):
    """Owned by one router, or a simulated one.

    Attributes:
        answers: how long answers will be.
        listener: is told each event and each plan. None: nothing listens.
        seed: as given.
    """

    def __init__(
        self, clock: Callable[[], float], settings: PlanSettings = DEFAULT_SETTINGS, *, seed: int
    ) -> None:
        """`clock`: seconds that never go back. `seed`: of all that is drawn."""
        super().__init__(
            settings=settings,
            now=clock(),
            rng=random.Random(seed),
            named={},
            workers={},
            attached_rows=0,
            prefills=DecodePool(),
            decodes=DecodePool(),
            loads=PrefillLoads(),
            policy=PREFILL_POLICIES[settings.routing_policy],
        )
        self.seed = seed
        self.answers = AnswerLengths()
        self.listener: Listener | None = None
        self._clock = clock
        self._open: dict[bytes, tuple[int, PrefillWork]] = {}  # prompts without a first token, by attempt
        self._window = PrefillWindow()
        self._window_until = -math.inf
        self._window_pools = False, False  # which pools had a worker then

    def _event(self, name: str, *arguments: Any) -> None:
        self.now = self._clock()
        if self.listener is not None:
            self.listener(self.now, name, arguments)

    # ------------------------------------------------------------ workers

    def join(self, worker: Seen) -> None:
        """Adds a worker, which gets no work yet, and applies its report. Sets its row."""
        self._event("join", worker.address, worker.description, worker.status)
        block_size = worker.description.block_size
        row = self.loads.join(worker.address, block_size=block_size, now=self.now, serving=False)
        worker.row, worker.load = row, DecodeLoad.of(row, worker.address, worker.description)
        self.workers[row] = self.named[worker.address] = worker
        self.attached_rows |= 1 << row
        self._reported(worker)

    def leave(self, row: int) -> None:
        """Its open attempts are lost."""
        self._event("leave", row)
        for pool in (pb.POOL_PREFILL, pb.POOL_DECODE):
            self._serve(row, pool, False)
        self.loads.leave(row)
        self.links.leave(row)
        self._open = {attempt: work for attempt, work in self._open.items() if work[0] != row}
        worker = self.workers.pop(row)
        if self.named.get(worker.address) is worker:
            del self.named[worker.address]
        self.attached_rows ^= 1 << row

    def serve(self, row: int, pool: "pb.Pool", serves: bool) -> None:
        """`serves`: the worker gets the new work of this pool."""
        self._event("serve", row, pool, serves)
        self._serve(row, pool, serves)

    def _serve(self, row: int, pool: "pb.Pool", serves: bool) -> None:
        prefills, load = pool == pb.POOL_PREFILL, self.workers[row].load
        loads = self.prefills if prefills else self.decodes
        if serves is (load.pool is loads):
            return
        (loads.add if serves else loads.remove)(load)
        if prefills:
            self.loads.serve(row, serves)
        self.had_decode |= bool(self.decodes)

    def placed(self, row: int, ready: bool) -> None:
        """Whether the worker takes new work has changed, perhaps."""
        self._event("placed", row, ready)

    def described(self, row: int, description: pb.WorkerDescription) -> None:
        """The worker has other adapters or weights."""
        self._event("described", row, description)

    def shown(self, row: int, images: Iterable[bytes]) -> None:
        """The worker should keep the embeddings of these images."""
        self._event("shown", row, images)

    def reported(self, row: int) -> None:
        """Applies the status of the worker."""
        worker = self.workers[row]
        self._event("reported", row, worker.status)
        self._reported(worker)

    def _reported(self, worker: Seen) -> None:
        status = worker.status
        running = status.requests_running + status.reservations
        worker.load.reported(blocks_free=status.blocks_free, running=running)
        self.loads.reported(worker.row, status, self.now, alone=worker.pool == pb.POOL_PREFILL)
        self.links.reported(worker.row, status.kv_links, self.now)

    def cached(self, row: int, events: pb.CacheEvents) -> None:
        """The cache of the worker has changed."""
        self._event("cached", row, events)
        self.loads.index.apply(row, events)

    # ------------------------------------------------------------ attempts

    def sent(self, attempt: bytes, row: int, work: PrefillWork) -> None:
        """The worker got a prompt."""
        self._event("sent", attempt, row, work)
        self._open[attempt] = row, work
        self.loads.sent(row, work, self.now)
        self.workers[row].load.shared_prompts += work.shared

    def ended(self, attempt: bytes, *, computed: bool) -> None:
        """The first token came (`computed`), or the prompt is not computed any more."""
        self._event("ended", attempt, computed)
        row, work = self._open.pop(attempt)
        self.loads.ended(row, work, computed=computed, now=self.now)
        self.workers[row].load.shared_prompts -= work.shared

    def reserved(self, row: int, tokens: int) -> None:
        """The worker got a decode of so many positions. `released` undoes it."""
        self._event("reserved", row, tokens)
        self.workers[row].load.sent(tokens)

    def released(self, row: int, tokens: int, *, full: bool = False) -> None:
        """`full`: the worker refused it."""
        self._event("released", row, tokens, full)
        self.workers[row].load.ended(tokens, full=full)

    def promise(self, slots: int, positions: int) -> None:
        """Queued prompts need so much more room for their decodes. Negative: they have it, or need none."""
        self._event("promise", slots, positions)
        self.promised_slots += slots
        self.promised_positions += positions

    # ------------------------------------------------------------ plans

    def plan(self, request: PrefillRequest, held: Held) -> Plan | Lack:
        self.now = self._clock()
        planned = plan(request, held, self)
        if isinstance(planned, Plan) and planned.ranges:
            self._take_links(planned)
        if self.listener is not None:
            self.listener(self.now, "plan", (request, held, planned))
        return planned

    def returns(self, request: PrefillRequest, row: int, tokens: int) -> Plan | None:
        """The plan by which a request that decodes at this worker goes on at another one. None: it stays, as
        that costs no more. `tokens`: positions of its reservation, which counts at no worker here."""
        self._event("returns", request, row, tokens)
        load = self.workers[row].load
        load.ended(tokens, full=load.full)
        planned = plan(request, NOTHING, self)
        stays = placement.offer(self, request, row, request.tokens).decode_cost()
        load.sent(tokens)
        if isinstance(planned, Lack) or planned.decode in (None, row):
            return None
        if planned.costs.get(planned.place, math.inf) >= stays:  # without overflow no plan has such a cost
            return None
        self._take_links(planned)
        return planned

    def _take_links(self, planned: Plan) -> None:
        """The links of a plan carry its KV, and then that of later plans."""
        sends, source = planned.ranges[-1].worker, planned.source
        if planned.decode is not None and planned.decode != sends:
            arrival = self.now + planned.arrives if planned.arrives else 0.0
            sender = self.workers[sends].description
            self.links.planned(planned.decode, sender.incarnation, arrival, self.now)
        if source is not None:
            asker, holder = self.workers[planned.ranges[0].worker], self.workers[source.holder].description
            size = source.tokens * holder.kv_token_bytes
            arrival = self.links.arrival(asker.row, holder.incarnation, size, self.now)
            self.links.planned(asker.row, holder.incarnation, arrival, self.now)

    def uncached(self, chunks: Sequence[int], tokens: int) -> int:
        """Returns the tokens of a prompt that the worker with most of it in its caches would compute."""
        return tokens - self.loads.index.overlap(chunks, tokens, CHUNK_TOKENS, self.attached_rows).most

    def free_capacity(self) -> FreeCapacity:
        """Free capacity of all workers that decode. Infinite without such workers.

        Requests then leave the admission queue and wait for a worker instead, for a bounded time.
        """
        return self.decoders.free if self.decoders else FreeCapacity(math.inf, math.inf)

    def window(self) -> PrefillWindow:
        """Prompt tokens that keep all workers busy. More would only wait at the workers. Up to a second old.

        Infinite if no worker can prefill or none can decode, as for `free_capacity`.
        """
        if not self.decoders or not (self.prefills or self.settings.overflow):
            return PrefillWindow(math.inf)
        if self._clock() > self._window_until or self._pools != self._window_pools:
            self.renew_window()
        return self._window

    def renew_window(self) -> None:
        """Computes the window and the regime from what is known now."""
        self._event("renew_window")
        prefills, decodes = (
            [worker for worker in self.workers.values() if worker.ready_in(pool)]
            for pool in (pb.POOL_PREFILL, pb.POOL_DECODE)
        )
        self._window = replace(
            placement.prefill_window(
                [worker.description.max_num_batched_tokens for worker in prefills],
                self.loads.tokens_per_s(),
                [worker.status for worker in decodes] if self.settings.overflow else [],
            ),
            tokens_per_s=self._prompt_speed(prefills, decodes),
            others=self.loads.tokens_of_others(),
        )
        demand = self.loads.demand()
        self.apart = self.settings.overflow and regime.apart(prefills, decodes, demand, stands=self.apart)
        self._window_until = self.now + WINDOW_SECONDS
        self._window_pools = self._pools

    @property
    def _pools(self) -> tuple[bool, bool]:
        """Which pools have a worker."""
        return bool(self.prefills), bool(self.decodes)

    def _prompt_speed(self, prefills: Sequence[Seen], decodes: Sequence[Seen]) -> float:
        """Prompt tokens that all workers compute in a second. Workers without a large step count as the mean
        of the others. 0: no worker of the first pool had one."""
        total, pools = 0.0, [(decodes, pb.POOL_DECODE)]
        for workers, pool in pools if self.settings.decode_only else [(prefills, pb.POOL_PREFILL), *pools]:
            speeds = [speed for worker in workers if (speed := _shown_speed(worker, pool))]
            if workers and not speeds and not total:
                return 0.0
            if speeds and (pool == pb.POOL_PREFILL or self.settings.overflow):
                total += sum(speeds) / len(speeds) * len(workers)
        return total


def _shown_speed(worker: Seen, pool: "pb.Pool") -> float:
    """Prompt tokens/s of a worker, as a large step showed. 0: unknown."""
    model = worker.step_model
    if model is not None and model.tokens[-1] < min(LARGE, worker.description.max_num_batched_tokens // 2):
        return 0.0
    if pool == pb.POOL_PREFILL:
        return worker.status.prefill_tokens_per_s
    seconds = worker.status.long_chunk_seconds
    return worker.status.long_chunk_tokens / seconds if seconds else 0.0
