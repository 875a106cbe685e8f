"""What the links between workers carry, and until when KV is under way on them."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.rpc import worker_pb2 as pb


@dataclass(slots=True)
class _Link:
    bytes_per_s: float
    free_at: float
    """When all KV will have come that is under way, or planned by this router."""


class Links:
    """By the row of the worker that KV comes to, and the incarnation of the worker that it comes from.

    A link that no report has costs nothing: no KV came on it lately, or the worker reads the other's memory.
    So it is used, and then measured."""

    def __init__(self) -> None:
        self._links: dict[int, dict[int, _Link]] = {}

    def reported(self, row: int, links: Iterable[pb.KvLink], now: float) -> None:
        known = self._links.get(row, {})
        self._links[row] = {
            link.incarnation: _Link(
                link.bytes_per_s,
                max(
                    now + link.bytes_waiting / link.bytes_per_s,
                    known[link.incarnation].free_at if link.incarnation in known else 0.0,
                ),
            )
            for link in links
        }

    def leave(self, row: int) -> None:
        self._links.pop(row, None)

    def arrival(self, row: int, source: int, size: int, begins: float) -> float:
        """When KV of so many bytes will have come that is computed from `begins` on. 0: not known."""
        link = self._links.get(row, {}).get(source)
        return 0.0 if link is None else max(link.free_at, begins) + size / link.bytes_per_s

    def planned(self, row: int, source: int, arrival: float) -> None:
        """The link carries KV until then."""
        if (link := self._links.get(row, {}).get(source)) is not None:
            link.free_at = max(link.free_at, arrival)
