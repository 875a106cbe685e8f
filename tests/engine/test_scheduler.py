"""The scheduler, each rule by itself."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from baton.engine.api.request import EngineRequest
from baton.engine.core.live_request import Phase
from baton.engine.core.making_room import to_drop
from baton.engine.core.meters import MIXED_STEPS
from tests.engine.scheduling import BLOCK, add, make, step, tokens, tokens_waiting


@dataclass
class Case:
    """Steps of a scheduler. `arrivals`: by the number of a step, what is added before it: number, prompt and
    options of each request. `steps`: what each computes: number, start and stop."""

    scheduler: dict[str, Any]
    arrivals: dict[int, list[tuple[int, int] | tuple[int, int, dict[str, Any]]]]
    steps: list[list[tuple[int, int, int]]]
    chunk_limit: int | None = None


HANDOVER = {"handover": True}
STEPS = {
    "decodes and chunks of prompts fill the exact budget": Case(
        {"budget": 10},
        {0: [(1, 3)], 1: [(2, 15), (3, 15)]},
        [
            [(1, 0, 3)],
            [(1, 3, 4), (2, 0, 9)],
            [(1, 4, 5), (2, 9, 15), (3, 0, 3)],
            [(1, 5, 6), (2, 15, 16), (3, 3, 11)],
        ],
    ),
    "short prompts come first and share a step until it is full, a long one has the whole budget": Case(
        {"num_blocks": 64, "full_step": 8},
        {0: [(n, prompt, HANDOVER) for n, prompt in enumerate([20, 3, 4, 2, 9])]},
        [[(3, 0, 2), (1, 0, 3)], [(2, 0, 4)], [(4, 0, 9)], [(0, 0, 16)], [(0, 16, 20)]],
    ),
    "beside decodes prompts fill the budget": Case(
        {"num_blocks": 64, "full_step": 8},
        {0: [(0, 2)], 1: [(1, 7), (2, 7)]},
        [[(0, 0, 2)], [(0, 2, 3), (1, 0, 7), (2, 0, 7)]],
    ),
    "a request alone gets every second step until it has a token": Case(
        {"budget": 8},
        {0: [(1, 1)], 1: [(2, 14, {"alone": True}), (3, 2)]},
        [
            [(1, 0, 1)],
            [(1, 1, 2), (3, 0, 2)],
            [(2, 0, 8)],
            [(1, 2, 3), (3, 2, 3)],
            [(2, 8, 14)],  # its token
            [(1, 3, 4), (3, 3, 4), (2, 14, 15)],
        ],
    ),
    "two requests alone never share a step": Case(
        {"budget": 100},
        {0: [(1, 5, {"alone": True}), (2, 5, {"alone": True})]},
        [[(1, 0, 5)], [(1, 5, 6)], [(2, 0, 5)], [(1, 6, 7), (2, 5, 6)]],
    ),
    "a prompt with one token left is no decode": Case(
        {"num_blocks": 40, "budget": 8},
        {0: [(1, 9, HANDOVER), (2, 9, HANDOVER)]},
        [[(1, 0, 8)], [(1, 8, 9), (2, 0, 7)]],
        chunk_limit=3,
    ),
    "a prompt of higher priority takes the chunk limit first": Case(
        {"num_blocks": 40, "budget": 30},
        {0: [(1, 1)], 2: [(2, 9, HANDOVER)], 3: [(3, 4, {"priority": -1, **HANDOVER})]},
        [
            [(1, 0, 1)],
            [(1, 1, 2)],
            [(1, 2, 3), (2, 0, 3)],
            [(1, 3, 4), (3, 0, 3)],
            [(1, 4, 5), (3, 3, 4), (2, 3, 5)],
        ],
        chunk_limit=3,
    ),
    "a prompt of higher priority goes before the rest of another": Case(
        {"num_blocks": 200, "budget": 16},
        {0: [(1, 100, HANDOVER)], 1: [(2, 10, {"priority": -1, **HANDOVER})]},
        [[(1, 0, 16)], [(2, 0, 10), (1, 16, 22)]],
    ),
    "priority, then retried requests, then the order of arrival": Case(
        {"num_blocks": 30, "budget": 6},
        {
            0: [(1, 6), (2, 6), (3, 6, {"retried": True, **HANDOVER}), (4, 6, {"priority": -1, **HANDOVER})],
        },
        [[(4, 0, 6)], [(3, 0, 6)], [(1, 0, 6)]],
    ),
}


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_what_each_step_computes(case: Case) -> None:
    scheduler = make(**case.scheduler)
    for number, expected in enumerate(case.steps):
        for request, prompt, *options in case.arrivals.get(number, ()):
            add(scheduler, request, prompt, **(options[0] if options else {}))
        assert tokens(step(scheduler, case.chunk_limit)) == expected, f"step {number}"


def test_the_first_prompt_of_the_next_step() -> None:
    scheduler = make(num_blocks=64, full_step=8)
    assert scheduler.next_prompt == 0
    add(scheduler, 0, 20)
    assert scheduler.next_prompt == 20
    step(scheduler)
    assert scheduler.next_prompt == 4
    step(scheduler)
    add(scheduler, 1, 9)
    assert scheduler.next_prompt == 0, "the next step decodes"


def test_without_a_free_slot_no_request_starts() -> None:
    scheduler = make(states=2)
    held, _, third = (add(scheduler, number, 3, handover=number == 0) for number in range(3))
    step(scheduler)
    assert tokens(step(scheduler)) == [(1, 3, 4)], "the held request keeps its slot"
    assert not scheduler.lives.can_admit
    assert scheduler.lives.start(EngineRequest(b"4", [1])) is None
    assert to_drop(scheduler.lives, lambda owner: owner == third.id, [held]) == [held]
    scheduler.lives.drop(held)
    assert (2, 0, 3) in tokens(step(scheduler))


def test_a_slot_is_free_when_the_last_step_that_uses_it_is_over() -> None:
    """The step runs ahead of the end of the request, and writes the slot."""
    scheduler = make(states=1)
    live = add(scheduler, 0, 3)
    schedule = scheduler.schedule()
    scheduler.launched(schedule)
    scheduler.lives.drop(live)
    add(scheduler, 1, 3)
    assert not scheduler.lives.can_admit
    schedule.end_leases()
    assert scheduler.lives.can_admit


def test_the_last_request_in_order_is_preempted_and_recomputed() -> None:
    scheduler = make(num_blocks=6, budget=100)
    first, second = add(scheduler, 1, 8), add(scheduler, 2, 8)
    step(scheduler)
    for _ in range(4):
        step(scheduler)
    assert (len(first.token_ids), len(second.token_ids), scheduler.lives.pool.free) == (13, 13, 0)
    schedule = step(scheduler)
    assert schedule.preempted == [second]
    assert tokens(schedule) == [(1, 12, 13)]
    assert [due for _, due in scheduler.prompts()] == [-math.inf], "the next token of its stream is late"
    scheduler.lives.drop(first)
    assert tokens(step(scheduler)) == [(2, 0, 13)], "prompt and output are prefilled together"


def test_a_preempted_joined_request_is_handed_back() -> None:
    scheduler = make(num_blocks=6, budget=100)
    first = add(scheduler, 1, 7)
    step(scheduler)
    joined = scheduler.lives.reserve(EngineRequest(b"\2", list(range(7))))
    assert joined is not None
    scheduler.lives.join(joined)
    joined.token_ids.append(7)
    schedules = [step(scheduler) for _ in range(9)]
    assert [schedule.preempted for schedule in schedules if schedule.preempted] == [[joined]]
    assert joined.phase is Phase.GONE
    scheduler.lives.drop(first)
    scheduler.lives.assert_whole()


def test_held_and_reserved_requests_are_never_preempted() -> None:
    scheduler = make(num_blocks=6, budget=100)
    held = add(scheduler, 1, 8, handover=True)
    step(scheduler)
    reserved = scheduler.lives.reserve(EngineRequest(b"\2", list(range(3))))
    assert reserved is not None
    kept = list(held.blocks), list(reserved.blocks)
    grows = add(scheduler, 3, 4)
    recomputed = [live for _ in range(12) for live in step(scheduler).preempted]
    assert recomputed[0] is grows, "no other request can be preempted"
    assert (list(held.blocks), list(reserved.blocks)) == kept


def test_a_reservation_alone_may_take_the_whole_pool() -> None:
    scheduler = make(num_blocks=4)
    assert scheduler.lives.reserve(EngineRequest(b"\1", [0] * 15)) is not None
    assert scheduler.lives.reserve(EngineRequest(b"\2", [0])) is None


def test_reservations_leave_the_watermark_for_growth() -> None:
    scheduler = make(num_blocks=200, seqs=64, budget=100)
    assert scheduler.lives.memory.watermark == 2
    first = add(scheduler, 1, 4)
    step(scheduler)

    def reserve(blocks: int) -> Any:
        return scheduler.lives.reserve(
            EngineRequest(bytes([scheduler.lives.pool.free]), [0] * (blocks * BLOCK - 1))
        )

    assert scheduler.lives.pool.free == 199
    assert reserve(198) is None
    assert reserve(197) is not None
    for _ in range(2 * BLOCK):
        assert not step(scheduler).preempted
    assert first.phase is Phase.RUNNING


def test_an_admission_leaves_headroom_if_the_request_will_grow() -> None:
    scheduler = make(num_blocks=4, budget=100)
    add(scheduler, 1, 8)
    step(scheduler)
    waiting = add(scheduler, 2, 5)
    assert not scheduler.lives.can_admit, "2 blocks are free, one must stay"
    scheduler.lives.drop(waiting)
    add(scheduler, 3, 4)
    assert scheduler.lives.can_admit


def test_requests_that_are_not_queued_leave_the_first_of_the_queue_its_seat_and_blocks() -> None:
    scheduler = make(num_blocks=11, seqs=3, budget=100)
    add(scheduler, 1, 6 * BLOCK)
    step(scheduler)
    add(scheduler, 2, 2 * BLOCK, handover=True)
    for come_in in (scheduler.lives.reserve, scheduler.lives.start):
        assert come_in(EngineRequest(b"\3", [0] * (2 * BLOCK + 1))) is None, "only two are free beside them"
        live = come_in(EngineRequest(b"\3", [0]))
        assert live is not None
        assert scheduler.lives.can_admit
        assert come_in(EngineRequest(b"\4", [0])) is None, "a seat is left, for the queue"
        scheduler.lives.drop(live)


def test_a_resumed_request_goes_on_from_its_blocks_and_is_handed_back_on_preemption() -> None:
    scheduler = make(num_blocks=6, budget=100, prefix_cache=True)
    held = add(scheduler, 1, 7, handover=True)
    step(scheduler)
    blocks = list(held.blocks)
    assert scheduler.lives.resume(held, b"\x09")
    assert list(scheduler.lives) == [held]
    assert held.id == held.owner == b"\x09"
    assert tokens(step(scheduler, 1)) == [(9, 7, 8)]
    assert list(held.blocks) == blocks
    other = add(scheduler, 2, 8, priority=-1)
    schedules = [step(scheduler) for _ in range(9)]
    assert [schedule.preempted for schedule in schedules if schedule.preempted] == [[held]]
    scheduler.lives.drop(other)
    scheduler.lives.assert_whole()


def test_a_held_request_waits_for_a_seat_and_takes_it_before_the_queue() -> None:
    scheduler = make(seqs=2, budget=100)
    held = add(scheduler, 1, 3, handover=True)
    step(scheduler)
    reserved = scheduler.lives.reserve(EngineRequest(b"\2", [0]))
    assert reserved is not None
    running = add(scheduler, 3, 3)
    step(scheduler)
    add(scheduler, 4, 3, handover=True)
    assert not scheduler.lives.resume(held, b"\x09")
    assert held in scheduler.lives.held
    assert held.handover
    scheduler.lives.drop(running)
    assert scheduler.lives.resume(held, b"\x09")
    assert tokens(step(scheduler)) == [(9, 3, 4)]


def test_prefix_hits_end_before_the_last_position() -> None:
    scheduler = make(budget=100, prefix_cache=True)
    first = add(scheduler, 1, 8)
    step(scheduler)
    scheduler.lives.drop(first)
    second = add(scheduler, 2, 8)
    assert tokens(step(scheduler)) == [(2, 4, 8)], "all 8 are cached, but the last one's logits are needed"
    third = add(scheduler, 3, 9)
    assert tokens(step(scheduler)) == [(2, 8, 9), (3, 8, 9)]
    assert third.blocks[0] == second.blocks[0], "shared"
    assert scheduler.lives.cache is not None
    assert (scheduler.lives.cache.queries, scheduler.lives.cache.hits) == (25, 12)
    scheduler.lives.drop(second)
    scheduler.lives.drop(third)
    scheduler.lives.assert_whole()


def test_kv_is_shared_only_after_it_was_verified() -> None:
    scheduler = make(budget=8, prefix_cache=True)
    first = add(scheduler, 1, 16)
    schedule = scheduler.schedule()
    scheduler.launched(schedule)
    schedule.end_leases()
    second = add(scheduler, 2, 16)
    scheduler.lives.drop(first)
    scheduler.schedule()
    assert second.num_cached == 0


def test_some_steps_only_decode_so_that_their_cost_is_known() -> None:
    scheduler = make(num_blocks=200, budget=30)
    add(scheduler, 1, 1)
    step(scheduler, 1)
    add(scheduler, 2, 2 * MIXED_STEPS, handover=True)
    mixed = [len(step(scheduler, 1).chunks) == 2 for _ in range(2 * MIXED_STEPS + 2)]
    assert mixed == [False, *[True] * MIXED_STEPS] * 2


def test_a_reservation_limits_chunks_like_a_decode() -> None:
    scheduler = make(num_blocks=40, budget=30)
    assert scheduler.lives.reserve(EngineRequest(b"\1", [1, 2])) is not None
    assert scheduler.lives.start(EngineRequest(b"\2", list(range(8)))) is not None
    assert tokens(step(scheduler, 3)) == [(2, 0, 3)]
    add(scheduler, 3, 8, handover=True)
    assert tokens(step(scheduler, 3)) == [(2, 3, 6)]


def test_a_started_request_gets_blocks_at_once_and_is_handed_back_on_preemption() -> None:
    scheduler = make(num_blocks=6, budget=100)
    assert scheduler.lives.start(EngineRequest(b"\1", list(range(100)))) is None
    add(scheduler, 1, 8)
    step(scheduler)
    started = scheduler.lives.start(EngineRequest(b"\2", list(range(12))))
    assert started is not None
    assert scheduler.lives.start(EngineRequest(b"\3", [1])) is None, (
        "the watermark keeps that block for growth"
    )
    schedules = [step(scheduler) for _ in range(9)]
    assert [schedule.preempted for schedule in schedules if schedule.preempted] == [[started]]
    assert started.phase is Phase.GONE


def test_cached_tokens_do_not_count_as_waiting():
    scheduler = make(seqs=1, prefix_cache=True)
    add(scheduler, 1, 12, handover=True)
    step(scheduler)
    scheduler.lives.drop(next(iter(scheduler.lives)))
    add(scheduler, 2, 14)
    assert tokens_waiting(scheduler) == 2
    add(scheduler, 3, 12)
    assert tokens_waiting(scheduler) == 2 + 4, "a block that ends the prompt is computed again"


def test_a_step_is_scheduled_ahead_if_all_growing_requests_have_room() -> None:
    scheduler = make(num_blocks=6)
    for number, length in enumerate([BLOCK, 2, 3]):
        add(scheduler, number, length)
    reserved = scheduler.lives.reserve(EngineRequest(b"r", [1] * (BLOCK - 1)))
    assert reserved is not None
    step(scheduler)
    assert scheduler.may_look_ahead, "one request grows, and two blocks are free"
    scheduler.lives.pool.hold(1)
    assert scheduler.may_look_ahead, "three requests run, but one grows, and one block is free"
    scheduler.lives.pool.hold(1)
    assert not scheduler.may_look_ahead


def test_a_short_prompt_waits_for_a_step_of_another_tenant_s_long_prompt() -> None:
    scheduler = make(num_blocks=200, budget=16)
    add(scheduler, 1, 100, handover=True, tenant=b"flood")
    assert tokens(step(scheduler)) == [(1, 0, 16)]
    add(scheduler, 2, 100, handover=True, tenant=b"flood")
    add(scheduler, 3, 20, handover=True, tenant=b"other")
    assert tokens(step(scheduler)) == [(3, 0, 16)]
    assert tokens(step(scheduler)) == [(3, 16, 20), (1, 16, 28)]
    assert tokens(step(scheduler)) == [(1, 28, 44)]


def test_tenants_get_equal_shares_of_the_prompt_tokens() -> None:
    scheduler = make(num_blocks=2000, seqs=64, budget=64)
    for number in range(40):
        add(scheduler, number, 50, handover=True, tenant=b"flood")
    for number in range(40, 50):
        add(scheduler, number, 50, handover=True, tenant=b"other")
    done = {b"flood": 0, b"other": 0}
    while done[b"other"] < 500:
        for live, positions in step(scheduler).chunks.items():
            done[live.request.tenant] += len(positions)
        assert abs(done[b"flood"] - done[b"other"]) <= 64 + 50


def test_tenants_are_not_charged_for_cached_prompts() -> None:
    """One tenant's prompts are cached but for four tokens, those of the other not at all."""
    scheduler = make(num_blocks=4000, budget=4, prefix_cache=True)
    add(scheduler, 0, 80, handover=True)
    while scheduler.lives.waiting or scheduler.lives.running:
        step(scheduler)
    for number in range(1, 101):
        add(scheduler, number, 84, handover=True, tenant=b"cached")
    for number in range(101, 106):
        prompt = [number] * 80
        scheduler.lives.add(EngineRequest(bytes([number]), prompt, tenant=b"other"), handover=True)
    done = {b"cached": 0, b"other": 0}
    for _ in range(150):
        for live, positions in step(scheduler).chunks.items():
            done[live.request.tenant] += len(positions)
    assert sum(done.values()) == 600
    assert abs(done[b"cached"] - done[b"other"]) <= 80 + 4


