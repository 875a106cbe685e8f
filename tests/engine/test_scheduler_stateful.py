"""The scheduler under random operations: its accounts are right after each of them."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import numpy as np
import pytest

from baton.engine.api.request import EngineRequest
from baton.engine.api.sampling_params import SamplingParams
from baton.engine.core import state_copies
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.prefix_exchange import Import, Pin
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.speculation import PromptLookup, Speculation
from baton.engine.core.state_copies import StateCopies
from baton.engine.core.step_builder import Schedule, build_step
from baton.engine.step import Step
from baton.kv_names import CHUNK_TOKENS
from baton.kv_names.cache_kinds import Window
from tests.engine.scheduling import make

DRAFTS = 2
SLOTS, COPIES = 6, 2
SEEDS, OPERATIONS = 10, 200
FIRST_TOKEN = 1000
"""Of the prompts of the first family."""


class Sevens(PromptLookup):
    """Guesses the token that each step samples."""

    def __init__(self) -> None:
        pass

    def propose(self, live: LiveRequest, drafts: Sequence[int], count: int) -> Sequence[int]:
        return [7] * count


def speculation() -> Speculation:
    """Each request that decodes gets drafts."""
    made = Speculation(Sevens(), DRAFTS, [8, 16])
    made.costs.is_known = lambda rows: True
    made.costs.seconds = lambda rows: np.ones(2 - made.costs.index(rows))
    return made


@dataclass(eq=False)
class Flight:
    """A launched step."""

    schedule: Schedule
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


class Operations:
    """All that may be done to a scheduler, in random order."""

    def __init__(
        self,
        seed: int,
        *,
        states: bool,
        cache: bool,
        drafts: bool,
        scale: int,
        windows: Sequence[Window] = (),
        window_blocks: int | None = None,
        elastic: bool = False,
    ) -> None:
        """With a prefix cache, or with a slot for each request, or with both: more slots than seats, as some
        requests are held, and drafts take a second one. `scale`: of all sizes. Chunks of the larger blocks
        travel between caches."""
        self.numbers = iter(range(1 << 20))
        self.rng = random.Random(seed)
        self.flights: list[Flight] = []
        self.unverified: set[bytes] = set()  # parts with KV of other workers
        self.of_parts: dict[bytes, list[range]] = {}
        self.begun: dict[bytes, range] = {}  # of parts, the ranges that steps may compute
        self.waiting_for: set[bytes] = set()  # parts before whose range KV of other workers is to come
        self.importing: list[Import] = []
        self.pinned: list[Pin] = []
        self.done = Counter[str]()
        self.block, self.scale = 4 * scale, scale
        options: dict[str, Any] = {"windows": windows}
        if states and cache:
            options["copies"] = StateCopies(SLOTS, COPIES, 2 * self.block, self.block, 2)
        self.scheduler = make(
            num_blocks=14,
            seqs=4,
            budget=9 * scale,
            prefix_cache=cache or not states,
            states=SLOTS if states else 0,
            block_size=self.block,
            speculation=speculation() if drafts else None,
            window_blocks=window_blocks,
            elastic=elastic,
            **options,
        )

    @property
    def free(self) -> int:
        """Free blocks, and those without memory."""
        pool = self.scheduler.lives.pool
        return pool.free + len(pool.units.absent) * pool.units.size

    def operate(self) -> None:
        """Does one of what is possible now. Steps come most often."""
        rng, scheduler = self.rng, self.scheduler
        number, chance = rng.randrange, rng.random
        cuts = sorted(rng.sample(range(31), 2 + 2 * number(2)))
        possible: list[tuple[int, Callable[[], None]]] = [
            (2, lambda: self.add(number(1, 31), number(2), chance() < 0.5, number(-1, 2), chance() < 0.1)),
            (1, lambda: self.reserve(number(1, 31), number(2))),
            (1, lambda: self.start(number(1, 31), number(2), chance() < 0.1)),
            (1, lambda: self.start_part(cuts, number(2))),
            (1, lambda: self.start_import(number(8, 51), number(2), number(1, 5))),
            (1, lambda: self.pin(number(8, 31), number(2))),
        ]
        if not self.flights or (len(self.flights) == 1 and scheduler.may_look_ahead):
            possible.append((8, lambda: self.launch(None if chance() < 0.5 else number(1, 10) * self.scale)))
        if self.flights:
            possible.append((6, lambda: self.land(number(DRAFTS + 1))))
        if lives := list(scheduler.lives):
            possible.append((1, lambda: scheduler.lives.drop(rng.choice(lives))))
        if held := self.some(Phase.HELD, is_part=False):
            possible.append((1, lambda: self.resume(rng.choice(held))))
        if reserved := self.some(Phase.RESERVED, is_part=False):
            possible += [
                (1, lambda: self.extend(rng.choice(reserved), number(10))),
                (2, lambda: self.join(rng.choice(reserved))),
            ]
        if parts := self.some(Phase.RESERVED, is_part=True):
            possible.append((4, lambda: self.begin_range(rng.choice(parts), waits=chance() < 0.8)))
        if computed := self.some(Phase.HELD, is_part=True):
            possible.append((2, lambda: self.verify(rng.choice(computed))))
        if self.waiting_for:
            possible.append((2, lambda: self.waiting_for.remove(min(self.waiting_for))))
        if self.importing:
            possible.append((2, lambda: self.end_import(rng.choice(self.importing), number(5))))
        if self.pinned:
            possible.append((2, lambda: self.unpin(rng.choice(self.pinned))))
        weights, operations = zip(*possible, strict=True)
        rng.choices(operations, weights)[0]()

    def request(self, length: int, family: int, priority: int = 0, alone: bool = False) -> EngineRequest:
        # Requests of one family share prefixes.
        # No prompt has the token that steps sample, or an answer could be the prompt of another request.
        prompt = [FIRST_TOKEN * (1 + family) + i for i in range(length * self.scale)]
        sampling = SamplingParams(max_tokens=36)
        number = next(self.numbers)
        return EngineRequest(
            number.to_bytes(4), prompt, [], sampling, priority, alone, tenant=bytes([number % 3])
        )

    def add(self, length: int, family: int, handover: bool, priority: int, alone: bool) -> None:
        request = self.request(length, family, priority, alone)
        self.scheduler.lives.add(request, handover=handover)

    def reserve(self, length: int, family: int) -> None:
        request = self.request(length, family)
        tokens = len(request.prompt_ids)
        pool = self.scheduler.lives.pool
        free = self.free
        referenced = {block for block in range(pool.num_blocks) if pool.cell(block).leases}
        live = self.scheduler.lives.reserve(request)
        if live is not None:
            assert len(live.blocks) * self.block >= tokens + 1
            assert live.num_cached <= tokens
            assert self.free == free - len({*live.blocks} - referenced)
        else:
            assert self.free == free

    def start(self, length: int, family: int, alone: bool) -> None:
        request = self.request(length, family, alone=alone)
        live = self.scheduler.lives.start(request)
        if live is not None:
            assert len(live.blocks) * self.block >= len(request.prompt_ids)
            assert (live.phase, live.num_left > 0) == (Phase.RUNNING, True)
        else:
            assert all(live.request is not request for live in self.scheduler.lives)

    def some(self, phase: Phase, *, is_part: bool) -> list[LiveRequest]:
        """The requests of a phase: those that compute a part of a split prompt, or the others."""
        return [
            live
            for live in self.scheduler.lives
            if live.phase is phase and (live.id in self.unverified) is is_part
        ]

    def resume(self, live: LiveRequest) -> None:
        blocks, resumed_id = list(live.blocks), b"resumed" + live.id
        if self.scheduler.lives.resume(live, resumed_id):
            assert live.id == resumed_id
            assert (list(live.blocks), live.num_left) == (blocks, 1)

    def extend(self, live: LiveRequest, more: int) -> None:
        before = list(live.blocks), list(live.token_ids)
        output = [7] * (len(live.token_ids) - len(live.request.prompt_ids) + more)
        if self.scheduler.lives.extend_reservation(live, output):
            assert list(live.blocks[: len(before[0])]) == before[0]
            assert len(live.blocks) * self.block >= len(live.token_ids) + 1
        else:
            assert (list(live.blocks), list(live.token_ids)) == before

    def join(self, live: LiveRequest) -> None:
        self.scheduler.lives.join(live)
        live.token_ids.append(7)

    def start_part(self, cuts: list[int], family: int) -> None:
        """Of a split prompt: it computes every second range, and the last one."""
        request = self.request(cuts[-1], family)
        stops = [self.scale * cut for cut in cuts]
        ranges = list(starmap(range, zip(stops[::2], stops[1::2], strict=True)))
        free = self.free
        live = self.scheduler.lives.start_part(request, ranges, read_at=stops[1:-1:2])
        if live is None:
            assert self.free == free
            return
        assert len(live.blocks) * self.block >= len(request.prompt_ids)
        if self.scheduler.lives.states is not None:
            assert live.num_cached < ranges[0].stop, "other workers need the states there"
        assert live.num_left == sum(map(len, live.shared.ranges)) > 0
        self.unverified.add(live.id)
        self.of_parts[live.id] = ranges

    def begin_range(self, live: LiveRequest, *, waits: bool) -> None:
        first = self.begun[live.id] = live.shared.ranges[0]
        (self.waiting_for.add if waits else self.waiting_for.discard)(live.id)
        self.scheduler.lives.begin_range(live, lambda: live.id in self.waiting_for)
        assert (live.phase, live.num_computed) == (Phase.RUNNING, first.start)

    def verify(self, live: LiveRequest) -> None:
        """As `Engine.verified`."""
        self.scheduler.lives.verified(live)
        self.unverified.remove(live.id)

    def start_import(self, length: int, family: int, most: int) -> None:
        """KV, and states, of another worker or a store, which are written beside the steps under way."""
        exchange = self.scheduler.lives.prefix_exchange
        if exchange is None:
            return
        free = self.free
        missing = exchange.missing(self.request(length, family), most, remnant=bool(length % 2))
        assert self.free == free, "it takes no block"
        started = None if missing is None else exchange.start_import(missing)
        if missing is None or started is None:
            assert self.free == free
            return
        assert len(started.table) * self.block >= (missing.first_chunk + len(missing.chunks)) * CHUNK_TOKENS
        self.importing.append(started)
        self.done["imports"] += 1

    def end_import(self, ended: Import, chunks: int) -> None:
        """With so many of its chunks."""
        self.importing.remove(ended)
        come = min(chunks, len(ended.missing.chunks))
        if ended.state_slot is not None and come < len(ended.missing.chunks):
            come = 0  # the states are those after the last chunk
        ended.end(come and (ended.missing.first_chunk + come) * CHUNK_TOKENS)

    def pin(self, length: int, family: int) -> None:
        """Another worker reads what the cache has."""
        scheduler = self.scheduler
        if scheduler.lives.prefix_exchange is None or scheduler.lives.cache is None:
            return
        request = self.request(length, family)
        names = scheduler.lives.cache.names(request)
        names.extend(request.prompt_ids, len(request.prompt_ids))
        if (pin := scheduler.lives.prefix_exchange.pin(names.chunks, 0)) is not None:
            self.pinned.append(pin)
            self.done["pins"] += 1

    def unpin(self, pin: Pin) -> None:
        self.pinned.remove(pin)
        pin.end()

    def launch(self, chunk_limit: int | None) -> None:
        scheduler = self.scheduler
        had_work = scheduler.has_next
        handovers = {live: list(live.blocks) for live in scheduler.lives.running if live.handover}
        computed = {live.id: live.num_computed for live in scheduler.lives}
        schedule = scheduler.schedule(None if chunk_limit is None else lambda _: chunk_limit)
        assert bool(schedule.chunks or schedule.preempted) == had_work
        assert sum(map(len, schedule.chunks.values())) <= scheduler.max_num_batched_tokens
        assert len(schedule.chunks) == 1 or not any(live.alone for live in schedule.chunks)
        for live, chunk in schedule.chunks.items():
            assert live.phase is Phase.RUNNING
            assert chunk.start == live.num_computed < chunk.stop <= len(live.token_ids)
            assert len(live.blocks) * self.block >= chunk.stop, "a token without a slot"
            if live in schedule.started:
                assert live.num_cached % min(self.block, CHUNK_TOKENS) == 0, "or it goes on with a remnant"
                assert live.num_cached < len(live.token_ids), "the last position must be computed"
                assert len(live.blocks) * self.block >= len(live.token_ids)
            else:
                assert chunk.start == computed[live.id]
        for live, blocks in handovers.items():
            assert (live.phase, list(live.blocks)) == (Phase.RUNNING, blocks), "a prefill was preempted"
        for live in schedule.preempted:
            if live.hand_back:
                assert live not in scheduler.lives
            else:
                assert (live.phase, list(live.blocks), live.num_computed) == (Phase.WAITING, [], 0)
        awaiting = [live for live in schedule.prompts if live.awaits_kv]
        assert len(awaiting) <= 1, "the workers of one plan may end another"
        assert not awaiting or not schedule.decodes, "a decode waits for another worker"
        assert not awaiting or all(live.shared.ranges for live in scheduler.lives.reserved), (
            "so would one that joins"
        )
        if not schedule.chunks:
            return
        for live, chunk in schedule.prompts.items():
            if live.handover and (begun := self.begun.get(live.id)) is not None:
                assert begun.start <= chunk.start < chunk.stop <= begun.stop, "not its positions"
        states = scheduler.lives.memory.states
        step = build_step(
            schedule,
            1 << 12,
            block_size=self.block,
            table_width=None,
            has_states=states is not None,
            restores=() if states is None else states.take_restores(schedule),
            saves=() if states is None else states.saves(schedule.chunks),
            ahead=1 if scheduler.speculation is None or scheduler.lives.states is not None else 1 + DRAFTS,
            window_blocks=None if (windows := scheduler.lives.pool.windows) is None else windows.of,
        )
        scheduler.launched(schedule)
        for live, row, count in schedule.requests():
            live.promise(row, count)
        self.flights.append(Flight(schedule, step))
        self.done["steps"] += 1
        self.done["drafts"] += bool(schedule.drafts)
        self.done["waits"] += bool(awaiting)
        self.done["restores"] += len(step.restores)

    def land(self, right: int) -> None:
        """As the engine's loop does, with at most `right` drafts of each request that are right."""
        scheduler, schedule = self.scheduler, self.flights.pop(0).schedule
        schedule.end_leases()
        scheduler.lives.memory.landed(schedule)
        for live, _, count in schedule.requests():
            live.slack -= count
            if live.phase is Phase.GONE:
                continue
            accepted = min(right, count)
            verified = schedule.verified(live, accepted)
            for draft in range(accepted + 1):
                position = live.learn_after_draft(7) if draft else live.learn(7)
                if not live.shared.unverified:
                    scheduler.lives.memory.publish(live, min(position, verified))
                if live.handover:
                    scheduler.lives.hold(live)
                elif position + 1 >= live.asked.longest:
                    scheduler.lives.drop(live)
                if live.phase is not Phase.RUNNING:
                    break
            if scheduler.lives.memory.states is not None:
                scheduler.lives.memory.states.choose(live, newest=verified > live.num_computed)
            live.num_computed = min(live.num_computed, verified)

    def accounts_are_right(self) -> None:
        scheduler = self.scheduler
        scheduler.lives.pool.assert_consistent()
        seated = [live for live in scheduler.lives.running if not live.ends_with_pending]
        assert len(seated) + len(scheduler.lives.reserved) <= scheduler.lives.max_num_seqs
        assert scheduler.lives.running == sorted(scheduler.lives.running, key=lambda r: r.order)
        assert scheduler.lives.waiting == sorted(scheduler.lives.waiting, key=lambda r: r.order)
        everyone = [
            *scheduler.lives.waiting,
            *scheduler.lives.running,
            *scheduler.lives.held,
            *scheduler.lives.reserved,
        ]
        assert {*everyone} == {*scheduler.lives}
        assert len(everyone) == len(list(scheduler.lives))
        everyone += scheduler.lives.leaving
        in_use = {block for live in everyone for block in live.blocks}
        if (exchange := scheduler.lives.prefix_exchange) is not None:
            assert exchange.empty == (not self.pinned and not self.importing)
        in_use.update(*(pin.held.blocks for pin in self.pinned))
        for each in self.importing:
            assert in_use.isdisjoint(each.held.blocks), "KV from elsewhere is written there"
            in_use.update(each.missing.hits)
        in_use.update(*(each.held.blocks for each in self.importing))
        assert self.free == scheduler.lives.pool.num_blocks - len(in_use)
        assert not any(live.blocks for live in scheduler.lives.waiting)
        for live in everyone:
            if live.id in self.unverified:
                assert live.num_published <= live.num_cached // self.block, "KV that may be wrong is shared"
        if scheduler.lives.states is not None:
            self.slots_are_right(scheduler, everyone)
        self.steps_own_what_they_use(scheduler)

    def slots_are_right(self, scheduler: Scheduler, everyone: list[LiveRequest]) -> None:
        assert scheduler.lives.states is not None
        slots = [live.state_slot for live in everyone if live.blocks]
        slots += [live.states.kept for live in everyone if live.states and live.states.kept is not None]
        states = scheduler.lives.states
        states.assert_consistent()
        assert sorted(slots) == [slot for slot in range(SLOTS) if states.cell(slot).leases], "one owner each"
        if scheduler.lives.cache is None or (copies := scheduler.lives.cache.copies) is None:
            return
        cells, lent = [copies.cell(slot) for slot in range(SLOTS, SLOTS + COPIES)], self.lent()
        copies.assert_consistent()
        owned = [cell.place for cell in cells if cell.name is not None or cell.place in lent]
        owned += [slot for live in everyone if live.states for _, slot, _ in live.states.copies]
        of_answers = [live.states.of_answer for live in everyone if live.states]
        owned += [copy.slot for copy in of_answers if copy is not None]
        self.done["answers"] += any(of_answers)
        owned += [each.state_slot for each in self.importing if each.state_slot is not None]
        taken = [cell.place for cell in cells if cell.name is not None or cell.leases]
        assert sorted(owned) == taken, "a copy has two owners, or none"

    def lent(self) -> set[int]:
        """The copies that steps under way, or those that come, begin with."""
        of_steps = [copy for flight in self.flights for copy in flight.schedule.copies]
        lives = [*self.scheduler.lives, *self.scheduler.lives.leaving]
        of_lives = [live.states.copy for live in lives if live.states and live.states.copy]
        return {copy.slot for copy in (*of_steps, *of_lives)}

    def steps_own_what_they_use(self, scheduler: Scheduler) -> None:
        """What launched steps use belongs to no import and no reservation: these are written at once."""
        blocks = set[int]().union(*(flight.blocks(self.block) for flight in self.flights))
        cells = map(scheduler.lives.pool.cell, blocks)
        assert all(cell.leases or cell.name is not None for cell in cells), "a block of a step is free"
        slots = set[int]().union(*(flight.slots for flight in self.flights))
        for each in self.importing:
            assert blocks.isdisjoint(each.held.blocks)
            assert each.state_slot not in slots
        for live in scheduler.lives.reserved:
            if not live.handover:
                assert blocks.isdisjoint(live.blocks[live.num_cached // self.block :])
                assert scheduler.lives.states is None or live.state_slot not in slots

    def end(self) -> None:
        for live in list(self.scheduler.lives):
            self.scheduler.lives.drop(live)
        while self.flights:
            self.flights.pop().schedule.end_leases()
        for started in list(self.importing):
            self.end_import(started, 0)
        for pin in list(self.pinned):
            self.unpin(pin)
        self.scheduler.lives.assert_whole()


@pytest.mark.cases(1)
@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize(
    ("states", "cache"), [(False, True), (True, False), (True, True)], ids=["cache", "states", "both"]
)
def test_accounts_are_right(
    states: bool, cache: bool, drafts: bool, scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_copies, "ANSWER_TOKENS", 4)
    done = Counter[str]()
    for seed in range(SEEDS):
        operations = Operations(seed, states=states, cache=cache, drafts=drafts, scale=scale)
        for _ in range(OPERATIONS):
            operations.operate()
            operations.accounts_are_right()
        operations.end()
        done += operations.done
    expected = {"steps", "waits"}
    expected |= {"drafts"} if drafts else set()
    expected |= {"imports"} if cache and scale > 1 else set()
    expected |= {"pins"} if cache and not states and scale > 1 else set()
    expected |= {"restores", "answers"} if cache and states else set()
    assert expected <= done.keys(), done
