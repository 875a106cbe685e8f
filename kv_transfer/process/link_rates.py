"""What the links from peers carry, measured from the frames that came."""

from dataclasses import dataclass

FORGETS = 1.0
"""Busy seconds after which what came before counts half."""
ENOUGH = 16 << 20
"""Bytes that say something. A few small frames wait for processes more than for the link."""
RECENT = 60.0
"""Seconds for which a rate counts. A link that plans avoid is measured again after that."""
MOST = 64
"""Links that are kept."""


@dataclass(slots=True)
class _Link:
    bytes: float = 0.0
    seconds: float = 0.0  # in which frames came
    ended: float = 0.0  # the last frame


class LinkRates:
    """By the incarnation of each peer.

    A link is busy while at least one of its lanes is within a frame. So pauses in which the peer has nothing
    to send do not count, and neither does what the peer's kernel holds back."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}

    def came(self, peer: int, size: int, began: float, ended: float) -> None:
        """A frame with so many bytes came, from when its header was seen until its end (time.monotonic())."""
        if peer not in self._links and len(self._links) >= MOST:
            del self._links[min(self._links, key=lambda other: self._links[other].ended)]
        link = self._links.setdefault(peer, _Link())
        link.bytes += size
        link.seconds += max(0.0, ended - max(began, link.ended))
        link.ended = max(link.ended, ended)
        if link.seconds > FORGETS:
            link.bytes, link.seconds = link.bytes / 2, link.seconds / 2

    def recent(self, now: float) -> dict[int, float]:
        """Bytes/s of each link that was measured lately."""
        return {
            peer: link.bytes / link.seconds
            for peer, link in self._links.items()
            if link.bytes >= ENOUGH and link.seconds > 0 and now < link.ended + RECENT
        }
