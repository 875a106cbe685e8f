"""Requests that would wait too long are refused at once."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.router.admission.entry import entering
from baton.router.admission.expected_wait import Ahead, ExpectedWait
from baton.router.admission.keys import ANY_CLIENT, MAX_RETRY_AFTER, Account, ApiKey
from baton.router.admission.queue import Admission, Turn, TurnResult
from baton.router.errors import Overloaded, RateLimited
from baton.router.policy.decode import FreeCapacity
from baton.router.policy.placement import PrefillWindow

FOUR_GPUS = PrefillWindow(4 * 2 * 8192.0, 8192.0, tokens_per_s=4 * 40_000.0)
MAX_WAIT = 60.0


class Router:
    """An admission queue in front of workers that compute what the test says."""

    def __init__(self, window: PrefillWindow = FOUR_GPUS, *, shared: bool = False) -> None:
        self.now, self.window, self.seats = 1000.0, window, math.inf
        self.admission = Admission(
            10**12,
            lambda: self.window,
            lambda: FreeCapacity(self.seats, math.inf),
            max_wait=MAX_WAIT,
            shared=shared,
            clock=lambda: self.now,
        )
        self.accepted: list[Turn] = []  # without a first token
        self.account = Account(ANY_CLIENT)
        self._stack = contextlib.ExitStack()

    def ask(self, tokens: int, account: Account | None = None, *, max_wait: float = math.inf) -> Turn:
        entry = self._stack.enter_context(entering(self.admission, account or self.account))
        entry.max_wait = max_wait
        entry.expect(tokens)
        [turn] = entry.turns([tokens])
        self.accepted.append(turn)
        turn.wait(self.on_turn)
        return turn

    def on_turn(self) -> TurnResult:
        if self.admission.running >= self.seats:
            return TurnResult.NO_CAPACITY
        return TurnResult.SENT

    def computes(self, tokens: float, seconds: float) -> None:
        """Workers give first tokens in order, at this speed, for so long."""
        end = self.now + seconds
        while self.accepted and self.now < end:
            turn = self.accepted[0]
            self.now += turn.tokens / tokens
            turn.generated()
            self.accepted.remove(turn)
        self.now = max(self.now, end)

    def refused(self, tokens: int = 1, account: Account | None = None, *, max_wait: float = math.inf) -> int:
        """Returns Retry-After."""
        with pytest.raises(Overloaded) as refusal:
            self.ask(tokens, account, max_wait=max_wait)
        assert refusal.value.retry_after is not None
        return refusal.value.retry_after


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made._stack.close()
    made.admission.assert_whole()


def test_later_turns_of_long_sessions_are_not_refused(router: Router):
    """64 prompts of 200,000 tokens, of which 1,000 are new, are half a second of work."""
    router.ask(200_000).computes(1000)
    assert router.admission.expected_wait == pytest.approx(1000 / 160_000)
    for _ in range(63):
        router.ask(200_000).computes(1000)
    assert router.admission.expected_wait == pytest.approx(64_000 / 160_000)
    for turn in router.accepted:
        turn.generated()
    turn = router.ask(200_000)
    assert router.admission.uncached_tokens == pytest.approx(1000, rel=0.01), "the usual part"
    turn.computes(0)
    assert router.admission.uncached_tokens == 1, "its last token is computed in any case"


def test_a_request_is_refused_when_it_would_wait_longer_than_it_may(router: Router):
    for _ in range(40):
        router.ask(80_000)
    assert router.admission.expected_wait == pytest.approx(20, rel=0.01)
    assert router.refused(max_wait=19.5) == 20
    router.ask(10_000, max_wait=20.1)
    for _ in range(80):
        router.ask(80_000)
    assert router.refused() == MAX_RETRY_AFTER, "clients ignore more"
    assert router.refused(max_wait=3600.0) == MAX_RETRY_AFTER, "the bound of the router holds"
    router.computes(160_000, 2.0)
    router.ask(1)


def test_what_the_queue_got_counts_more_than_the_speed_of_workers(router: Router):
    """Caches make first tokens come sooner than the speed says, other routers and full workers later."""
    router.window = replace(FOUR_GPUS, tokens=1.0)
    for speed in (12.0, 0.25):
        router.computes(1e12, 1.0)
        router.now += 1000
        for _ in range(20):
            router.ask(100_000)
        assert router.admission.expected_wait == pytest.approx(2e6 / 160_000, rel=0.01)
        for _ in range(100):
            router.computes(speed * 160_000, 1.0)
            while router.admission.waiting_tokens < 2e6:
                router.ask(100_000)
        assert router.admission.expected_wait == pytest.approx(2e6 / speed / 160_000, rel=0.1)


def test_prompts_of_other_routers_are_ahead(router: Router):
    router.window = replace(FOUR_GPUS, others=160_000)
    assert router.admission.expected_wait == 1
    router.ask(64_000)
    assert router.admission.expected_wait == pytest.approx(1.4), "there is no queue yet"
    for _ in range(9):
        router.ask(64_000)
    windows = 640_000 / FOUR_GPUS.tokens
    assert router.admission.expected_wait == pytest.approx(4 + windows, rel=0.01)


def test_seats_that_workers_free_count_while_they_are_what_is_short(router: Router):
    """Four seats, and answers of 20 s: one is free every 5 s."""
    router.seats = 4
    turns = [router.ask(10) for _ in range(4)]
    assert router.admission.expected_wait < 1
    for _ in range(20):
        router.ask(10)
    assert router.admission.expected_wait < 1, "none has ended yet"
    for turn in turns:
        turn.generated()
    router.now += 20
    for turn in turns:
        turn.end()
    router.admission.dispatch()
    assert router.admission.running == 4
    assert router.admission.expected_wait == pytest.approx(16 * 5, rel=0.01)
    assert router.refused() == MAX_RETRY_AFTER
    for turn in router.accepted[-5:]:
        turn.end()
    assert router.refused(max_wait=54) == 55


def test_a_key_with_little_waiting_does_not_wait_for_a_key_with_much():
    router = Router(shared=True)
    flood, other = Account(ApiKey.of("flood", "1")), Account(ApiKey.of("other", "2"))
    with router._stack:
        for _ in range(61):
            router.ask(160_000, flood)
        with pytest.raises(RateLimited, match="key 'flood' has 9760000 prompt tokens waiting: the request"):
            router.ask(1, flood)
        router.ask(160_000, other, max_wait=5.0)
        router.ask(160_000, other, max_wait=5.0)
        assert router.refused(1, other, max_wait=1.5) == 4, "two of its own, and two of the flood"
        router.refused(1, flood)
    router.admission.assert_whole()


def test_the_wait_of_a_key_counts_the_uncached_tokens_of_each():
    """One has long sessions, of which little is computed; the other has prompts that are not cached."""
    router = Router(shared=True)
    sessions, fresh = Account(ApiKey.of("sessions", "1")), Account(ApiKey.of("fresh", "2"))
    with router._stack:
        for _ in range(40):
            router.ask(200_000, sessions).computes(1000)
        for _ in range(60):
            router.ask(160_000, fresh)
        with pytest.raises(RateLimited, match=r"the request would wait about 60\.2 s"):
            router.ask(1, fresh)
        router.ask(200_000, sessions, max_wait=1.0).computes(1000)
    router.admission.assert_whole()
    assert sessions.uncached_tokens == fresh.uncached_tokens == 0


def test_the_usual_part_that_is_not_cached_is_that_of_the_key():
    router = Router(shared=True)
    sessions, fresh = Account(ApiKey.of("sessions", "1")), Account(ApiKey.of("fresh", "2"))
    with router._stack:
        for account, computed in ((sessions, 1000), (fresh, 200_000)):
            turn = router.ask(200_000, account)
            turn.computes(computed)
            turn.generated()
            turn.end()
        router.ask(200_000, sessions)
        assert router.admission.uncached_tokens == sessions.uncached_tokens == 1000
        router.ask(200_000, fresh)
        assert fresh.uncached_tokens == 200_000


def test_nothing_that_is_measured_makes_the_wait_nonsense():
    wait = ExpectedWait(0.0)
    wait.queued(True, 0.0)
    nothing = Ahead(0, 0, 0)
    assert wait.seconds(nothing, PrefillWindow(math.inf), 1e6) == 0
    assert wait.seconds(nothing, FOUR_GPUS, 1e6) in (0, math.inf)
    assert wait.seconds(Ahead(5, 3, 0), FOUR_GPUS, 1e6) == math.inf
    wait.answered(5, 1e6)
    assert 0 < wait.seconds(Ahead(5, 3, 1), FOUR_GPUS, 1e6 - 5) < math.inf, "also if a clock goes back"
