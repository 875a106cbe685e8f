"""What the links from peers carry, measured from the frames that came."""

import math
from dataclasses import dataclass

WINDOW = 256 << 20, 0.5
"""Bytes, or seconds in which frames came, after which a new window begins. A rate is that of the last two, so
what came before is forgotten, however fast it was."""
ROUNDS = 4
"""Times of a frame that a window has at least. On a slow link the frames of all lanes take seconds and end
together, so a shorter window would have many of them, or none."""
ENOUGH = 16 << 20, 0.25
"""The same, that say something. A few small frames wait for processes more than for the link."""
LONG = 0.1
"""Seconds. If a frame takes longer, and twice as long as all before it, it came over another link."""
RECENT = 1200.0
"""Seconds for which a rate counts. Routers try a link that they avoid more often than that."""
FORGOTTEN = 30.0
"""Seconds without a frame, after which only the next ones count. The link may have been mended."""
SHARE_OF = 10.0
"""Seconds of which the share is told in which frames came. Older ones count less and less."""
MOST = 64
"""Links that are kept."""


@dataclass(slots=True)
class _Link:
    bytes: int = 0
    seconds: float = 0.0
    bytes_before: int = 0  # in the window before
    seconds_before: float = 0.0
    ended: float = 0.0  # the last frame
    busy: float = 0.0  # seconds in which frames came, those long before `ended` less and less

    @property
    def rate(self) -> float:
        """Bytes/s. 0: not known."""
        size, seconds = self.bytes + self.bytes_before, self.seconds + self.seconds_before
        return size / seconds if seconds > 0 and (size >= ENOUGH[0] or seconds >= ENOUGH[1]) else 0.0

    def busy_at(self, now: float) -> float:
        return self.busy * math.exp(min(0.0, self.ended - now) / SHARE_OF)


class LinkRates:
    """By the incarnation of each peer.

    A link is busy while at least one of its lanes is within a frame, or frames of a committed transfer miss.
    So pauses in which the peer computes do not count, but those after a lost packet do. Behind that packet
    whole frames wait in the kernel, and seem to come at once."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}

    def came(self, peer: int, size: int, began: float, ended: float, due: float) -> None:
        """A frame with so many bytes came. Times are of time.monotonic(). `began`: its header. `due`: since
        when it could have come; the same, or before."""
        if peer not in self._links and len(self._links) >= MOST:
            del self._links[min(self._links, key=lambda other: self._links[other].ended)]
        link = self._links.setdefault(peer, _Link())
        took = ended - began
        slower = took > max(LONG, 2 * (link.seconds + link.seconds_before))
        if slower or due > link.ended + FORGOTTEN:
            link.bytes = link.bytes_before = 0
            link.seconds = link.seconds_before = 0.0
        elif link.bytes >= WINDOW[0] or link.seconds >= max(WINDOW[1], ROUNDS * took):
            link.bytes_before, link.seconds_before = link.bytes, link.seconds
            link.bytes, link.seconds = 0, 0.0
        link.bytes += size
        seconds = max(0.0, ended - max(due, link.ended))
        link.seconds += seconds
        link.busy = link.busy_at(ended) + SHARE_OF * -math.expm1(-seconds / SHARE_OF)
        link.ended = max(link.ended, ended)

    def recent(self, now: float) -> dict[int, tuple[float, float]]:
        """Of each link that was measured lately: bytes/s, and the share of its time in which frames came."""
        return {
            peer: (link.rate, min(1.0, link.busy_at(now) / SHARE_OF))  # a sum may be rounded up
            for peer, link in self._links.items()
            if link.rate and now < link.ended + RECENT
        }
