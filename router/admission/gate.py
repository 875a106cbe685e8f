"""Which requests are let in, and when they are served.

Requests are refused beyond what one key may use (`Account`) and beyond a bounded number of waiting prompt
tokens. All others go through one queue (`fairness`), in which keys take turns. The first of
the queue goes to the workers when three things hold: they have less than a window of its key's prompts, a
decode worker has room, and its key leaves a part of the decode pool to other keys. A request that was
interrupted waits in the same queue, before those that never ran. A request for which there is no room holds
up the others, but not the only request of another key.

What waits for what: a request that waits here holds no seat and no share. Neither does a request that waits
for a worker to come; it comes back here with the worker. Each request with a seat ends, or comes back here,
without waiting for another one; so the first of the queue always gets its turn.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

from router.admission.fairness import FairQueue
from router.admission.keys import ApiKey
from router.errors import Overloaded, RateLimited
from router.policy import FreeRoom

MAX_RETRY_AFTER = 60
KEY_SHARE = 8.0
"""Where there are several keys, one may use so many times what it leaves free: 8/9 if it is alone. It holds
for seats and memory of the decode workers, and for the tokens that may wait (dynamic thresholds: Choudhury
and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998)."""
OUTPUT_WEIGHT = 2.0
"""What an output token counts beside a prompt token when keys share."""
_RATE_SECONDS = 10.0
_MINUTE = 60.0

Clock = Callable[[], float]


class Account:
    """What one key uses of this process, which has a `share` of what the key may use in all.

    Tokens come back at an even rate, up to a minute's worth. Debt is allowed: a request is taken while
    anything is left, and the next ones wait until the debt is paid, so that no request is too long for a key.

    Attributes:
        requests: that entered and did not leave.
        waiting_tokens: prompt tokens of its generations without a first token.
        sent_tokens: of these, tokens that workers have.
        seats: its generations that have their turn: that workers work for.
        positions: of KV that these hold, prompt and output.
    """

    def __init__(self, key: ApiKey, share: float = 1.0, clock: Clock = time.monotonic) -> None:
        self.key = key
        self.share = share
        self.requests = self.waiting_tokens = self.sent_tokens = self.seats = self.positions = 0
        self._clock = clock
        self._max_requests = None if key.max_requests is None else max(1, round(key.max_requests * share))
        self._per_minute = None if key.tokens_per_minute is None else key.tokens_per_minute * share
        self._left = self._per_minute or 0.0
        self._counted_at = clock()

    def enter(self) -> None:
        """Raises RateLimited. Each that entered leaves."""
        name = self.key.name
        if self._max_requests is not None and self.requests >= self._max_requests:
            text = f"key {name!r} has {self.requests} requests running, and may have {self._max_requests}"
            raise RateLimited(text, retry_after=1)
        if self._per_minute is not None:
            self._refill(self._per_minute)
            if self._left <= 0:
                wait = -self._left / self._per_minute * _MINUTE
                text = f"key {name!r} has used its {self._per_minute:g} tokens per minute"
                raise RateLimited(text, retry_after=max(1, min(MAX_RETRY_AFTER, round(wait + 0.5))))
        self.requests += 1

    def leave(self) -> None:
        self.requests -= 1

    def spend(self, tokens: int) -> None:
        if self._per_minute is not None:
            self._refill(self._per_minute)
            self._left -= tokens

    def _refill(self, per_minute: float) -> None:
        now = self._clock()
        self._left = min(per_minute, self._left + (now - self._counted_at) / _MINUTE * per_minute)
        self._counted_at = now


class DrainRate:
    """How many waiting tokens go per second, over the last ten seconds in which there were any."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._gone: deque[tuple[float, int]] = deque()
        self._total = 0
        self._busy_since = clock()

    def began(self) -> None:
        """From here on something waits."""
        self._busy_since = self._clock()
        self._gone.clear()
        self._total = 0

    def add(self, tokens: int) -> None:
        now = self._clock()
        self._gone.append((now, tokens))
        self._total += tokens
        self._forget(now)

    def tokens_per_s(self) -> float:
        now = self._clock()
        self._forget(now)
        passed = min(_RATE_SECONDS, now - self._busy_since)
        return self._total / passed if passed > 0 else 0.0

    def _forget(self, now: float) -> None:
        while self._gone and self._gone[0][0] < now - _RATE_SECONDS:
            self._total -= self._gone.popleft()[1]


class Taken(Enum):
    """What a generation made of its turn."""

    SERVED = auto()  # workers have it
    NO_ROOM = auto()  # decode workers have no room now: it stays the first of the queue
    LATER = auto()  # it waits for something else than room, and joins the queue again after that


