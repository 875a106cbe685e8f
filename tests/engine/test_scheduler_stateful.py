"""The scheduler under random operations: its accounts are right after each of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton.content import CHUNK_TOKENS
from baton.engine.api.request import EngineRequest
from baton.engine.api.sampling_params import SamplingParams
from baton.engine.core.drafters import PromptLookup
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.prefix_exchange import MissingPrefix
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.speculation import Speculation
from baton.engine.core.state_copies import StateCopies
from baton.engine.core.step_builder import Schedule, build_step
from baton.engine.step import Step
from tests.engine.scheduling import make

T = TypeVar("T")
DRAFTS = 2
SLOTS, COPIES = 6, 4


class Sevens(PromptLookup):
    """Guesses the token that each step samples."""

    def __init__(self) -> None:
        pass

    def propose(self, live: LiveRequest, drafts: Sequence[int], count: int) -> Sequence[int]:
        return [7] * count


def speculation(*, has_states: bool) -> Speculation:
    """Each request that decodes gets drafts."""
    made = Speculation(Sevens(), DRAFTS, [8, 16], has_states=has_states)
    made.costs.is_known = lambda rows: True
    made.costs.seconds = lambda rows: np.ones(2 - made.costs.index(rows))
    return made


@dataclass(eq=False)
class Flight:
    """A launched step."""

    plan: Schedule
    step: Step

    def blocks(self, block_size: int) -> set[int]:
        """That it writes."""
        return set((self.step.slots[self.step.slots >= 0] // block_size).tolist())

    @property
    def slots(self) -> set[int]:
        """Of states, that it reads or writes."""
        step = self.step
        used = [*step.state_slots, *step.restores.flat, *step.saves.flat, *(step.state_copies - 1)]
        return set(map(int, used)) - {-1}


@dataclass(eq=False)
class Import:
    missing: MissingPrefix
    blocks: Sequence[int]
    slot: int | None


which = st.integers(0, 7)
"""Of several."""


def pick(some: Sequence[T], which: int) -> T:
    return some[which % len(some)]


class SchedulerMachine(RuleBasedStateMachine):
    imports = Bundle("imports")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(1 << 20))
        self.rng = random.Random(0)
        self.flights: list[Flight] = []
        self.unverified: set[bytes] = set()  # parts with KV of other workers
        self.begun: dict[bytes, range] = {}  # of parts, the ranges that steps may compute
        self.waiting_for: set[bytes] = set()  # parts before whose range KV of other workers is to come
        self.importing: dict[bytes, Import] = {}
        self.pinned: set[bytes] = set()

    @initialize(
        states=st.booleans(), cache=st.booleans(), drafts=st.booleans(), scale=st.sampled_from([1, 8])
    )
    def begin(self, states: bool, cache: bool, drafts: bool, scale: int) -> None:
        """With a prefix cache, or with a slot for each request, or with both: more slots than seats, as some
        requests are held, and drafts take a second one. `scale`: of all sizes. Chunks of the larger blocks
        travel between caches."""
        self.block, self.scale = 4 * scale, scale
        options: dict[str, Any] = {}
        if states and cache:
            options["copies"] = StateCopies(SLOTS, COPIES, 2 * self.block, self.block, 2)
        self.scheduler = make(
            num_blocks=14,
            seqs=4,
            budget=9 * scale,
            prefix_cache=cache or not states,
            states=SLOTS if states else 0,
            block_size=self.block,
            speculation=speculation(has_states=states) if drafts else None,
            **options,
        )

    def request(self, length: int, family: int, priority: int = 0, alone: bool = False) -> EngineRequest:
        # Requests of one family share prefixes.
        prompt = [family * 1000 + i for i in range(length * self.scale)]
        sampling = SamplingParams(max_tokens=36)
        number = next(self.numbers)
        return EngineRequest(
            number.to_bytes(4), prompt, [], sampling, priority, alone, tenant=bytes([number % 3])
        )

    @rule(
        length=st.integers(1, 30),
        family=st.integers(0, 1),
        handover=st.booleans(),
        priority=st.integers(-1, 1),
        alone=st.booleans(),
    )
    def add(self, length: int, family: int, handover: bool, priority: int, alone: bool) -> None:
        request = self.request(length, family, priority, alone)
        self.scheduler.add(request, handover=handover)

    @rule(length=st.integers(1, 30), family=st.integers(0, 1))
    def reserve(self, length: int, family: int) -> None:
        request = self.request(length, family)
        tokens = len(request.prompt_ids)
        free, referenced = self.scheduler.pool.free, {*self.scheduler.pool._references}
        live = self.scheduler.reserve(request)
        if live is not None:
            assert len(live.blocks) * self.block >= tokens + 1
            assert live.num_cached <= tokens
            assert self.scheduler.pool.free == free - len({*live.blocks} - referenced)
        else:
            assert self.scheduler.pool.free == free

    @rule(length=st.integers(1, 30), family=st.integers(0, 1), alone=st.booleans())
    def start(self, length: int, family: int, alone: bool) -> None:
        request = self.request(length, family, alone=alone)
        live = self.scheduler.start(request)
        if live is not None:
            assert len(live.blocks) * self.block >= len(request.prompt_ids)
            assert (live.phase, live.num_left > 0) == (Phase.RUNNING, True)
        else:
            assert request.id not in self.scheduler.requests

    def some(self, phase: Phase, *, is_part: bool) -> list[LiveRequest]:
        """The requests of a phase: those that compute a part of a shared prompt, or the others."""
        found = self.scheduler.requests.values()
        return [live for live in found if live.phase is phase and (live.id in self.unverified) is is_part]

    @precondition(lambda self: self.some(Phase.HELD, is_part=False))
    @rule(which=which)
    def resume(self, which: int) -> None:
        live = pick(self.some(Phase.HELD, is_part=False), which)
        blocks, resumed_id = list(live.blocks), b"resumed" + live.id
        if self.scheduler.resume(live, resumed_id):
            assert self.scheduler.requests[resumed_id] is live
            assert (list(live.blocks), live.num_left) == (blocks, 1)

    @precondition(lambda self: self.some(Phase.RESERVED, is_part=False))
    @rule(which=which, more=st.integers(0, 9))
    def extend(self, which: int, more: int) -> None:
        live = pick(self.some(Phase.RESERVED, is_part=False), which)
        before = list(live.blocks), list(live.token_ids)
        output = [7] * (len(live.token_ids) - len(live.request.prompt_ids) + more)
        if self.scheduler.extend_reservation(live, output):
            assert list(live.blocks[: len(before[0])]) == before[0]
            assert len(live.blocks) * self.block >= len(live.token_ids) + 1
        else:
            assert (list(live.blocks), list(live.token_ids)) == before

    @precondition(lambda self: self.some(Phase.RESERVED, is_part=False))
    @rule(which=which)
    def join(self, which: int) -> None:
        live = pick(self.some(Phase.RESERVED, is_part=False), which)
        self.scheduler.join(live)
        live.token_ids.append(7)

    @precondition(lambda self: self.scheduler.requests)
    @rule(which=which)
    def end(self, which: int) -> None:
        self.scheduler.drop(pick(list(self.scheduler.requests.values()), which))

    @rule(cuts=st.lists(st.integers(0, 30), min_size=2, max_size=4, unique=True), family=st.integers(0, 1))
    def start_part(self, cuts: list[int], family: int) -> None:
        """Of a shared prompt: it computes every second range, and the last one."""
        cuts = sorted(cuts)[len(cuts) % 2 :]
        request = self.request(cuts[-1], family)
        stops = [self.scale * cut for cut in cuts]
        ranges = list(starmap(range, zip(stops[::2], stops[1::2], strict=True)))
        free = self.scheduler.pool.free
        live = self.scheduler.start_part(request, ranges)
        if live is None:
            assert self.scheduler.pool.free == free
            return
        assert len(live.blocks) * self.block >= len(request.prompt_ids)
        if self.scheduler.states is not None:
            assert live.num_cached < ranges[0].stop, "other workers need the states there"
        assert live.num_left == sum(map(len, live.ranges)) > 0
        self.unverified.add(live.id)

    @precondition(lambda self: self.some(Phase.RESERVED, is_part=True))
    @rule(which=which, waits=st.booleans())
    def begin_range(self, which: int, waits: bool) -> None:
        live = pick(self.some(Phase.RESERVED, is_part=True), which)
        first = self.begun[live.id] = live.ranges[0]
        (self.waiting_for.add if waits else self.waiting_for.discard)(live.id)
        self.scheduler.begin_range(live, lambda: live.id in self.waiting_for)
        assert (live.phase, live.num_computed) == (Phase.RUNNING, first.start)

    @precondition(lambda self: self.waiting_for)
    @rule()
    def kv_comes(self) -> None:
        self.waiting_for.remove(min(self.waiting_for))

    @precondition(lambda self: self.some(Phase.HELD, is_part=True))
    @rule(which=which)
    def verify(self, which: int) -> None:
        """As `Engine.verified`."""
        live = pick(self.some(Phase.HELD, is_part=True), which)
        live.unverified = False
        self.unverified.remove(live.id)
        self.scheduler.memory.publish(live, live.num_computed)

    @rule(target=imports, length=st.integers(8, 50), family=st.integers(0, 1), most=st.integers(1, 4))
    def start_import(self, length: int, family: int, most: int) -> bytes:
        """KV, and states, of another worker or a store, which are written beside the steps under way."""
        exchange, import_id = self.scheduler.store_exchange, next(self.numbers).to_bytes(4)
        if exchange is None:
            return import_id
        free = self.scheduler.pool.free
        missing = exchange.missing(self.request(length, family), most, remnant=bool(length % 2))
        assert self.scheduler.pool.free == free, "it takes no block"
        blocks = None if missing is None else exchange.start_import(import_id, missing)
        if missing is None or blocks is None:
            assert self.scheduler.pool.free == free
            return import_id
        first = missing.first_chunk * CHUNK_TOKENS // self.block
        assert len(blocks) * self.block >= (missing.first_chunk + len(missing.chunks)) * CHUNK_TOKENS
        self.importing[import_id] = Import(missing, blocks[first:], exchange.state_slot(import_id))
        return import_id

    @rule(import_id=consumes(imports), chunks=st.integers(0, 4))
    def end_import(self, import_id: bytes, chunks: int) -> None:
        """With so many of its chunks."""
        exchange = self.scheduler.store_exchange
        if (ended := self.importing.pop(import_id, None)) is not None and exchange is not None:
            come = min(chunks, len(ended.missing.chunks))
            if ended.slot is not None and come < len(ended.missing.chunks):
                come = 0  # the states are those after the last chunk
            exchange.end_import(import_id, come and (ended.missing.first_chunk + come) * CHUNK_TOKENS)

    @rule(target=pins, length=st.integers(8, 30), family=st.integers(0, 1))
    def pin(self, length: int, family: int) -> bytes:
        """Another worker reads what the cache has."""
        pin_id, scheduler = next(self.numbers).to_bytes(4), self.scheduler
        if scheduler.prefix_exchange is None or scheduler.cache is None:
            return pin_id
        request = self.request(length, family)
        names = scheduler.cache.names(request)
        names.extend(request.prompt_ids, len(request.prompt_ids))
        if scheduler.prefix_exchange.pin(pin_id, names.chunks, 0)[0]:
            self.pinned.add(pin_id)
        return pin_id

    @rule(pin_id=consumes(pins))
    def unpin(self, pin_id: bytes) -> None:
        if pin_id in self.pinned:
            self.pinned.remove(pin_id)
            assert self.scheduler.prefix_exchange is not None
            self.scheduler.prefix_exchange.unpin(pin_id)

    @precondition(lambda self: not self.flights or (len(self.flights) == 1 and self.scheduler.may_look_ahead))
    @rule(chunk_limit=st.none() | st.integers(1, 9))
    def launch(self, chunk_limit: int | None) -> None:
        scheduler = self.scheduler
        had_work = scheduler.has_next
        handovers = {live.id: list(live.blocks) for live in scheduler.running if live.handover}
        computed = {live.id: live.num_computed for live in scheduler.requests.values()}
        plan = scheduler.schedule(chunk_limit)
        assert bool(plan.chunks or plan.preempted) == had_work
        assert sum(map(len, plan.chunks.values())) <= scheduler.max_num_batched_tokens
        assert len(plan.chunks) == 1 or not any(live.alone for live in plan.chunks)
        for live, chunk in plan.chunks.items():
            assert live.phase is Phase.RUNNING
            assert chunk.start == live.num_computed < chunk.stop <= len(live.token_ids)
            assert len(live.blocks) * self.block >= chunk.stop, "a token without a slot"
            if live in plan.started:
                assert live.num_cached % self.block == 0
                assert live.num_cached < len(live.token_ids), "the last position must be computed"
                assert len(live.blocks) * self.block >= len(live.token_ids)
            else:
                assert chunk.start == computed[live.id]
        for request_id, blocks in handovers.items():
            live = scheduler.requests[request_id]
            assert (live.phase, list(live.blocks)) == (Phase.RUNNING, blocks), "a prefill was preempted"
        for live in plan.preempted:
            if live.hand_back:
                assert live.id not in scheduler.requests
            else:
                assert (live.phase, list(live.blocks), live.num_computed) == (Phase.WAITING, [], 0)
        awaiting = [live for live in plan.prompts if live.awaits_kv]
        assert len(awaiting) <= 1, "the workers of one plan may end another"
        assert not awaiting or not plan.decodes, "a decode waits for another worker"
        assert not awaiting or all(live.ranges for live in scheduler.reserved), "so would one that joins"
        if not plan.chunks:
            return
        for live, chunk in plan.prompts.items():
            if live.handover and (begun := self.begun.get(live.id)) is not None:
                assert begun.start <= chunk.start < chunk.stop <= begun.stop, "not its positions"
        memory = scheduler.memory
        step = build_step(
            plan,
            1 << 12,
            block_size=self.block,
            table_width=None,
            has_states=scheduler.states is not None,
            restores=memory.take_restores(plan.chunks),
            saves=memory.saves(plan.chunks),
            ahead=1 if scheduler.speculation is None or scheduler.states is not None else 1 + DRAFTS,
        )
        scheduler.launched(plan)
        for live, row, count in plan.requests():
            live.promise(row, count)
        self.flights.append(Flight(plan, step))

    @precondition(lambda self: self.flights)
    @rule(right=st.integers(0, DRAFTS))
    def land(self, right: int) -> None:
        """As the engine's loop does, with at most `right` drafts of each request that are right."""
        scheduler, plan = self.scheduler, self.flights.pop(0).plan
        scheduler.landed(plan.chunks)
        for live, _, count in plan.requests():
            live.slack -= count
            if live.phase is Phase.GONE:
                continue
            accepted = min(right, count)
            verified = plan.verified(live, accepted)
            for draft in range(accepted + 1):
                position = live.learn_after_draft(7) if draft else live.learn(7)
                if not live.unverified:
                    scheduler.memory.publish(live, min(position, verified))
                if live.handover:
                    scheduler.hold(live)
                elif position + 1 >= live.longest:
                    scheduler.drop(live)
                if live.phase is not Phase.RUNNING:
                    break
            scheduler.memory.choose_states(live, newest=verified > live.num_computed)
            live.num_computed = min(live.num_computed, verified)

    @invariant()
    def accounts_are_right(self) -> None:
        scheduler = self.scheduler
        scheduler.pool.assert_consistent()
        seated = [live for live in scheduler.running if not live.ends_with_pending]
        assert len(seated) + len(scheduler.reserved) <= scheduler.max_num_seqs
        assert scheduler.running == sorted(scheduler.running, key=lambda r: r.order)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda r: r.order)
        everyone = [*scheduler.waiting, *scheduler.running, *scheduler.held, *scheduler.reserved]
        assert {id(live) for live in everyone} == {id(live) for live in scheduler.requests.values()}
        assert len(everyone) == len(scheduler.requests)
        everyone += scheduler.leaving
        in_use = {block for live in everyone for block in live.blocks}
        if (exchange := scheduler.store_exchange) is not None:
            in_use.update(*exchange._pins.values())
            assert exchange._imports.keys() == self.importing.keys()
        for each in self.importing.values():
            assert in_use.isdisjoint(each.blocks), "KV from elsewhere is written there"
            in_use.update(each.missing.hits)
        in_use.update(*(each.blocks for each in self.importing.values()))
        assert scheduler.pool.free == scheduler.pool.num_blocks - len(in_use)
        assert not any(live.blocks for live in scheduler.waiting)
        for live in everyone:
            if live.id in self.unverified:
                assert live.num_published <= live.num_cached // self.block, "KV that may be wrong is shared"
        if scheduler.states is not None:
            self.slots_are_right(scheduler, everyone)
        self.steps_own_what_they_use(scheduler)

    def slots_are_right(self, scheduler: Scheduler, everyone: list[LiveRequest]) -> None:
        assert scheduler.states is not None
        slots = [live.state_slot for live in everyone if live.blocks]
        slots += [live.kept_slot for live in everyone if live.kept_slot is not None]
        assert sorted([*slots, *scheduler.states._free]) == list(range(SLOTS)), (
            "a slot has two owners, or none"
        )
        if scheduler.cache is None or (copies := scheduler.cache.copies) is None:
            return
        owned = [*copies._free, *copies._slot_of.values(), *({*copies._lent} - {*copies._slot_of.values()})]
        owned += [slot for live in everyone for _, slot in live.state_copies]
        owned += [each.slot for each in self.importing.values() if each.slot is not None]
        assert sorted(owned) == list(range(SLOTS, SLOTS + COPIES)), "a copy has two owners, or none"
        assert {*copies._lent}.isdisjoint(copies._free)

    def steps_own_what_they_use(self, scheduler: Scheduler) -> None:
        """What launched steps use belongs to no import and no reservation: these are written at once."""
        blocks = set[int]().union(*(flight.blocks(self.block) for flight in self.flights))
        assert blocks.isdisjoint(scheduler.pool._free)
        slots = set[int]().union(*(flight.slots for flight in self.flights))
        for each in self.importing.values():
            assert blocks.isdisjoint(each.blocks)
            assert each.slot not in slots
        for live in scheduler.reserved:
            if not live.handover:
                assert blocks.isdisjoint(live.blocks[live.num_cached // self.block :])
                assert scheduler.states is None or live.state_slot not in slots

    def teardown(self) -> None:
        for live in list(self.scheduler.requests.values()):
            self.scheduler.drop(live)
        for flight in self.flights:
            self.scheduler.landed(flight.plan.chunks)
        for import_id in self.importing:
            assert self.scheduler.store_exchange is not None
            self.scheduler.store_exchange.end_import(import_id, 0)
        for pin_id in self.pinned:
            assert self.scheduler.prefix_exchange is not None
            self.scheduler.prefix_exchange.unpin(pin_id)
        self.scheduler.assert_whole()


TestAccounts = SchedulerMachine.TestCase
TestAccounts.settings = settings(max_examples=80, stateful_step_count=50)
