"""The scheduler under random operations: its accounts are right after each of them."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.api.request import EngineRequest
from baton.engine.api.sampling_params import SamplingParams
from baton.engine.core.live_request import LiveRequest, Phase
from tests.engine.scheduling import BLOCK, make


class SchedulerMachine(RuleBasedStateMachine):
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(1 << 20))
        self.rng = random.Random(0)
        self.flights: list[dict[LiveRequest, range]] = []  # launched steps

    @initialize(states=st.booleans())
    def begin(self, states: bool) -> None:
        """With a prefix cache, or with a slot for each request: more of them than seats, as some are held."""
        self.scheduler = make(
            num_blocks=14, seqs=4, budget=9, prefix_cache=not states, states=5 if states else 0
        )

    def request(self, length: int, family: int, priority: int = 0, alone: bool = False) -> EngineRequest:
        prompt = [family * 1000 + i for i in range(length)]  # requests of one family share prefixes
        sampling = SamplingParams(max_tokens=9 * BLOCK)
        number = next(self.numbers)
        return EngineRequest(
            number.to_bytes(4), prompt, [], sampling, priority, alone, tenant=bytes([number % 3])
        )

    @rule(
        target=ids,
        length=st.integers(1, 30),
        family=st.integers(0, 1),
        handover=st.booleans(),
        priority=st.integers(-1, 1),
        alone=st.booleans(),
    )
    def add(self, length: int, family: int, handover: bool, priority: int, alone: bool) -> bytes:
        request = self.request(length, family, priority, alone)
        self.scheduler.add(request, handover=handover)
        return request.id

    @rule(target=ids, length=st.integers(1, 30), family=st.integers(0, 1))
    def reserve(self, length: int, family: int) -> bytes:
        request = self.request(length, family)
        free, referenced = self.scheduler.pool.free, {*self.scheduler.pool._references}
        live = self.scheduler.reserve(request)
        if live is not None:
            assert len(live.blocks) * BLOCK >= length + 1
            assert live.num_cached <= length
            assert self.scheduler.pool.free == free - len({*live.blocks} - referenced)
        else:
            assert self.scheduler.pool.free == free
        return request.id

    @rule(target=ids, length=st.integers(1, 30), family=st.integers(0, 1), alone=st.booleans())
    def start(self, length: int, family: int, alone: bool) -> bytes:
        request = self.request(length, family, alone=alone)
        live = self.scheduler.start(request)
        if live is not None:
            assert len(live.blocks) * BLOCK >= length
            assert (live.phase, live.num_left > 0) == (Phase.RUNNING, True)
        else:
            assert request.id not in self.scheduler.requests
        return request.id

    @rule(target=ids, request_id=ids)
    def resume(self, request_id: bytes) -> bytes:
        live = self.scheduler.requests.get(request_id)
        if live is None or live.phase is not Phase.HELD:
            return request_id
        blocks, resumed_id = list(live.blocks), b"resumed" + request_id
        if self.scheduler.resume(live, resumed_id):
            assert self.scheduler.requests[resumed_id] is live
            assert (list(live.blocks), live.num_left) == (blocks, 1)
            return resumed_id
        return request_id

    @rule(request_id=ids, more=st.integers(0, 9))
    def extend(self, request_id: bytes, more: int) -> None:
        live = self.scheduler.requests.get(request_id)
        if live is not None and live.phase is Phase.RESERVED:
            before = list(live.blocks), list(live.token_ids)
            output = [7] * (len(live.token_ids) - len(live.request.prompt_ids) + more)
            if self.scheduler.extend_reservation(live, output):
                assert list(live.blocks[: len(before[0])]) == before[0]
                assert len(live.blocks) * BLOCK >= len(live.token_ids) + 1
            else:
                assert (list(live.blocks), list(live.token_ids)) == before

    @rule(request_id=ids)
    def join(self, request_id: bytes) -> None:
        live = self.scheduler.requests.get(request_id)
        if live is not None and live.phase is Phase.RESERVED:
            self.scheduler.join(live)
            live.token_ids.append(7)

    @rule(request_id=ids)
    def end(self, request_id: bytes) -> None:
        live = self.scheduler.requests.get(request_id)
        if live is not None:
            self.scheduler.drop(live)

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
            assert len(live.blocks) * BLOCK >= chunk.stop, "a token without a slot"
            if live in plan.started:
                assert live.num_cached % BLOCK == 0
                assert live.num_cached < len(live.token_ids), "the last position must be computed"
                assert len(live.blocks) * BLOCK >= len(live.token_ids)
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
        scheduler.launched(plan)
        for live in plan.chunks:
            if live.num_left == 0:
                live.promise(0)
        self.flights.append(plan.chunks)

    @precondition(lambda self: self.flights)
    @rule()
    def land(self) -> None:
        scheduler, chunks = self.scheduler, self.flights.pop(0)
        scheduler.landed(chunks)
        for live, chunk in chunks.items():
            if live.phase is Phase.GONE or chunk.stop < live.num_known:
                continue
            live.learn(7)
            scheduler.memory.publish(live, chunk.stop)
            live.alone = False
            if live.handover:
                scheduler.hold(live)
            elif live.num_known >= live.longest:
                scheduler.drop(live)

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
        assert scheduler.pool.free == scheduler.pool.num_blocks - len(in_use)
        assert not any(live.blocks for live in scheduler.waiting)
        if scheduler.states is not None:
            slots = [live.state_slot for live in everyone if live.blocks]
            assert len({*slots}) == len(slots), "a slot has two owners"
            assert scheduler.states.free == scheduler.states.num_slots - len(slots)

    def teardown(self) -> None:
        for live in list(self.scheduler.requests.values()):
            self.scheduler.drop(live)
        for chunks in self.flights:
            self.scheduler.landed(chunks)
        self.scheduler.assert_whole()


TestAccounts = SchedulerMachine.TestCase
TestAccounts.settings = settings(max_examples=80, stateful_step_count=50)
