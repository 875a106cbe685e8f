"""What waits: in order of arrival for room on decode, and bounded in tokens at the door."""

import contextlib
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.gate import MAX_RETRY_AFTER, Account, Admission, DrainRate, Ticket
from router.admission.keys import ANYBODY, ApiKey
from router.errors import Overloaded, RateLimited
from router.generation.room import RoomQueue


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


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def no_limit() -> Account:
    return Account(ANYBODY)


def nothing() -> None:
    pass


def test_admission_is_bounded_in_tokens_and_gives_them_back():
    clock = Clock()
    admission = Admission(1000, lambda: math.inf, clock)
    with admission.admit(no_limit(), [600, 300]) as ticket:
        ticket.line_up([nothing, nothing])
        with pytest.raises(Overloaded), admission.admit(no_limit(), [200]):
            pass
        clock.now += 2
        ticket.generated(0, 1)
        ticket.generated(0, 1)
        assert admission.waiting_tokens == 300
        with admission.admit(no_limit(), [200]):
            assert admission.waiting_tokens == 500
            with pytest.raises(Overloaded) as refusal, admission.admit(no_limit(), [800]):
                pass
            assert refusal.value.retry_after == 2, "500 tokens wait, and 300 went per second"
    assert admission.waiting_tokens == 0


def test_a_request_larger_than_the_bound_is_served_alone():
    admission = Admission(1000, lambda: math.inf)
    with admission.admit(no_limit(), [5000]):
        assert admission.waiting_tokens == 5000


def test_the_drain_rate_is_of_the_last_seconds_in_which_something_waited():
    clock = Clock()
    rate = DrainRate(clock)
    clock.now += 1000
    rate.began()
    assert rate.tokens_per_s() == 0
    for _ in range(4):
        clock.now += 0.5
        rate.add(100)
    assert rate.tokens_per_s() == 200
    for _ in range(40):
        clock.now += 0.5
        rate.add(50)
    assert rate.tokens_per_s() == pytest.approx(100, rel=0.1)
    clock.now += 60
    assert rate.tokens_per_s() == 0


def test_keys_take_turns_at_a_window_of_prompt_tokens():
    """One key sends far more than the workers can take; what another sends later is next."""
    started: list[str] = []
    window = [250.0]
    admission = Admission(10**6, lambda: window[0])
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with contextlib.ExitStack() as stack:

        def ask(account: Account, name: str, *, priority: int = 0) -> Ticket:
            ticket = stack.enter_context(admission.admit(account, [100], priority))
            ticket.line_up([lambda: started.append(name)])
            return ticket

        tickets = [ask(flood, f"f{i}") for i in range(10)]
        assert started == ["f0", "f1", "f2"], "the last one began below the window"
        last = ask(other, "o")
        urgent = ask(flood, "urgent", priority=-1)
        tickets[0].generated(0, 1)
        assert started[3:] == ["urgent"]
        tickets[1].generated(0, 1)
        assert started[4:] == ["o"]
        last.generated(0, 1)
        assert started[5:] == ["f3"]
        tickets[4].close()  # its client went: it never starts
        urgent.close()
        assert started[6:] == ["f5"], "and one that was at the workers makes room"
        window[0] = math.inf  # workers came, or the last one went
        admission.dispatch()
        assert started[7:] == ["f6", "f7", "f8", "f9"]
        assert len(admission.queue) == 0
    assert admission.waiting_tokens == admission._sent_tokens == 0
    assert flood.requests == other.requests == 0


def test_a_start_that_ends_others_does_not_start_them():
    admission = Admission(1000, lambda: 1.0)
    started: list[int] = []
    with admission.admit(no_limit(), [10, 10, 10]) as ticket:

        def first() -> None:
            started.append(0)
            ticket.close()

        ticket.line_up([first, *[lambda: started.append(1)] * 2])
    assert started == [0]
    assert (admission.waiting_tokens, admission._sent_tokens, len(admission.queue)) == (0, 0, 0)


def test_a_key_has_so_many_requests_at_the_same_time():
    account = Account(ApiKey.of("a", "1", max_requests=4), share=0.5)
    admission = Admission(1000, lambda: math.inf)
    with admission.admit(account, [1]):
        with admission.admit(account, [1]):
            with pytest.raises(RateLimited) as refusal, admission.admit(account, [1]):
                pass
            assert refusal.value.code == "rate_limit_exceeded"
            assert "'a'" in refusal.value.message
        with admission.admit(account, [1]):
            assert account.requests == 2
    assert account.requests == 0
    assert Account(ApiKey.of("a", "1", max_requests=1), share=0.1)._max_requests == 1


def test_a_key_has_so_many_tokens_a_minute():
    clock = Clock()
    account = Account(ApiKey.of("a", "1", tokens_per_minute=1200), share=0.5, clock=clock)
    admission = Admission(10**6, lambda: math.inf, clock)

    def ask(prompt: int, output: int) -> None:
        with admission.admit(account, [prompt]) as ticket:
            ticket.line_up([nothing])
            ticket.generated(0, output)

    ask(500, 50)
    ask(900, 10)  # 50 were left: taken, into debt of 860
    with pytest.raises(RateLimited) as refusal:
        ask(1, 1)
    assert refusal.value.retry_after == MAX_RETRY_AFTER, "86 s, but come back and ask"
    clock.now += 80
    with pytest.raises(RateLimited) as refusal:
        ask(1, 1)
    assert refusal.value.retry_after == 6
    clock.now += 7
    ask(1, 1)
    clock.now += 10_000
    ask(600, 0)
    with pytest.raises(RateLimited):
        ask(1, 1)
    assert account.requests == 0
