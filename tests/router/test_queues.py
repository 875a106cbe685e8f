"""What waits: in order of arrival for room on decode, and bounded in tokens at the door."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission import Admission
from router.errors import Overloaded
from router.room import RoomQueue


@dataclass
class Waiter:
    arrival: int
    free: list[int]  # slots left, shared
    served: list[int]
    refused: int = 0
    asked: list[int] = field(default_factory=list)

    def on_room(self) -> bool:
        if not self.free[0]:
            return False
        self.free[0] -= 1
        self.served.append(self.arrival)
        return True


@given(st.permutations(range(12)), st.lists(st.integers(0, 4), max_size=8))
def test_served_in_order_of_arrival_however_they_were_queued(order, offers):
    room, free, served = RoomQueue(), [0], []
    for arrival in order:
        room.wait(Waiter(arrival, free, served))
    for slots in offers:
        free[0] = slots
        room.offer()
    assert served == list(range(min(12, sum(offers))))
    assert len(room) == 12 - len(served)


def test_nobody_overtakes_who_waits():
    room, early = RoomQueue(), Waiter(3, [0], [])
    assert not room.blocks(Waiter(9, [0], []))
    room.wait(early)
    assert room.blocks(Waiter(9, [0], []))
    assert not room.blocks(Waiter(1, [0], []))
    assert not room.blocks(early)
    room.leave(early)
    assert not room.blocks(Waiter(9, [0], []))


def test_admission_is_bounded_in_tokens_and_gives_them_back():
    admission = Admission(1000)
    with admission.admit([600, 300], tokens_per_s=lambda: 100) as ticket:
        with pytest.raises(Overloaded) as refusal, admission.admit([200], tokens_per_s=lambda: 100):
            pass
        assert refusal.value.retry_after == 9
        ticket.started(0)
        ticket.started(0)
        assert admission.waiting_tokens == 300
        with admission.admit([200], tokens_per_s=lambda: 100):
            assert admission.waiting_tokens == 500
    assert admission.waiting_tokens == 0


def test_a_request_larger_than_the_bound_is_served_alone():
    admission = Admission(1000)
    with admission.admit([5000], tokens_per_s=lambda: 0):
        assert admission.waiting_tokens == 5000
