"""Which held prefills are dropped so that a prefill for a waiting decode worker can start."""

import pytest

from baton.engine.api.request import EngineRequest
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.making_room import to_drop
from baton.engine.core.scheduler import Scheduler

from .scheduling import BLOCK, add, make, step


def held(scheduler: Scheduler, number: int, blocks: int) -> LiveRequest:
    live = add(scheduler, number, blocks * BLOCK, handover=True)
    step(scheduler)
    assert live in scheduler.lives.held
    return live


def dropped(scheduler: Scheduler, *wanted: LiveRequest, fetched: bytes = b"") -> list[int]:
    """The numbers of the held requests that are dropped; the oldest are offered first."""
    order = sorted(scheduler.lives.held, key=lambda live: live.arrival)
    going = to_drop(
        scheduler.lives,
        {live.id for live in wanted}.__contains__,
        [live for live in order if live.id not in fetched],
    )
    return [live.id[0] for live in going]


def numbered(scheduler: Scheduler, wanted: int) -> LiveRequest:
    return next(live for live in scheduler.lives if live.id == bytes([wanted]))


@pytest.fixture
def full() -> Scheduler:
    """Three held requests of one block each leave the headroom, one block."""
    scheduler = make(num_blocks=4, budget=64)
    for number in (1, 2, 3):
        held(scheduler, number, 1)
    return scheduler


def test_no_request_is_dropped_while_there_is_room(full: Scheduler) -> None:
    full.lives.drop(numbered(full, 3))
    assert dropped(full, add(full, 9, BLOCK, handover=True)) == []


def test_the_oldest_make_room_for_a_wanted_one(full: Scheduler) -> None:
    wanted = add(full, 9, BLOCK + 1, handover=True)
    assert dropped(full, wanted) == [1, 2]
    assert dropped(full, wanted, fetched=b"\1") == [2, 3]
    full.lives.drop(numbered(full, 3))
    assert dropped(full, wanted) == [1]


def test_no_request_is_dropped_if_that_would_not_make_the_room(full: Scheduler) -> None:
    large = add(full, 9, 4 * BLOCK, handover=True)
    assert dropped(full, large, fetched=b"\1") == []
    assert dropped(full, large) == [1, 2, 3], "alone it may take the headroom, too"
    full.lives.drop(large)
    first = add(full, 7, 2 * BLOCK, handover=True)
    second = add(full, 8, 3 * BLOCK, handover=True)
    assert dropped(full, second) == [1, 2], "as many as let the first one start"
    full.lives.drop(first)
    assert dropped(full, second, fetched=b"\3") == []


def test_no_request_is_dropped_for_one_that_no_decode_worker_waits_for(full: Scheduler) -> None:
    add(full, 9, BLOCK, handover=True)
    assert dropped(full) == []


def test_requests_earlier_in_the_queue_need_room_too(full: Scheduler) -> None:
    add(full, 8, BLOCK, handover=True)
    assert dropped(full, add(full, 9, BLOCK, handover=True)) == [1, 2]
    assert dropped(full, add(full, 7, BLOCK, handover=True, priority=-1)) == [1]


def test_a_running_request_that_is_not_for_a_handover_does_not_wait() -> None:
    scheduler = make(num_blocks=5, budget=64)
    held(scheduler, 1, 1)
    held(scheduler, 2, 1)
    add(scheduler, 8, BLOCK)
    scheduler.schedule()
    assert (len(scheduler.lives.running), scheduler.lives.pool.free) == (1, 2)
    assert dropped(scheduler, add(scheduler, 9, 2 * BLOCK, handover=True)) == [1]


def test_blocks_that_are_being_freed_count_as_free(full: Scheduler) -> None:
    wanted = add(full, 9, BLOCK, handover=True)
    last = numbered(full, 3)
    last.leases.begin("a transfer")
    full.lives.drop(last)
    assert dropped(full, wanted) == []


