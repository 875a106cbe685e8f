"""A prompt of which an engine computes ranges. The test writes the other KV, as workers do."""

import math
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.engine import Engine, EngineRequest, SpeculativeConfig
from baton.engine.core.live_request import Phase
from baton.engine.kernels import parts
from tests.engine.conftest import MakeEngine, request_of, tokens_of
from tests.engine.draft_checkpoints import random_eagle
from tests.engine.scheduling import add, end, hooks_to, live_of, make, step, tokens, tokens_waiting

CACHING = {"block_size": 8, "num_blocks": 80, "max_num_batched_tokens": 64, "enable_prefix_caching": True}


class Shared:
    """Writes KV of a prompt into an engine, inside its steps. `source`: an engine that has all of it. None:
    what is written is no number."""

    def __init__(self, target: Engine, source: Engine | None) -> None:
        self.target, self.source = target, source
        self.table: list[int] = []  # of the request in the source
        self.blocks: list[int] = []  # in the target
        self.written = 0  # positions that are in the blocks of the target
        target.loop.hooks = hooks_to(self)

    def layer_done(self, layer: int, chunks: Mapping[bytes, range]) -> None:
        chunk = chunks.get((1).to_bytes(16))
        if chunk is None or chunk.start <= self.written:
            return
        positions = torch.arange(self.written, chunk.start)
        here = parts(self.target.caches[layer])[0].flatten(1, 2)
        if self.source is None:
            here[:, self._slots(self.target, self.blocks, positions)] = math.nan
        else:
            there = parts(self.source.caches[layer])[0].flatten(1, 2)
            found = there[:, self._slots(self.source, self.table, positions)]
            here[:, self._slots(self.target, self.blocks, positions)] = found
        if layer == len(self.target.caches) - 1:
            self.written = chunk.stop

    @staticmethod
    def _slots(engine: Engine, blocks: list[int], positions: torch.Tensor) -> torch.Tensor:
        size = engine.block_size
        return torch.tensor([blocks[p // size] * size + p % size for p in positions.tolist()])


def shared_prompt(length: int) -> EngineRequest:
    rng = random.Random(length)
    return request_of(1, [rng.randrange(3, 199) for _ in range(length)], max_tokens=6, ignore_eos=True)


def computed(request: EngineRequest, engine: Engine) -> list[int]:
    """Holds the request in an engine. Returns its blocks."""
    engine.add(request, handover=True)
    while not engine.loop.step().outputs:
        pass
    return list(live_of(engine, request.id).blocks)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("own", [[(64, 120)], [(0, 40), (80, 120)], [(32, 64), (96, 120)]])
def test_a_shared_prompt_goes_on_like_one_that_was_computed_here(
    tiny_engine: MakeEngine, tiny_path: Path, tmp_path: Path, own: list[tuple[int, int]], drafts: bool
) -> None:
    """With `drafts` there is a draft head, which has a cache of its own."""
    request, more = shared_prompt(120), {}
    if drafts:
        random_eagle(tmp_path / "head", tiny_path, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        more["speculative_config"] = SpeculativeConfig("eagle3", model=str(tmp_path / "head"))
    source = tiny_engine(**CACHING, **more)
    target = tiny_engine(**CACHING | {"block_size": 4, "num_blocks": 160}, **more)
    [expected] = tokens_of(tiny_engine(**CACHING), [request])
    shared = Shared(target, source)
    shared.table = computed(request, source)
    reservation = target.start_part(request, [range(*found) for found in own])
    assert reservation is not None
    shared.blocks, shared.written = list(reservation.blocks), reservation.num_cached
    outputs = []
    for start, _ in own:
        assert not target.loop.has_work, "nothing is computed before its time"
        following = live_of(target, request.id).next_range
        assert following is not None
        assert following.start == start
        target.lives.begin_range(live_of(target, request.id))
        assert live_of(target, request.id).next_range is None
        outputs += target.loop.step().outputs
    assert live_of(target, request.id).phase is Phase.HELD
    assert target.stats().blocks_cached == 0, "no other request may use KV that is not verified"
    target.lives.verified(live_of(target, request.id))
    assert target.stats().blocks_cached == 120 // 4
    for here, there in zip(target.caches, source.caches, strict=True):
        positions = torch.arange(120)
        mine = parts(here)[0].flatten(1, 2)[:, shared._slots(target, shared.blocks, positions)]
        other = parts(there)[0].flatten(1, 2)[:, shared._slots(source, shared.table, positions)]
        assert torch.allclose(mine, other, atol=1e-3)
    resumed = target.resume(live_of(target, request.id), b"goes on")
    assert resumed is not None
    found = [resumed.token]
    while not target.idle:
        found += [output.token for output in target.loop.step().outputs]
    assert found == expected
    end(source, request.id)
    target.assert_whole()


def test_waiting_for_other_workers_is_no_slow_prefill(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that waited teaches nothing. One that did not teaches the speed, also of a split prompt."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=time.monotonic())  # stands while layers end
    monkeypatch.setattr("baton.engine.split_steps.time", clock)
    request = shared_prompt(120)
    source, target = tiny_engine(**CACHING), tiny_engine(**CACHING)
    shared = Shared(target, source)
    shared.table = computed(request, source)
    reservation = target.start_part(request, [range(32), range(64, 120)])
    assert reservation is not None
    shared.blocks = list(reservation.blocks)
    target.lives.begin_range(live_of(target, request.id))
    target.loop.step()
    before = target.meters.prefill_tokens_per_s, target.meters.step_seconds
    assert min(before) > 0

    def late(layer: int, chunks: Mapping[bytes, range]) -> None:
        clock.now += 1000
        shared.layer_done(layer, chunks)

    target.loop.hooks = replace(target.loop.hooks, layer_done=late)
    target.lives.begin_range(live_of(target, request.id))
    target.loop.step()
    assert (target.meters.prefill_tokens_per_s, target.meters.step_seconds) == before
    end(source, request.id)


def test_garbage_stays_in_the_rows_of_its_request(tiny_engine: MakeEngine) -> None:
    """What did not come may be anything: here no number. Other requests of the step keep their tokens, and a
    request with the same prompt finds nothing of it in the prefix cache."""
    request, beside = shared_prompt(120), [request_of(n, range(5, 30 + n), max_tokens=12) for n in (2, 3)]
    engine = tiny_engine(**CACHING)
    again = replace(request, id=b"again")
    *expected, right = tokens_of(tiny_engine(**CACHING), [*beside, again])
    shared = Shared(engine, None)
    found: dict[bytes, list[int]] = {each.id: [] for each in beside}
    for each in beside:
        engine.add(each)
    for output in engine.loop.step().outputs:
        found[output.id].append(output.token)
    reservation = engine.start_part(request, [range(64, 120)])
    assert reservation is not None
    shared.blocks = list(reservation.blocks)
    engine.lives.begin_range(live_of(engine, request.id))
    failed: list[bytes] = []
    while not failed or any(live.id != request.id for live in engine.lives):
        result = engine.loop.step()
        failed += [request_id for request_id, _ in result.failed]
        for output in result.outputs:
            found[output.id].append(output.token)
    assert failed == [request.id]
    end(engine, request.id)
    assert list(found.values()) == expected
    assert tokens_of(engine, [again]) == [right]
    engine.assert_whole()


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_ends_with_the_layer_whose_kv_will_not_come(tiny_engine: MakeEngine, shared: bool) -> None:
    """Unless other requests share it."""
    request, other = shared_prompt(120), request_of(2, range(5, 30), max_tokens=4)
    engine, layers = tiny_engine(**CACHING | {"max_num_batched_tokens": 128}), list[int]()
    [expected] = tokens_of(tiny_engine(**CACHING), [other])

    def lost(layer: int, chunks: Mapping[bytes, range]) -> bool:
        layers.append(layer)
        return layer == 1

    engine.loop.hooks = replace(engine.loop.hooks, layer_done=lost)
    reservation = engine.start_part(request, [range(64, 120)])
    assert reservation is not None
    engine.lives.begin_range(live_of(engine, request.id))
    if shared:
        engine.add(other)
    result = engine.loop.step()
    assert result.prompts[request.id] == range(64, 120), "its caller learns of it"
    assert layers == ([0, 1, 2] if shared else [0, 1])
    end(engine, request.id)
    found = [output.token for output in result.outputs if output.id == other.id]
    if not shared:
        engine.add(other)
    while not engine.idle:
        found += [output.token for output in engine.loop.step().outputs]
    assert found == expected
    engine.assert_whole()


def test_a_draft_head_computes_its_layer_when_no_step_can_be_given_up(
    tiny_engine: MakeEngine, tiny_path: Path, tmp_path: Path
) -> None:
    random_eagle(tmp_path / "head", tiny_path, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    drafts = SpeculativeConfig("eagle3", model=str(tmp_path / "head"))
    engine, request = tiny_engine(**CACHING, speculative_config=drafts), shared_prompt(60)
    engine.loop.hooks = replace(engine.loop.hooks, layer_done=lambda layer, chunks: layer == 3)
    assert engine.start_part(request, [range(32, 60)]) is not None
    engine.lives.begin_range(live_of(engine, request.id))
    assert engine.loop.step().prompts == {request.id: range(32, 60)}
    end(engine, request.id)
    engine.assert_whole()


def test_a_part_comes_after_earlier_prompts_and_before_later_ones() -> None:
    scheduler = make(num_blocks=32, budget=16)
    add(scheduler, 1, 20)
    part = scheduler.lives.start_part(EngineRequest(b"p", list(range(30))), [range(12), range(20, 30)])
    assert part is not None
    assert tokens_waiting(scheduler) == 20 + 22
    scheduler.lives.begin_range(part)
    add(scheduler, 2, 22)
    assert tokens(step(scheduler)) == [(1, 0, 16)]
    assert tokens(step(scheduler)) == [(1, 16, 20), (ord("p"), 0, 12)]
    assert tokens_waiting(scheduler) == 10 + 22
    assert tokens(step(scheduler))[0][0] == 1
    assert scheduler.lives.start_part(EngineRequest(b"q", list(range(99))), [range(99)]) is None, "no room"


def test_a_part_counts_as_the_tokens_of_its_ranges() -> None:
    """In fair shares, for the chunk limit, for slow launches, and for whether it may share a step."""
    scheduler = make(num_blocks=400, budget=64, full_step=48)
    part = scheduler.lives.start_part(
        EngineRequest(b"p", list(range(900)), tenant=b"a"), [range(8), range(880, 900)]
    )
    assert part is not None
    assert (part.num_left, part.tag.tokens) == (28, 28)
    scheduler.lives.begin_range(part)
    assert scheduler.next_prompt == 8, "the next step computes no more of it"
    assert [left for left, _ in scheduler.prompts()] == [28]
    add(scheduler, 1, 40, tenant=b"b")
    assert tokens(step(scheduler)) == [(ord("p"), 0, 8), (1, 0, 40)]
    assert (part.num_left, tokens_waiting(scheduler)) == (20, 20)
    scheduler.lives.begin_range(part)
    assert scheduler.next_prompt == 0, "a request decodes"
    assert tokens(step(scheduler)) == [(1, 40, 41), (ord("p"), 880, 900)]
    assert part.phase is Phase.HELD


def test_between_its_ranges_a_part_holds_no_step_up() -> None:
    scheduler = make(num_blocks=32, budget=16)
    part = scheduler.lives.start_part(EngineRequest(b"p", list(range(40))), [range(4, 12), range(20, 40)])
    assert part is not None
    assert tokens(step(scheduler)) == []
    scheduler.lives.begin_range(part)
    add(scheduler, 1, 6)
    assert tokens(step(scheduler)) == [(1, 0, 6), (ord("p"), 4, 12)]
    assert part.phase is Phase.RESERVED
    assert tokens(step(scheduler)) == [(1, 6, 7)]
    scheduler.lives.begin_range(part)
    assert tokens(step(scheduler)) == [(1, 7, 8), (ord("p"), 20, 35)]
    assert part.phase is Phase.RUNNING
    assert tokens(step(scheduler)) == [(1, 8, 9), (ord("p"), 35, 40)]
    assert part.phase is Phase.HELD


def test_a_range_that_may_wait_has_a_step_without_decodes_and_without_other_such_ranges() -> None:
    scheduler = make(num_blocks=64, budget=32, seqs=8)
    late = {b"p", b"q"}  # the split prompts of which KV is still to come
    parts = []
    for part_id in sorted(late):
        part = scheduler.lives.start_part(EngineRequest(part_id, list(range(12))), [range(8, 12)])
        assert part is not None
        scheduler.lives.begin_range(part, lambda part_id=part_id: part_id in late)
        parts.append(part)
    p, q = ord("p"), ord("q")
    decode = add(scheduler, 1, 4)
    assert tokens(step(scheduler)) == [(p, 8, 12), (1, 0, 4)], "one plan waits in a step"
    assert scheduler.has_work
    assert [tokens(step(scheduler)) for _ in range(2)] == [[(1, 4, 5)], [(1, 5, 6)]], "decodes do not wait"
    scheduler.lives.drop(decode)
    reservation = scheduler.lives.reserve(EngineRequest(b"r", [1, 2, 3]))
    assert reservation is not None
    assert not scheduler.has_work, "a reservation may join"
    assert tokens(step(scheduler)) == []
    late.remove(b"q")
    assert scheduler.has_work
    scheduler.lives.join(reservation)
    reservation.token_ids.append(7)
    assert tokens(step(scheduler)) == [(ord("r"), 3, 4), (q, 8, 12)], "it need not wait"
    for live in (*parts, reservation):
        scheduler.lives.drop(live)
    scheduler.lives.assert_whole()


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_prompt_that_goes_on_here_does_not_wait_for_a_large_step_of_the_next_one(goes_on: bool) -> None:
    scheduler = make(num_blocks=64, budget=32, full_step=8)
    first = add(scheduler, 1, 8, handover=True)
    add(scheduler, 2, 90)
    launched = scheduler.schedule(lambda _: 4)
    assert tokens(launched) == [(1, 0, 8)]
    scheduler.launched(launched)
    first.goes_on = goes_on
    limit = 4 if goes_on else 32
    ahead = scheduler.schedule(lambda _: 4)
    assert tokens(ahead) == [(2, 0, limit)], "its token is not known yet"
    scheduler.launched(ahead)
    for schedule in (launched, ahead):
        schedule.end_leases()
    first.token_ids.append(7)
    scheduler.lives.hold(first)
    assert tokens(step(scheduler, 4)) == [(2, limit, 2 * limit)], "it is held"
    assert scheduler.lives.resume(first, b"r")
    assert tokens(step(scheduler, 4)) == [(ord("r"), 8, 9)]
    scheduler.lives.drop(first)
    assert tokens(step(scheduler, 4)) == [(2, 2 * limit, min(90, 2 * limit + 32))], "nothing waits"


@pytest.mark.parametrize("steps", range(4))
def test_a_part_may_end_at_any_time(steps: int) -> None:
    scheduler = make(num_blocks=32, budget=64, prefix_cache=True)
    part = scheduler.lives.start_part(EngineRequest(b"p", list(range(40))), [range(4, 12), range(20, 40)])
    assert part is not None
    for _ in range(steps):
        if part.phase is Phase.RESERVED:
            scheduler.lives.begin_range(part)
        step(scheduler)
    scheduler.lives.drop(part)
    scheduler.lives.assert_whole()
