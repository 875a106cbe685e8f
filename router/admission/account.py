"""What one API key uses of this router process, and its limits."""

import time
from collections.abc import Callable

from baton.router.admission.keys import ApiKey
from baton.router.errors import RateLimited

MAX_RETRY_AFTER = 60
_MINUTE = 60.0

Clock = Callable[[], float]


class Account:
    """The use of one key. `share` is the part of the key's limits that this process has.

    The token limit is a token bucket that holds one minute. It may go below zero: a request is accepted while
    anything is left, and the next ones wait for the refill. So no request is too long for a key.

    Attributes:
        requests: requests that entered and have not left.
        body_bytes: bytes of their bodies, until each is prepared.
        waiting_tokens: prompt tokens of generations without a first token.
        sent_tokens: the part of `waiting_tokens` that workers have.
        running: generations that workers have.
        positions: KV positions of these generations, prompt and output.
    """

    def __init__(self, key: ApiKey, share: float = 1.0, clock: Clock = time.monotonic) -> None:
        self.key = key
        self.share = share
        self._where = "" if share == 1 else " in this router process, which has a share of the key's limit"
        self.requests = self.body_bytes = self.waiting_tokens = self.sent_tokens = 0
        self.running = self.positions = 0
        self._clock = clock
        self._max_requests = None if key.max_requests is None else max(1, round(key.max_requests * share))
        self._per_minute = None if key.tokens_per_minute is None else key.tokens_per_minute * share
        self._left = self._per_minute or 0.0
        self._refilled_at = clock()

    def enter(self) -> None:
        """Counts a request, which must `leave`. Raises RateLimited."""
        name = self.key.name
        if self._max_requests is not None and self.requests >= self._max_requests:
            text = f"key {name!r} has {self.requests} requests running, and may have {self._max_requests}"
            raise RateLimited(text + self._where, retry_after=1)
        if self._per_minute is not None:
            self._refill(self._per_minute)
            if self._left <= 0:
                wait = -self._left / self._per_minute * _MINUTE
                seconds = max(1, min(MAX_RETRY_AFTER, round(wait + 0.5)))
                text = f"key {name!r} has used its {self._per_minute:g} tokens per minute"
                raise RateLimited(text + self._where, retry_after=seconds)
        self.requests += 1

    def leave(self) -> None:
        self.requests -= 1

    def spend(self, tokens: int) -> None:
        """Takes tokens from the bucket. A negative number gives them back."""
        if self._per_minute is not None:
            self._refill(self._per_minute)
            self._left -= tokens

    def _refill(self, per_minute: float) -> None:
        now = self._clock()
        self._left = min(per_minute, self._left + (now - self._refilled_at) / _MINUTE * per_minute)
        self._refilled_at = now
