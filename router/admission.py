"""How much may wait: a bounded number of prompt tokens. Beyond it clients are told when to come back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.errors import Overloaded

MAX_RETRY_AFTER = 60


class Ticket:
    """The waiting tokens of one request, given back one generation at a time."""

    def __init__(self, admission: "Admission", sizes: list[int]) -> None:
        self._admission = admission
        self._sizes = sizes

    def started(self, index: int) -> None:
        """Generation `index` has its first token. May be said again."""
        self._admission.waiting_tokens -= self._sizes[index]
        self._sizes[index] = 0


class Admission:
    """Prompt tokens of requests without a first token.

    Attributes:
        waiting_tokens: never above the limit, except by a single request that is larger than it.
    """

    def __init__(self, max_waiting_tokens: int) -> None:
        self.waiting_tokens = 0
        self._max = max_waiting_tokens

    @contextmanager
    def admit(self, sizes: list[int], tokens_per_s: Callable[[], float]) -> Iterator[Ticket]:
        """For one request's generations, by prompt length. `tokens_per_s` is how fast the queue drains.

        Raises Overloaded.
        """
        if self.waiting_tokens and self.waiting_tokens + sum(sizes) > self._max:
            rate = tokens_per_s()
            wait = self.waiting_tokens / rate if rate > 0 else 1
            raise Overloaded(
                f"{self.waiting_tokens} prompt tokens are waiting, and {self._max} may",
                retry_after=min(MAX_RETRY_AFTER, max(1, round(wait))),
            )
        ticket = Ticket(self, list(sizes))
        self.waiting_tokens += sum(sizes)
        try:
            yield ticket
        finally:
            for index in range(len(sizes)):
                ticket.started(index)