def test_no_request_is_dropped_for_one_without_a_seat() -> None:
    scheduler = make(num_blocks=7, seqs=2, budget=64)
    held(scheduler, 1, 1)
    held(scheduler, 2, 1)
    for number in (3, 4):
        add(scheduler, number, 2 * BLOCK, handover=True)
    scheduler.schedule()
    assert (len(scheduler.lives.running), scheduler.lives.pool.free) == (2, 1)
    first = add(scheduler, 9, 3 * BLOCK, handover=True)
    second = add(scheduler, 10, 3 * BLOCK, handover=True)
    assert dropped(scheduler, first, second) == []
    scheduler.lives.drop(scheduler.lives.running[0])
    assert dropped(scheduler, second) == [1], "one seat: the first in the queue needs a block to start"


def reserve(scheduler: Scheduler, number: int, blocks: int) -> LiveRequest:
    live = scheduler.lives.reserve(EngineRequest(bytes([number]), [1] * (blocks * BLOCK - 1)))
    assert live is not None
    return live


def test_a_reservation_is_dropped_last_and_only_if_no_request_is_running() -> None:
    scheduler = make(num_blocks=8, seqs=3, budget=64)
    held(scheduler, 1, 1)
    reserve(scheduler, 5, 2)
    reserve(scheduler, 6, 2)
    first, third, second = spare = [numbered(scheduler, n) for n in (1, 6, 5)]
    wanted = add(scheduler, 9, 4 * BLOCK, handover=True)

    def dropped_now() -> list[LiveRequest]:
        return to_drop(scheduler.lives, {wanted.id}.__contains__, spare)

    assert dropped_now() == [first, third]
    scheduler.lives.join(second)
    spare.remove(second)
    assert dropped_now() == [], "not enough without the blocks that the running request leaves at its end"
    scheduler.lives.drop(wanted)
    wanted = add(scheduler, 8, 3 * BLOCK, handover=True)
    assert dropped_now() == [first], "enough: no reservation goes"


def test_a_reservation_is_dropped_if_reservations_have_all_seats() -> None:
    scheduler = make(num_blocks=30, seqs=2, budget=64)
    first = held(scheduler, 1, 1)
    second, third = (reserve(scheduler, number, 1) for number in (5, 6))
    wanted = add(scheduler, 9, BLOCK, handover=True)

    def dropped_of(*spare: LiveRequest) -> list[LiveRequest]:
        return to_drop(scheduler.lives, {wanted.id}.__contains__, spare)

    assert dropped_of(first, third, second) == [third], "a held request has no seat"
    scheduler.lives.join(second)
    assert dropped_of(first, third) == [], "the running request leaves its seat"
    third.leases.begin("a fetch")
    scheduler.lives.drop(third)
    assert scheduler.lives.can_admit, "its seat is free before its blocks"


def shared(prefix: int, blocks: int, *, number: int) -> EngineRequest:
    """A request of `prefix` blocks, which all these requests share, and `blocks` of its own."""
    own = range(1000 * number, 1000 * number + blocks * BLOCK)
    return EngineRequest(bytes([number]), [*range(prefix * BLOCK), *own])


def test_shared_cached_blocks_need_no_room_and_free_none() -> None:
    """Request 1 holds five blocks, request 2 shares three of them and has one more. Two blocks are free."""
    scheduler = make(num_blocks=8, budget=64, prefix_cache=True)
    for request in (shared(3, 2, number=1), shared(3, 1, number=2)):
        scheduler.lives.add(request, handover=True)
        step(scheduler)
    assert scheduler.lives.pool.free == 2
    hit = scheduler.lives.add(shared(3, 1, number=8), handover=True)
    assert dropped(scheduler, hit) == [], "three of its four blocks are cached"
    scheduler.lives.drop(hit)
    hit = scheduler.lives.add(shared(3, 2, number=9), handover=True)
    assert dropped(scheduler, hit) == [1], "frees two blocks: request 2 holds the shared ones"
    scheduler.lives.drop(hit)
    other = scheduler.lives.add(shared(0, 5, number=7), handover=True)
    assert dropped(scheduler, other) == [1, 2], "the shared blocks are free only without both"
