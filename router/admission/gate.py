"""Who is let in, and when it is served.

Requests are refused beyond what one key may use (`Account`) and beyond a bounded number of waiting prompt
tokens. Those that are let in go to the workers at once while these have less than a window of prompts ahead
of them; else they wait here, where the order is fair (`fairness`): a worker's own queue knows no keys.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from router.admission.fairness import FairQueue
from router.admission.keys import ApiKey
from router.errors import Overloaded, RateLimited

MAX_RETRY_AFTER = 60
OUTPUT_WEIGHT = 2.0
"""What an output token counts beside a prompt token when keys share."""
_RATE_SECONDS = 10.0
_MINUTE = 60.0

Clock = Callable[[], float]


class Account:
    """What one key uses of this process, which has a `share` of what the key may use in all.

    Tokens come back at an even rate, up to a minute's worth. Debt is allowed: a request is taken while
    anything is left, and the next ones wait until the debt is paid, so that no request is too long for a key.
    """

    def __init__(self, key: ApiKey, share: float = 1.0, clock: Clock = time.monotonic) -> None:
        self.key = key
        self.requests = 0
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


class Ticket:
    """One request's place: its generations wait for their turn, then for their first token."""

    def __init__(self, admission: "Admission", account: Account, priority: int, sizes: Sequence[int]) -> None:
        self._admission = admission
        self._account = account
        self._priority = priority
        self._sizes = list(sizes)  # prompt tokens; 0 from the first token on
        self._places: list[int | None] = []  # in the queue; None: it had its turn

    def line_up(self, starts: Sequence[Callable[[], None]]) -> None:
        """Each is called when its turn comes, now or later, unless the ticket is given back before."""
        admission = self._admission
        for index, start in enumerate(starts):
            self._places.append(None)
            entry = (self, index, start)
            self._places[index] = admission.queue.push(self._account.key.name, self._priority, entry)
        admission.dispatch()

    def turn(self, index: int) -> int:
        """Said by the queue. Returns its prompt tokens."""
        self._places[index] = None
        self._admission.queue.charge(self._account.key.name, self._sizes[index])
        return self._sizes[index]

    def generated(self, index: int, tokens: int) -> None:
        self._first_token(index, drained=True)
        self._admission.queue.charge(self._account.key.name, OUTPUT_WEIGHT * tokens)
        self._account.spend(tokens)

    def close(self) -> None:
        """Whatever of it still waits does so no more."""
        for index in range(len(self._sizes)):
            self._first_token(index, drained=False)

    def _first_token(self, index: int, *, drained: bool) -> None:
        size, self._sizes[index] = self._sizes[index], 0
        if not size:
            return
        place = self._places[index] if self._places else None
        if place is not None:
            self._admission.queue.remove(place)
        self._admission.gone(size, sent=bool(self._places) and place is None, drained=drained)


class Admission:
    """The bounded queue in front of the workers.

    `window` is how many prompt tokens may be at the workers without a first token.

    Attributes:
        waiting_tokens: prompt tokens of generations without a first token, here and at the workers. Never
            above the limit, except by a single request that is larger than it.
        queue: those that have not been sent to workers.
    """

    def __init__(
        self, max_waiting_tokens: int, window: Callable[[], float], clock: Clock = time.monotonic
    ) -> None:
        self.waiting_tokens = 0
        self.queue: FairQueue[tuple[Ticket, int, Callable[[], None]]] = FairQueue()
        self._sent_tokens = 0
        self._max = max_waiting_tokens
        self._window = window
        self._rate = DrainRate(clock)
        self._dispatching = False

    @property
    def held_tokens(self) -> int:
        """Of `waiting_tokens`, those that no worker knows of."""
        return self.waiting_tokens - self._sent_tokens

    @contextmanager
    def admit(self, account: Account, sizes: Sequence[int], priority: int = 0) -> Iterator[Ticket]:
        """For one request's generations, by prompt length. Raises Overloaded and RateLimited."""
        tokens = sum(sizes)
        if self.waiting_tokens and self.waiting_tokens + tokens > self._max:
            rate = self._rate.tokens_per_s()
            wait = self.waiting_tokens / rate if rate > 0 else 1.0
            raise Overloaded(
                f"{self.waiting_tokens} prompt tokens are waiting, and {self._max} may",
                retry_after=min(MAX_RETRY_AFTER, max(1, round(wait))),
            )
        account.enter()
        try:
            account.spend(tokens)
            if not self.waiting_tokens:
                self._rate.began()
            self.waiting_tokens += tokens
            ticket = Ticket(self, account, priority, sizes)
            try:
                yield ticket
            finally:
                ticket.close()
        finally:
            account.leave()

    def dispatch(self) -> None:
        """Whose turn it is goes to the workers. To be called whenever the window may have grown."""
        if self._dispatching:  # a start may fail at once, and end here again
            return
        self._dispatching = True
        try:
            while len(self.queue) and self._sent_tokens < self._window():
                ticket, index, start = self.queue.pop()
                self._sent_tokens += ticket.turn(index)
                start()
        finally:
            self._dispatching = False

    def gone(self, tokens: int, *, sent: bool, drained: bool) -> None:
        """Said by tickets: these tokens wait no more."""
        self.waiting_tokens -= tokens
        if drained:
            self._rate.add(tokens)
        if sent:
            self._sent_tokens -= tokens
            self.dispatch()
