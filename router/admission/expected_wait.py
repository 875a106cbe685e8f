"""How long a new request is expected to wait for its first token.

    wait = max(prompt tokens ahead / tokens a second, generations that wait for room / seats freed a second)

- *Tokens* are those that no worker has in its caches: of later turns of a long session few, however long
  their prompts are.
- *Tokens a second*: while the queue is empty, what workers can compute. While generations wait in it, the
  tokens of prompts that got their first token. These include the share of other routers, and whatever else
  holds the queue up. Each counts by its part of the recent time.
- *Tokens ahead*: those of this router, and those of other routers at the workers. A router with a queue
  keeps a window of prompts there, so those of others come as often as its queue has windows.
- *Seats freed a second*: generations at workers / the mean time for which one was there.

Pure: the caller passes counts and times.
"""

import math
from typing import NamedTuple

from baton.router.policy.placement import PrefillWindow
from baton.steps.averages import Average

FORGET_SECONDS = 30.0
"""Time constant with which older measurements count less."""


class Ahead(NamedTuple):
    """What was there before a new request."""

    tokens: int
    """Of prompts of this router without a first token, those that are in no cache."""
    for_room: int
    """Generations in the queue that wait for decode workers."""
    running: int
    """Generations that workers have."""


class UncachedShare:
    """Of the tokens of recent prompts of a key, the part that was in no cache.

    Owned by the account: prompts of one key say nothing of the caches of another.

    Attributes:
        value: 1 until a prompt says otherwise.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._share = Average(math.exp(-1 / FORGET_SECONDS))
        self._at = 0.0

    def add(self, uncached: int, tokens: int, now: float) -> None:
        """A prompt of so many tokens got its first token, `uncached` of them from no cache."""
        self._share.add(uncached, tokens, steps=max(0.0, now - self._at))
        self._at, self.value = now, self._share.value


class ExpectedWait:
    """Owned by the admission queue. Times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._queued = False
        self._queued_share = 0.0  # of the recent time
        self._tokens_per_s = 0.0  # that got their first token in that share, as a mean over the recent time
        self._seat = Average(math.exp(-1 / FORGET_SECONDS))  # seconds of a generation at workers
        self._freed_at = now

    def queued(self, waits: bool, now: float) -> None:
        """`waits`: whether any generation is in the queue from now on."""
        if waits is not self._queued:
            self._pass(now)
            self._queued = waits

    def answered(self, tokens: int, now: float) -> None:
        """A prompt, of which so many tokens were in no cache, got its first token."""
        if self._queued:
            self._pass(now)
            self._tokens_per_s += tokens / FORGET_SECONDS

    def freed(self, seconds: float, now: float) -> None:
        """A generation has left its worker after so many seconds."""
        self._seat.add(seconds, steps=now - self._freed_at)
        self._freed_at = now

    def seconds(self, ahead: Ahead, window: PrefillWindow, now: float) -> float:
        """Seconds until a request that comes now has its first token, less its own prefill. A part that is
        unknown is 0."""
        self._pass(now)
        wait = 0.0
        if window.tokens_per_s > 0:
            idle = 1 - self._queued_share
            rate = self._tokens_per_s + idle * window.tokens_per_s
            tokens = ahead.tokens + idle * window.others * max(1.0, ahead.tokens / window.tokens)
            wait = tokens / rate if rate > 0 else math.inf
        if ahead.running:
            wait = max(wait, ahead.for_room * self._seat.value / ahead.running)
        return wait

    def _pass(self, now: float) -> None:
        weight = math.exp(-max(0.0, now - self._at) / FORGET_SECONDS)
        self._queued_share = weight * self._queued_share + (1 - weight) * self._queued
        self._tokens_per_s *= weight
        self._at = now