class Taker(Protocol):
    """A generation, as the queue sees it."""

    def on_turn(self) -> Taken:
        """Its turn: it asks workers."""
        ...


class Turn:
    """One generation's place, from its admission to its end: admitted → (waits → has its turn) … → ended."""

    def __init__(self, admission: "Admission", account: Account, priority: int, tokens: int) -> None:
        """`tokens`: of its prompt."""
        self._admission = admission
        self._account = account
        self.tokens = tokens
        self._priority = priority
        self._ticket: int | None = None  # in the queue, from the first wait on
        self._positions = tokens
        self._sent = False  # workers had it once
        self._answered = False  # it has its first token
        self._seated = False
        self._ended = False
        self._taker: Taker | None = None

    def wait(self, taker: Taker) -> None:
        """Its `on_turn` is called when the turn comes, now or later. Harmless while it waits."""
        admission = self._admission
        if self._ended or self.waits:
            return
        self._stand_up()
        self._taker = taker
        self._ticket = admission.queue.push(self._account, self._rank, self, self._ticket)
        admission.dispatch()

    def take(self) -> bool:
        """Said by the queue, which has popped it. False: it is in the queue again."""
        queue, account = self._admission.queue, self._account
        assert self._taker is not None, "it waited"
        assert self._ticket is not None
        taken = self._taker.on_turn()
        if taken is Taken.NO_ROOM:
            queue.put_back(account, self._rank, self, self._ticket)
            return False
        if taken is Taken.LATER or self._ended or self.waits:
            return True
        self._seated = True
        account.seats += 1
        account.positions += self._positions
        if not self._sent:
            self._sent = True
            queue.charge(account, self.tokens)
            self._admission.sent(account, self.tokens)
        return True

    def generated(self) -> None:
        """One more token."""
        if not self._answered:
            self._first_token(drained=True)
            self._admission.dispatch()
        self._positions += 1
        self._account.positions += self._seated
        self._admission.queue.charge(self._account, OUTPUT_WEIGHT)
        self._account.spend(1)

    def end(self) -> None:
        """It waits for nothing, and holds nothing. Idempotent.

        A prompt that no worker had costs its key nothing.
        """
        if self._ended:
            return
        self._ended = True
        if not self._sent:
            self._account.spend(-self.tokens)
        if self._ticket is not None:
            self._admission.queue.remove(self._ticket)
        self._stand_up()
        self._first_token(drained=False)
        self._admission.dispatch()

    @property
    def is_new(self) -> bool:
        """No worker ever had it."""
        return not self._sent

    @property
    def _rank(self) -> int:
        """By priority, then those that were interrupted."""
        return 2 * self._priority + self.is_new

    @property
    def account(self) -> Account:
        return self._account

    @property
    def waits(self) -> bool:
        """In the queue."""
        return self._ticket is not None and self._ticket in self._admission.queue

    def _stand_up(self) -> None:
        if self._seated:
            self._seated = False
            self._account.seats -= 1
            self._account.positions -= self._positions

    def _first_token(self, *, drained: bool) -> None:
        if not self._answered:
            self._answered = True
            self._admission.answered(self._account, self.tokens, sent=self._sent, drained=drained)


class Entry:
    """One request, from its admission to its end: an estimate of tokens, then a turn for each generation."""

    def __init__(self, admission: "Admission", account: Account, tokens: int) -> None:
        admission.reserve(account, tokens)
        self._admission = admission
        self._account = account
        self._estimate = tokens
        self._turns: list[Turn] = []

    @property
    def key(self) -> ApiKey:
        """The client's."""
        return self._account.key

    def turns(self, sizes: Sequence[int], priority: int = 0) -> list[Turn]:
        """Replaces the estimate, once, by the prompt tokens of each generation.

        Raises Overloaded and RateLimited.
        """
        self._drop_estimate()
        self._admission.reserve(self._account, sum(sizes))
        self._turns = [Turn(self._admission, self._account, priority, size) for size in sizes]
        return self._turns

    def end(self) -> None:
        """Ends its turns. A request without any costs its key nothing. Idempotent."""
        self._drop_estimate()
        for turn in self._turns:
            turn.end()

    def _drop_estimate(self) -> None:
        self._admission.release(self._account, self._estimate)
        self._estimate = 0


def _no_limit() -> FreeRoom:
    return FreeRoom(math.inf, math.inf)


