"""What the links between workers carry, and until when KV is under way on them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.rpc import worker_pb2 as pb

TRY_AGAIN = 600.0
"""Seconds after which a link without KV counts as not known, until a plan uses it. It may have been mended,
and only KV measures it. So one request in ten minutes tries the link, and its second token may be late by a
second."""


@dataclass(slots=True)
class _Link:
    bytes_per_s: float
    free_at: float
    """When all KV will have come that is under way, or planned by this router."""
    used: float
    """Until when it was last known to have KV, or planned to."""


class Links:
    """By the row of the worker that KV comes to, and the incarnation of the worker that it comes from.

    A link that no report has costs nothing: no KV came on it lately, or the worker reads the other's memory.
    So it is used, and then measured.

    Attributes:
        rows: those with a link.
    """

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, _Link]] = {}

    def reported(self, row: int, links: Iterable[pb.KvLink], now: float) -> None:
        before = self.rows.pop(row, {})
        for link in links:
            rate, old = link.bytes_per_s, before.get(link.incarnation)
            free_at = now + link.bytes_waiting / rate
            if old is None:
                known = _Link(rate, free_at, now)
            else:
                known = _Link(rate, max(free_at, old.free_at), now if link.bytes_waiting else old.used)
            self.rows.setdefault(row, {})[link.incarnation] = known

    def leave(self, row: int) -> None:
        self.rows.pop(row, None)

    def arrival(self, row: int, source: int, size: float, now: float, begins: float = 0.0) -> float:
        """When KV of so many bytes will have come that is computed from `begins` on. 0: not known."""
        rate, free_at = self.rate(row, source, now)
        return 0.0 if rate == math.inf else max(free_at, now, begins) + size / rate

    def rate(self, row: int, source: int, now: float) -> tuple[float, float]:
        """Bytes/s, and when all KV will have come that is under way. Infinite and 0: not known."""
        link = self.rows.get(row, {}).get(source)
        if link is None or now > link.used + TRY_AGAIN:
            return math.inf, 0.0
        return link.bytes_per_s, link.free_at

    def planned(self, row: int, source: int, arrival: float, now: float) -> None:
        """The link carries KV until then. `arrival` 0: for a time that is not known."""
        if (link := self.rows.get(row, {}).get(source)) is not None:
            link.free_at = max(link.free_at, arrival)
            link.used = max(link.free_at, now)
