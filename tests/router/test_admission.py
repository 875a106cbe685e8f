"""The admission queue: its bound of memory, its order, and the shares of keys."""

import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.admission.entry import entering
from baton.router.admission.key_counts import KeyCounts
from baton.router.admission.keys import ANY_CLIENT, MAX_RETRY_AFTER, Account, ApiKey
from baton.router.admission.queue import Admission, Turn, TurnResult
from baton.router.errors import Overloaded, RateLimited
from baton.router.policy.decode import FreeCapacity
from baton.router.policy.placement import PrefillWindow


@dataclass
class Generation:
    """Takes its turn while workers have free slots. All generations share the slots."""

    turn: Turn
    name: str
    started: list[str]
    slots: list[float] = field(default_factory=lambda: [math.inf])
    away: Callable[[], bool] = lambda: False
    queued: bool = False  # the prompt queues at a prefill worker
    computed: int | None = None  # tokens of the prompt that are not cached

    def on_turn(self) -> TurnResult:
        if self.away():
            return TurnResult.PARKED
        if not self.slots[0]:
            return TurnResult.NO_CAPACITY
        self.slots[0] -= 1
        self.started.append(self.name)
        if self.computed is not None:
            self.turn.computes(self.computed)
        return TurnResult.QUEUED if self.queued else TurnResult.SENT


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
    with entering(admission, account) as entry:
        entry.expect(sum(sizes))
        yield entry.turns(sizes, priority)


def test_an_estimate_is_replaced_when_the_tokens_are_known():
    clock = Clock()
    admission = Admission(1000, lambda: PrefillWindow(math.inf), clock=clock)
    account = Account(ApiKey.of("a", "1", tokens_per_minute=1000), clock=clock)
    with entering(admission, account) as small, entering(admission, no_limit()) as large:
        small.expect(500)
        large.expect(400)
        assert account.tokens_left == 500
        assert len(small.turns([10, 20])) == 2
        assert account.tokens_left == 970
        assert (admission.waiting_tokens, account.waiting_tokens) == (430, 30)
        large.turns([900])
        assert admission.waiting_tokens == 930
        with entering(admission, no_limit()) as other:
            other.expect(50)
            with pytest.raises(Overloaded):
                other.expect(80)
            other.expect(50)
            with pytest.raises(Overloaded):
                other.turns([80])
            assert admission.waiting_tokens == 930
    with entering(admission, account) as unused:
        unused.expect(800)
        assert account.tokens_left == 200, "no worker had the prompts of the first request"
    assert account.tokens_left == 1000, "a request that started no generation costs nothing"
    assert (admission.waiting_tokens, account.waiting_tokens, account.requests) == (0, 0, 0)


def test_a_request_larger_than_the_bound_is_served_alone():
    admission = Admission(1000, lambda: PrefillWindow(math.inf))
    with admitted(admission, no_limit(), [5000]):
        assert admission.waiting_tokens == 5000