class Admission:
    """The bounded queue in front of the workers.

    `window` is how many prompt tokens of one key may be at the workers without a first token, `room` is what
    is free on decode workers. `shared`: there are several keys, and none may take all. Each has half of the
    window, and prompts that fit into it.

    Attributes:
        waiting_tokens: prompt tokens of generations without a first token, here and at the workers. Never
            above the limit, except by a single request that is larger than it.
        queue: generations that wait for their turn.
    """

    def __init__(
        self,
        max_waiting_tokens: int,
        window: Callable[[], float],
        room: Callable[[], FreeRoom] = _no_limit,
        *,
        shared: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self.waiting_tokens = 0
        self.queue: FairQueue[Account, Turn] = FairQueue()
        self._sent_tokens = 0
        self._max = max_waiting_tokens
        self._window = window
        self._room = room
        self._shared = shared
        self._rate = DrainRate(clock)
        self._dispatching = False
        self._window_holds = False  # of the queue, some request back; as of the last look

    @property
    def held_tokens(self) -> int:
        """Of `waiting_tokens`, those that wait because prefill workers have enough before them."""
        return self.waiting_tokens - self._sent_tokens if self._window_holds else 0

    @property
    def waiting_for_room(self) -> int:
        """Of the queue, the generations that wait for decode workers; the others wait for prefill workers."""
        return 0 if self._window_holds else len(self.queue)

    @contextmanager
    def enter(self, account: Account, tokens: int) -> Iterator[Entry]:
        """For one request, with an estimate of its prompt tokens. Raises Overloaded and RateLimited."""
        account.enter()
        try:
            entry = Entry(self, account, tokens)
            try:
                yield entry
            finally:
                entry.end()
        finally:
            account.leave()

    def reserve(self, account: Account, tokens: int) -> None:
        """These prompt tokens wait from now on. Raises Overloaded and RateLimited."""
        self._check(account, tokens)
        account.spend(tokens)
        if not self.waiting_tokens:
            self._rate.began()
        self.waiting_tokens += tokens
        account.waiting_tokens += tokens

    def release(self, account: Account, tokens: int) -> None:
        """Undoes `reserve`."""
        account.spend(-tokens)
        self.waiting_tokens -= tokens
        account.waiting_tokens -= tokens

    def _check(self, account: Account, tokens: int) -> None:
        left = self._max - self.waiting_tokens
        if self._shared and account.waiting_tokens and account.waiting_tokens + tokens > KEY_SHARE * left:
            raise RateLimited(
                f"key {account.key.name!r} has {account.waiting_tokens} prompt tokens waiting; the rest of "
                f"{self._max} is kept for other keys",
                retry_after=self._retry_after(),
            )
        if self.waiting_tokens and tokens > left:
            raise Overloaded(
                f"{self.waiting_tokens} prompt tokens are waiting, and {self._max} may",
                retry_after=self._retry_after(),
            )

    def _retry_after(self) -> int:
        rate = self._rate.tokens_per_s()
        wait = self.waiting_tokens / rate if rate > 0 else 1.0
        return min(MAX_RETRY_AFTER, max(1, round(wait)))

    def dispatch(self) -> None:
        """The first of the queue go to the workers. To be called when workers may have become less busy."""
        if self._dispatching:  # a turn that is taken changes loads, and may end
            return
        self._dispatching = True
        try:
            full: set[Account] = set()  # for the first request of these keys there is no room
            while len(self.queue) and (turn := self._next(full)) is not None:
                if not turn.take():
                    full.add(turn.account)
        finally:
            self._dispatching = False

    def _next(self, full: set[Account]) -> Turn | None:
        window = self._window() / 2 if self._shared else self._window()
        room = self._room() if self._shared else _no_limit()
        self._window_holds = False

        def may_go(account: Account, turn: Turn) -> bool:
            # What waits for room is not overtaken, except by the one request that each key may have.
            if full and (account in full or account.seats):
                return False
            # Workers give keys equal shares of their steps, so each key has a window of its own.
            if turn.is_new and account.sent_tokens:
                ahead = account.sent_tokens + (turn.tokens if self._shared else 1)
                if ahead > window:
                    self._window_holds = True
                    return False
            limit = KEY_SHARE * account.share
            return not account.seats or (
                account.seats < limit * room.seats and account.positions < limit * room.positions
            )

        return self.queue.pop(may_go)

    def sent(self, account: Account, tokens: int) -> None:
        """Said by turns: workers have a prompt."""
        self._sent_tokens += tokens
        account.sent_tokens += tokens

    def answered(self, account: Account, tokens: int, *, sent: bool, drained: bool) -> None:
        """Said by turns: a prompt waits no longer. It has its first token (`drained`), or was given up."""
        self.waiting_tokens -= tokens
        account.waiting_tokens -= tokens
        if sent:
            self._sent_tokens -= tokens
            account.sent_tokens -= tokens
        if drained:
            self._rate.add(tokens)
