"""The tags that give tenants equal shares of the prompt tokens, and let short prompts of a tenant go before
long ones. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter


@dataclass(slots=True, eq=False)
class Tag:
    """Orders a prompt among those of all tenants."""

    tokens: int
    """The virtual time at which the prompt is done if the tenants share every step. Later prompts of its
    tenant that go before it put it off."""
    alone: int
    """The same without other prompts of its tenant. It orders these."""


class FairShares:
    """Gives tenants equal shares of the prompt tokens, by the tags of their requests.

    The request with the least tag goes first. This is self-clocked fair queueing (Golestani 1994), here for
    each chunk. So a short prompt waits for one step of another tenant's long prompt, not for all of it.

    Of one tenant, a prompt goes before those that are longer by more than the tenant was served since they
    came. So short prompts hardly wait for long ones, and no prompt is overtaken after its tenant was served
    as many tokens as it has."""

    def __init__(self) -> None:
        self.now = 0  # virtual time, in prompt tokens: requests up to this tag were served
        self._queues: dict[bytes, list[Tag]] = {}  # by tenant, in order; the last one is after `now`

    def tag(self, tenant: bytes, tokens: int) -> tuple[Tag, Sequence[Tag]]:
        """The tag of a new request with so many prompt tokens to compute, and those of its tenant that it
        overtakes, which are later now."""
        # A tenant without requests under way has no claim for the time before.
        self._queues = {name: queue for name, queue in self._queues.items() if queue[-1].tokens > self.now}
        queue = self._queues.setdefault(tenant, [])
        del queue[: bisect_right(queue, self.now, key=attrgetter("tokens"))]
        alone = self.now + tokens
        place = bisect_right(queue, alone, key=attrgetter("alone"))
        new = Tag(queue[place - 1].tokens + tokens if place else alone, alone)
        overtaken = queue[place:]
        for each in overtaken:
            each.tokens += tokens
        queue.insert(place, new)
        return new, overtaken

    def served(self, tag: int) -> None:
        """Requests up to this tag were served."""
        self.now = max(self.now, tag)