def test_a_reservation_is_not_charged_for_its_prompt() -> None:
    scheduler = make(num_blocks=2000, seqs=8, budget=8)
    for number in range(1, 5):
        request = EngineRequest(bytes([number]), list(range(80)), tenant=b"decodes")
        assert scheduler.lives.reserve(request) is not None
    add(scheduler, 20, 16, handover=True, tenant=b"decodes")
    add(scheduler, 21, 16, handover=True, tenant=b"other")
    served = next(iter(step(scheduler, 8).chunks))
    assert served.request.tenant == b"decodes", "it came first, and nothing was computed for its tenant"


def test_a_pause_earns_a_tenant_nothing() -> None:
    scheduler = make(num_blocks=2000, seqs=50, budget=50)
    for number in range(10):
        add(scheduler, number, 50, handover=True, tenant=b"busy")
    for _ in range(5):
        step(scheduler)
    for number in range(10, 14):
        add(scheduler, number, 50, handover=True, tenant=b"late")
    served = [next(iter(step(scheduler).chunks)).request.tenant for _ in range(8)]
    assert served.count(b"late") == 4
    assert served != [b"late"] * 4 + [b"busy"] * 4, "they take turns"


def test_of_one_tenant_short_prompts_overtake_long_ones_for_a_bounded_time() -> None:
    scheduler = make(num_blocks=200, budget=16)
    for number, length in enumerate((40, 24, 8, 24)):
        add(scheduler, number, length, handover=True)
    assert tokens(step(scheduler)) == [(2, 0, 8), (1, 0, 8)]
    assert tokens(step(scheduler)) == [(1, 8, 24)]
    add(scheduler, 4, 17, handover=True)  # the tenant was served 24 tokens since the others came
    assert tokens(step(scheduler)) == [(3, 0, 16)]
    order = [number for _ in range(6) for number, _, _ in tokens(step(scheduler))]
    assert order == [3, 0, 0, 0, 4, 4]


@pytest.mark.parametrize(
    ("limit", "tokens"),
    [
        (30, 30),  # no size is that small
        (33, 30),  # 2 decodes and 30 tokens fill 32 rows
        (59, 30),  # 32 rows rather than 61, which would be padded to 64
        (61, 61),  # the prompt would need twice as many steps
        (62, 62),
        (200, 200),  # beyond the largest size there is no padding
    ],
)
def test_a_chunk_fills_a_graph_if_the_next_larger_one_would_be_padded(limit: int, tokens: int) -> None:
    scheduler = make(200, budget=512, mixed_rows=(32, 64))
    for number in (1, 2):
        add(scheduler, number, 4)
    step(scheduler)
    step(scheduler, limit)  # it only decodes
    add(scheduler, 3, 400)
    schedule = step(scheduler, limit)
    assert (len(schedule.chunks), *schedule.size[2:]) == (3, tokens, tokens / 2)
