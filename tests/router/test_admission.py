"""What waits for its turn, in which order, and how much of it may wait."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.account import MAX_RETRY_AFTER, Account
from router.admission.drain_rate import DrainRate
from router.admission.keys import ANY_CLIENT, ApiKey
from router.admission.queue import Admission, Turn, TurnResult
from router.errors import Overloaded, RateLimited
from router.policy import FreeCapacity


@dataclass
class Asker:
    """Takes its turn while workers have free slots. The slots are shared."""

    turn: Turn
    name: str
    started: list[str]
    slots: list[float] = field(default_factory=lambda: [math.inf])
    away: Callable[[], bool] = lambda: False

    def on_turn(self) -> TurnResult:
        if self.away():
            return TurnResult.PARKED
        if not self.slots[0]:
            return TurnResult.NO_CAPACITY
        self.slots[0] -= 1
        self.started.append(self.name)
        return TurnResult.SENT


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def no_limit() -> Account:
    return Account(ANY_CLIENT)


@contextlib.contextmanager
def admitted(
    admission: Admission, account: Account, sizes: Sequence[int], priority: int = 0
) -> Iterator[list[Turn]]:
    with admission.enter(account, sum(sizes)) as entry:
        yield entry.turns(sizes, priority)


def test_admission_is_bounded_in_tokens_and_gives_them_back():
    clock = Clock()
    admission = Admission(1000, lambda: math.inf, clock=clock)
    with admitted(admission, no_limit(), [600, 300]) as turns:
        for turn in turns:
            turn.wait(Asker(turn, "", []))
        with pytest.raises(Overloaded), admitted(admission, no_limit(), [200]):
            pass
        clock.now += 2
        turns[0].generated()
        turns[0].generated()
        assert admission.waiting_tokens == 300
        with admitted(admission, no_limit(), [200]):
            assert admission.waiting_tokens == 500
            with pytest.raises(Overloaded) as refusal, admitted(admission, no_limit(), [800]):
                pass
            assert refusal.value.retry_after == 2, "500 tokens wait, and 300 went per second"
    assert admission.waiting_tokens == 0


def test_an_estimate_is_replaced_when_the_tokens_are_known():
    clock = Clock()
    admission = Admission(1000, lambda: math.inf, clock=clock)
    account = Account(ApiKey.of("a", "1", tokens_per_minute=1000), clock=clock)
    with admission.enter(account, 500) as small, admission.enter(no_limit(), 400) as large:
        assert account._left == 500
        assert len(small.turns([10, 20])) == 2
        assert account._left == 970
        assert (admission.waiting_tokens, account.waiting_tokens) == (430, 30)
        large.turns([900])
        assert admission.waiting_tokens == 930
        with admission.enter(no_limit(), 50) as other:
            with pytest.raises(Overloaded):
                other.turns([80])
            assert admission.waiting_tokens == 930
    with admission.enter(account, 800):
        assert account._left == 200, "no worker had the prompts of the first request"
    assert account._left == 1000, "a request without turns costs nothing"
    assert (admission.waiting_tokens, account.waiting_tokens, account.requests) == (0, 0, 0)


def test_a_request_larger_than_the_bound_is_served_alone():
    admission = Admission(1000, lambda: math.inf)
    with admitted(admission, no_limit(), [5000]):
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


class Gate:
    """An admission over workers of which the test says how busy they are."""

    def __init__(self, *, shared: bool = False) -> None:
        self.window = math.inf
        self.room = FreeCapacity(math.inf, math.inf)
        self.slots = [math.inf]
        self.away = False
        self.started: list[str] = []
        self.admission = Admission(10**6, lambda: self.window, lambda: self.room, shared=shared)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        assert self.admission.waiting_tokens == self.admission._sent_tokens == 0
        assert len(self.admission.queue) == 0

    def ask(self, account: Account, name: str, *, tokens: int = 100, priority: int = 0) -> Asker:
        [turn] = self._stack.enter_context(admitted(self.admission, account, [tokens], priority))
        asker = Asker(turn, name, self.started, self.slots, lambda: self.away)
        turn.wait(asker)
        return asker

    def new(self) -> list[str]:
        """Those that started since it was asked."""
        started, self.started[:] = list(self.started), []
        return started


def test_each_key_has_a_window_of_prompt_tokens():
    """One key sends far more than the workers can take. The prompts of another key do not wait for it."""
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with Gate() as gate:
        gate.window = 250.0
        flooding = [gate.ask(flood, f"f{i}") for i in range(10)]
        assert gate.new() == ["f0", "f1", "f2"], "the last one began below the window"
        assert gate.admission.held_tokens == 700
        gate.ask(other, "o0")
        assert gate.new() == ["o0"]
        urgent = gate.ask(flood, "urgent", priority=-1)
        assert gate.new() == []
        flooding[0].turn.generated()
        assert gate.new() == ["urgent"]
        flooding[1].turn.generated()
        assert gate.new() == ["f3"]
        flooding[4].turn.end()  # its client went: it never starts
        urgent.turn.end()
        assert gate.new() == ["f5"], "and one that was at the workers makes room"
        gate.window = math.inf  # workers came, or the last one went
        gate.admission.dispatch()
        assert gate.new() == ["f6", "f7", "f8", "f9"]


@given(st.lists(st.integers(0, 4), max_size=8))
def test_room_is_given_in_order_of_arrival(offers: list[int]):
    with Gate() as gate:
        gate.slots[0] = 0
        for i in range(12):
            gate.ask(no_limit(), str(i))
        for slots in offers:
            gate.slots[0] = slots
            gate.admission.dispatch()
        served = min(12, sum(offers))
        assert gate.new() == [str(i) for i in range(served)]
        assert gate.admission.waiting_for_decode == 12 - served
        assert gate.admission.held_tokens == 0, "more prefill workers would not help"


def test_what_was_interrupted_goes_before_what_is_new_and_in_its_old_order():
    account = no_limit()
    with Gate() as gate:
        askers = [gate.ask(account, str(i)) for i in range(3)]
        gate.slots[0] = 0
        gate.ask(account, "new")
        for asker in reversed(askers[:2]):
            asker.turn.wait(asker)
        askers[0].turn.wait(askers[0])
        assert gate.new() == ["0", "1", "2"]
        gate.slots[0] = 3
        gate.admission.dispatch()
        assert gate.new() == ["0", "1", "new"]
        assert account.running == 4


def test_one_key_leaves_room_for_others():
    """Seats and memory of decode workers: it has at most eight times what is free."""
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    total = 64
    for positions in (math.inf, 6400.0):
        with Gate(shared=True) as gate:

            def take(gate: Gate = gate, positions: float = positions) -> None:
                """As the pool does, with each request that is sent."""
                taken = flood.running + other.running
                used = flood.positions + other.positions
                gate.room = FreeCapacity(10**6 if positions < math.inf else total - taken, positions - used)

            flooding = []
            for i in range(80):
                flooding.append(gate.ask(flood, f"f{i}"))
                take()
            assert len(gate.new()) == flood.running == 57
            for i in range(6):
                gate.ask(other, f"o{i}")
                take()
            assert gate.new() == [f"o{i}" for i in range(6)], "at once"
            assert gate.admission.waiting_for_decode == 23
            flooding[0].turn.end()
            take()
            gate.admission.dispatch()
            assert gate.new() == [], "one seat is free: it is for another key"
            gate.ask(Account(ApiKey.of("third", "3")), "third")
            assert gate.new() == ["third"]


def test_each_of_several_keys_has_half_of_the_window():
    """So a key that floods has one step of prompts at a worker, which the others do not wait for."""
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with Gate(shared=True) as gate:
        gate.window = 500.0
        for i in range(9):
            gate.ask(flood, f"f{i}")
        assert gate.new() == ["f0", "f1"]
        assert gate.admission.held_tokens == 700
        assert gate.admission.waiting_for_decode == 0
        long = gate.ask(other, "long", tokens=1000)
        gate.ask(other, "o1")
        assert gate.new() == ["long"], "the first of its key may be longer than the window"
        long.turn.generated()
        assert gate.new() == ["o1"]


def test_a_request_that_waits_for_a_worker_has_no_share_of_the_workers():
    """So the requests that waited for a worker go through the window when it comes, as new ones do."""
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with Gate(shared=True) as gate:
        gate.away = True
        waiting = [gate.ask(flood, f"f{i}") for i in range(10)] + [gate.ask(other, "o")]
        assert gate.new() == []
        assert flood.running == flood.sent_tokens == len(gate.admission.queue) == 0
        gate.window, gate.away = 400.0, False
        for asker in waiting:
            asker.turn.wait(asker)
        assert gate.new() == ["f0", "f1", "o"]
        assert (flood.running, flood.sent_tokens) == (2, 200)


def test_a_prompt_that_no_worker_had_costs_its_key_nothing():
    account = Account(ApiKey.of("a", "1", tokens_per_minute=1000), clock=Clock())
    with Gate() as gate:
        gate.slots[0] = 0
        asker = gate.ask(account, "a")
        assert account._left == 900
        asker.turn.end()
        assert account._left == 1000
        gate.slots[0] = 1
        gate.ask(account, "b").turn.end()
        assert account._left == 900


def test_a_key_may_always_have_one_request():
    with Gate(shared=True) as gate:
        gate.room = FreeCapacity(0, 0)
        gate.ask(no_limit(), "a")
        gate.ask(no_limit(), "b")
        assert gate.new() == ["a", "b"]


def test_a_request_without_room_holds_up_other_keys_only_beyond_their_first():
    """A long prompt of one key waits for room: a short one of another key, which has none there, goes on."""
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with Gate(shared=True) as gate:
        gate.ask(flood, "f0")
        gate.slots[0] = 0
        gate.ask(flood, "f1").slots = [0]
        gate.slots = [math.inf]
        first = gate.ask(other, "o0")
        gate.ask(other, "o1")
        assert gate.new() == ["f0", "o0"]
        first.turn.end()
        assert gate.new() == ["o1"]


def test_where_no_key_has_to_share_one_takes_all():
    with Gate() as gate:
        gate.room = FreeCapacity(0, 0)
        account = no_limit()
        for _ in range(20):
            gate.ask(account, "x")
        assert account.running == 20


def test_the_key_that_floods_is_refused_and_not_the_other():
    admission = Admission(900, lambda: 0.0, shared=True)
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(admitted(admission, flood, [100]))
        with pytest.raises(RateLimited, match="key 'flood' has 800 prompt tokens waiting"):
            stack.enter_context(admitted(admission, flood, [100]))
        stack.enter_context(admitted(admission, other, [50]))
    assert flood.waiting_tokens == other.waiting_tokens == admission.waiting_tokens == 0


def test_a_turn_that_ends_others_does_not_start_them():
    admission = Admission(1000, lambda: 1.0)
    started: list[str] = []
    with admitted(admission, no_limit(), [10, 10, 10]) as turns:

        class Ends(Asker):
            def on_turn(self) -> TurnResult:
                for turn in turns:
                    turn.end()
                return super().on_turn()

        askers = [Ends(turns[0], "0", started), *(Asker(turn, "other", started) for turn in turns[1:])]
        for asker in askers:
            asker.turn.wait(asker)
    assert started == ["0"]
    assert (admission.waiting_tokens, admission._sent_tokens, len(admission.queue)) == (0, 0, 0)


def test_a_key_has_so_many_requests_at_the_same_time():
    account = Account(ApiKey.of("a", "1", max_requests=4), share=0.5)
    admission = Admission(1000, lambda: math.inf)
    with admitted(admission, account, [1]):
        with admitted(admission, account, [1]):
            with pytest.raises(RateLimited) as refusal, admitted(admission, account, [1]):
                pass
            assert refusal.value.code == "rate_limit_exceeded"
            assert "'a'" in refusal.value.message
        with admitted(admission, account, [1]):
            assert account.requests == 2
    assert account.requests == 0
    assert Account(ApiKey.of("a", "1", max_requests=1), share=0.1)._max_requests == 1


def test_a_key_has_so_many_tokens_a_minute():
    clock = Clock()
    account = Account(ApiKey.of("a", "1", tokens_per_minute=1200), share=0.5, clock=clock)
    admission = Admission(10**6, lambda: math.inf, clock=clock)

    def ask(prompt: int, output: int) -> None:
        with admitted(admission, account, [prompt]) as [turn]:
            turn.wait(Asker(turn, "", []))
            for _ in range(output):
                turn.generated()

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
