"""One request in the admission: its body, then the turns of its generations."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.router.admission.keys import Account
from baton.router.admission.queue import KEY_SHARE, Admission, Turn
from baton.router.errors import Overloaded, RateLimited


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request must be finished: `seconds` after `began` (time.monotonic())."""

    began: float
    seconds: float

    @property
    def seconds_left(self) -> float:
        """Negative when it has passed."""
        return self.began + self.seconds - time.monotonic()


@contextmanager
def entering(admission: Admission, account: Account, name: str = "") -> Iterator["Entry"]:
    """Admits one request, before its body is read. Raises RateLimited."""
    account.enter()
    try:
        entry = Entry(admission, account, name)
        try:
            yield entry
        finally:
            entry.end()
    finally:
        account.leave()


@contextmanager
def holding(admission: Admission, account: Account, size: int) -> Iterator[None]:
    """Counts the bytes of an answer while it is open. It needs no place among the requests of its key. Raises
    Overloaded and RateLimited."""
    entry = Entry(admission, account)
    entry.receive(size)
    try:
        yield
    finally:
        entry.end()


class Entry:
    """One admitted request: first its body and an estimate of its prompt tokens, then a turn for each
    generation.

    Attributes:
        name: the id of a request that generates, as its client knows it.
        deadline: known when its body is there. Until then there is none.
        max_wait: seconds that its client waits for its turn. The router's own bound holds as well.
        began_at: the time.monotonic() at which it was admitted, before its body was read.
    """

    def __init__(self, admission: Admission, account: Account, name: str = "") -> None:
        self.name = name
        self.max_wait = math.inf
        self.began_at = time.monotonic()
        self.deadline = Deadline(self.began_at, math.inf)
        self._admission = admission
        self.account = account
        self._bytes = self._estimate = self._uncached = 0
        self._turns: list[Turn] = []

    def among_keys(self, priority: int) -> int:
        """Returns what a priority counts beside the requests of other keys."""
        return self.account.among_keys(priority) if self._admission.shared else priority

    def receive(self, size: int) -> None:
        """Counts bytes of its body; a negative size corrects the count. Raises Overloaded and RateLimited."""
        admission, account = self._admission, self.account
        free_bytes = admission.max_body_bytes - admission.body_bytes - size
        if size > 0 and admission.shared and account.body_bytes + size > KEY_SHARE * free_bytes:
            raise RateLimited(
                f"key {account.key.name!r} has {account.body_bytes} bytes of requests under way; the rest of "
                f"{admission.max_body_bytes} is kept for other keys",
                retry_after=1,
            )
        if free_bytes < 0:
            text = f"{admission.body_bytes} bytes of requests are under way"
            raise Overloaded(f"{text}, and {admission.max_body_bytes} may be", retry_after=1)
        self._bytes += size
        admission.body_bytes += size
        account.body_bytes += size

    def expect(self, tokens: int) -> None:
        """Counts an estimate of its prompt tokens, in place of the one before. Raises Overloaded and
        RateLimited."""
        self._drop_estimate()
        self._admission.reserve(self.account, tokens, self.max_wait)
        self._estimate, self._uncached = tokens, self.account.uncached_of(tokens)
        self._admission.count_uncached(self.account, self._uncached)

    def turns(self, sizes: Sequence[int], priority: int = 0) -> list[Turn]:
        """Replaces the body and the estimate, once, by the prompt tokens of each generation.

        Raises Overloaded and RateLimited.
        """
        self._drop_body()
        self._admission.reserve(self.account, sum(sizes), self.max_wait)
        self._turns = [Turn(self._admission, self.account, priority, size) for size in sizes]
        return self._turns

    def end(self) -> None:
        """Ends its turns. A request without turns costs its key nothing. Idempotent."""
        self._drop_body()
        for turn in self._turns:
            turn.end()

    def _drop_body(self) -> None:
        self.receive(-self._bytes)
        self._drop_estimate()

    def _drop_estimate(self) -> None:
        self._admission.release(self.account, self._estimate)
        self._admission.count_uncached(self.account, -self._uncached)
        self._estimate = self._uncached = 0