class Router:
    """An admission queue in front of workers with a load that the test sets."""

    def __init__(self, *, shared: bool = False) -> None:
        self.window = self.step = math.inf
        self.room = FreeCapacity(math.inf, math.inf)
        self.slots = [math.inf]
        self.away = False
        self.started: list[str] = []
        self.admission = Admission(
            10**6, lambda: PrefillWindow(self.window, self.step), lambda: self.room, shared=shared
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Router":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self.admission.assert_whole()

    def ask(
        self,
        account: Account,
        name: str,
        *,
        tokens: int = 100,
        priority: int = 0,
        queued: bool = False,
        computed: int | None = None,
    ) -> Generation:
        [turn] = self._stack.enter_context(admitted(self.admission, account, [tokens], priority))
        generation = Generation(turn, name, self.started, self.slots, lambda: self.away, queued, computed)
        turn.wait(generation.on_turn)
        return generation

    def new(self) -> list[str]:
        """Returns the generations that started since the last call."""
        started, self.started[:] = list(self.started), []
        return started


def test_keys_take_turns_by_the_tokens_that_are_computed():
    """One key's prompts are cached but for 40 tokens. Its share is as many computed tokens as the other's."""
    cached, other = Account(ApiKey.of("cached", "1")), Account(ApiKey.of("other", "2"))
    with Router(shared=True) as router:
        router.slots[0] = 0
        asked = {f"{a.key.name} {i}": (a, router.ask(a, f"{a.key.name} {i}", tokens=4000))
                 for i in range(60) for a in (cached, other)}  # fmt: skip
        for i in range(60):
            router.slots[0] = 1
            router.admission.dispatch()
            [name] = router.new()
            account, generation = asked[name]
            if account is cached:
                generation.turn.computes(100 if i % 2 else 40)  # an estimate, if it is not right yet
                generation.turn.computes(40)
            generation.turn.end()
        computed = {a: router.admission.queue.served[a] for a in (cached, other)}
        assert sum(name.startswith("cached") for name in asked if not asked[name][1].turn.is_new) > 50
        assert abs(computed[cached] - computed[other]) <= 4000


def test_of_one_key_a_prompt_goes_first_of_which_little_must_be_computed():
    account = no_limit()
    with Router() as router:
        router.slots[0] = 0
        router.ask(account, "long", tokens=4000)
        [turn] = router._stack.enter_context(admitted(router.admission, account, [5000]))
        turn.computes(100)
        turn.wait(Generation(turn, "cached", router.started, router.slots).on_turn)
        router.ask(account, "short", tokens=300)
        router.slots[0] = 3
        router.admission.dispatch()
        assert router.new() == ["cached", "short", "long"]


def test_a_priority_goes_before_other_keys_only_down_to_the_limit_of_its_key():
    plain, trusted = Account(ApiKey.of("plain", "1")), Account(ApiKey.of("trusted", "2", min_priority=-5))
    with Router(shared=True) as router:
        first = [router.ask(account, "running") for account in (plain, trusted)]
        router.new()
        router.slots[0] = 0
        for account, name, priority in (
            (trusted, "trusted, normal", 0),
            (plain, "normal", 0),
            (plain, "greedy", -(2**31)),
            (trusted, "later", 3),
            (trusted, "urgent", -7),
        ):
            router.ask(account, name, priority=priority)
        router.admission.queue.charge(plain, 150)  # so the other key is next
        router.slots[0] = 10
        first[0].turn.end()
        assert router.new() == ["urgent", "trusted, normal", "greedy", "normal", "later"]


@pytest.mark.all
@given(st.lists(st.integers(0, 4), max_size=8))
def test_capacity_is_given_in_order_of_arrival(offers: list[int]):
    with Router() as router:
        router.slots[0] = 0
        for i in range(12):
            router.ask(no_limit(), str(i))
        for slots in offers:
            router.slots[0] = slots
            router.admission.dispatch()
        served = min(12, sum(offers))
        assert router.new() == [str(i) for i in range(served)]
        assert router.admission.waiting_for_decode == 12 - served
        assert router.admission.held_tokens == 0, "more prefill workers would not help"


def test_interrupted_generations_go_before_new_ones_in_their_old_order():
    account = no_limit()
    with Router() as router:
        generations = [router.ask(account, str(i)) for i in range(3)]
        router.slots[0] = 0
        router.ask(account, "new")
        for generation in reversed(generations[:2]):
            generation.turn.wait(generation.on_turn)
        generations[0].turn.wait(generations[0].on_turn)
        assert router.new() == ["0", "1", "2"]
        router.slots[0] = 3
        router.admission.dispatch()
        assert router.new() == ["0", "1", "new"]
        assert account.running == 4


def test_one_key_leaves_capacity_for_other_keys():
    """It has at most eight times the free slots and positions of the decode workers."""
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    total = 64
    for positions in (math.inf, 6400.0):
        with Router(shared=True) as router:

            def take(router: Router = router, positions: float = positions) -> None:
                """Updates the free capacity, as the pool does with each request that is sent."""
                taken = flood.running + other.running
                used = flood.positions + other.positions
                router.room = FreeCapacity(10**6 if positions < math.inf else total - taken, positions - used)

            flooding = []
            for i in range(80):
                flooding.append(router.ask(flood, f"f{i}"))
                take()
            assert len(router.new()) == flood.running == 57
            for i in range(6):
                router.ask(other, f"o{i}")
                take()
            assert router.new() == [f"o{i}" for i in range(6)], "at once"
            assert router.admission.waiting_for_decode == 23
            flooding[0].turn.end()
            take()
            router.admission.dispatch()
            assert router.new() == [], "the free slot is for another key"
            router.ask(Account(ApiKey.of("third", "3")), "third")
            assert router.new() == ["third"]


def test_a_queued_prefill_takes_no_share_of_the_decode_workers():
    """Otherwise prefills that wait for blocks could keep a started one, which holds them, from its decode."""
    account = Account(ApiKey.of("a", "1"))
    with Router(shared=True) as router:
        queued = [router.ask(account, str(i), queued=True) for i in range(3)]
        assert router.new() == ["0", "1", "2"]
        assert (account.running, account.positions, account.in_window) == (0, 0, 300)
        router.room = FreeCapacity(0, 0)
        queued[1].queued = False
        queued[1].turn.wait(queued[1].on_turn)
        assert router.new() == ["1"]
        queued[1].turn.generated()
        assert (account.running, account.positions, account.in_window) == (1, 101, 200)


def test_a_prompt_longer_than_a_step_takes_a_step_of_the_window():
    """Otherwise all others wait until it is computed, also beside idle workers."""
    account = no_limit()
    with Router() as router:
        router.window, router.step = 400.0, 200.0
        router.ask(account, "long", tokens=100_000)
        for i in range(4):
            router.ask(account, str(i))
        assert router.new() == ["long", "0", "1"]


def test_only_what_is_not_cached_waits_for_prefill_workers():
    account = no_limit()
    with Router() as router:
        router.window = 100.0
        first, *others = [router.ask(account, str(i), tokens=1_000, computed=10) for i in range(20)]
        for other in others:  # as far as known
            other.turn.computes(10)
        assert router.admission.held_tokens == 100, "the part that more prefill workers would compute"
        first.turn.computes(200)  # its worker has lost a part
        assert router.admission.held_tokens == 100
        first.turn.generated()
        assert router.admission.held_tokens == 90


def test_each_of_several_keys_has_half_of_the_window():
    """A key that sends too much then has one step of prompts at a worker. Other keys do not wait for more."""
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with Router(shared=True) as router:
        router.window = 500.0
        for i in range(9):
            router.ask(flood, f"f{i}")
        assert router.new() == ["f0", "f1"]
        assert router.admission.held_tokens == 700
        assert router.admission.waiting_for_decode == 0
        long = router.ask(other, "long", tokens=1000)
        router.ask(other, "o1")
        assert router.new() == ["long"], "the first of its key may be longer than the window"
        long.turn.generated()
        assert router.new() == ["o1"]


def test_a_parked_generation_uses_no_slot_and_no_window():
    """When a worker comes, parked generations pass the window like new ones."""
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with Router(shared=True) as router:
        router.away = True
        waiting = [router.ask(flood, f"f{i}") for i in range(10)] + [router.ask(other, "o")]
        assert router.new() == []
        assert flood.running == flood.in_window == len(router.admission.queue) == 0
        router.window, router.away = 400.0, False
        for generation in waiting:
            generation.turn.wait(generation.on_turn)
        assert router.new() == ["f0", "f1", "o"]
        assert (flood.running, flood.in_window) == (2, 200)


def test_a_prompt_that_no_worker_had_costs_its_key_nothing():
    account = Account(ApiKey.of("a", "1", tokens_per_minute=1000), clock=Clock())
    with Router() as router:
        router.slots[0] = 0
        generation = router.ask(account, "a")
        assert account.tokens_left == 900
        generation.turn.end()
        assert account.tokens_left == 1000
        router.slots[0] = 1
        router.ask(account, "b").turn.end()
        assert account.tokens_left == 900


def test_a_generation_without_capacity_lets_the_first_of_another_key_pass():
    """A long prompt waits for capacity. A short prompt of a key without running generations overtakes it."""
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with Router(shared=True) as router:
        router.ask(flood, "f0")
        router.slots[0] = 0
        router.ask(flood, "f1").slots = [0]
        router.slots = [math.inf]
        first = router.ask(other, "o0")
        router.ask(other, "o1")
        assert router.new() == ["f0", "o0"]
        first.turn.end()
        assert router.new() == ["o1"]


def test_a_single_key_may_use_all_capacity():
    with Router() as router:
        router.room = FreeCapacity(0, 0)
        account = no_limit()
        for _ in range(20):
            router.ask(account, "x")
        assert account.running == 20


def test_the_key_with_too_many_waiting_tokens_is_refused_and_not_the_other():
    admission = Admission(900, lambda: PrefillWindow(0.0), shared=True)
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(admitted(admission, flood, [100]))
        with pytest.raises(RateLimited, match="key 'flood' has 800 prompt tokens waiting"):
            stack.enter_context(admitted(admission, flood, [100]))
        stack.enter_context(admitted(admission, other, [50]))
    assert flood.waiting_tokens == other.waiting_tokens == admission.waiting_tokens == 0


def test_generations_that_end_during_a_turn_do_not_start():
    admission = Admission(1000, lambda: PrefillWindow(1.0))
    started: list[str] = []
    with admitted(admission, no_limit(), [10, 10, 10]) as turns:

        class Ends(Generation):
            def on_turn(self) -> TurnResult:
                for turn in turns:
                    turn.end()
                return super().on_turn()

        generations = [
            Ends(turns[0], "0", started),
            *(Generation(turn, "other", started) for turn in turns[1:]),
        ]
        for generation in generations:
            generation.turn.wait(generation.on_turn)
    assert started == ["0"]
    admission.assert_whole()


def test_the_requests_of_a_key_are_limited():
    account = Account(ApiKey.of("a", "1", max_requests=2))
    admission = Admission(1000, lambda: PrefillWindow(math.inf))
    with admitted(admission, account, [1]):
        with admitted(admission, account, [1]):
            with pytest.raises(RateLimited) as refusal, admitted(admission, account, [1]):
                pass
            assert refusal.value.code == "rate_limit_exceeded"
            assert refusal.value.message == "key 'a' has 2 requests running, and may have 2"
        with admitted(admission, account, [1]):
            assert account.requests == 2
    assert account.requests == 0


@pytest.fixture
def processes() -> Iterator[list[KeyCounts]]:
    """The counts of three router processes, which share memory."""
    fd = os.memfd_create("test")
    yield [KeyCounts(fd, 3, number) for number in range(3)]
    os.close(fd)


def of_all(
    key: ApiKey, processes: list[KeyCounts], clock: Callable[[], float] = time.monotonic
) -> list[Account]:
    """Its account in each process. The supervisor adds the key, and the processes find it."""
    for counts in processes:
        counts.add([key.account])
    return [Account(key, counts, clock) for counts in processes]


def test_a_limit_of_requests_holds_in_all_processes_together(processes: list[KeyCounts]):
    key, other = ApiKey.of("a", "1", max_requests=3), ApiKey.of("b", "2", max_requests=1)
    first, second, third = of_all(key, processes)
    of_all(other, processes)[1].enter()
    for account in (first, first, second):
        account.enter()
    for account in (first, second, third):
        with pytest.raises(RateLimited, match="has 3 requests running, and may have 3"):
            account.enter()
    first.leave()
    third.enter()
    with pytest.raises(RateLimited):
        second.enter()
    processes[2].ended(0)  # with its other request
    second.enter()
    with pytest.raises(RateLimited):
        third.enter()
    assert [account.requests for account in (second, third)] == [2, 1]


def test_a_bucket_of_tokens_is_one_for_all_processes(processes: list[KeyCounts]):
    clock, rng = Clock(), random.Random(1)
    key = ApiKey.of("a", "1", tokens_per_minute=600)
    accounts = of_all(key, processes, clock)
    level = 600.0
    for _ in range(2000):
        passed, tokens = rng.choice([0, 0, 0.5, 2, 30, 300]), rng.choice([1, 1, 20, 200, -10])
        clock.now += passed
        level = min(600.0, level + 10 * passed)
        rng.choice(accounts).spend(tokens)
        level -= tokens
        assert [round(account.tokens_left, 6) for account in accounts] == [round(min(600.0, level), 6)] * 3
    processes[0].ended(1)
    assert accounts[2].tokens_left == pytest.approx(min(600.0, level)), "what it spent stays spent"


def test_the_tokens_per_minute_of_a_key_are_limited():
    clock = Clock()
    account = Account(ApiKey.of("a", "1", tokens_per_minute=600), clock=clock)
    admission = Admission(10**6, lambda: PrefillWindow(math.inf), clock=clock)

    def ask(prompt: int, output: int) -> None:
        with admitted(admission, account, [prompt]) as [turn]:
            turn.wait(Generation(turn, "", []).on_turn)
            for _ in range(output):
                turn.generated()

    ask(500, 50)
    ask(900, 10)  # 50 tokens are left; the request is accepted, and 860 are missing afterwards
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
