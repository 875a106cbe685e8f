"""How fast prefixes come from other workers: measured for each tier of each worker."""

from baton.content import Tier
from baton.kv_transfer import TransferDeadlines
from baton.machine.link import Link
from baton.worker.messages import ContentSource, PrefixLink

IDLE_CLOSE = TransferDeadlines().idle_close
"""Seconds without a fetch after which a session ends."""
MOST = 1000
"""Links with measured fetches. One more replaces the oldest."""
RECENT = 60.0
"""Seconds for which a measured fetch is reported to routers. After that they count the link as unknown, and
try it again."""


class PrefixLinks:
    """The links of one worker to the tiers of other workers."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, int, Tier], Link] = {}  # by address, incarnation and tier

    def to(self, source: ContentSource) -> Link:
        key = source.kv_address, source.incarnation, source.tier
        if key not in self._links and len(self._links) >= MOST:
            del self._links[next(iter(self._links))]
        return self._links.setdefault(key, Link(IDLE_CLOSE))

    def recent(self, now: float) -> list[PrefixLink]:
        """What routers should know."""
        return [
            PrefixLink(incarnation, tier, link.waited.value, link.tokens_per_s.value)
            for (_, incarnation, tier), link in self._links.items()
            if now < link.measured_at + RECENT and link.tokens_per_s.value
        ]
