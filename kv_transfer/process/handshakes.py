"""Lanes that have not authenticated. Any process on the network can open them, so their number is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from baton.kv_transfer.process.lane import Lane

_MOST_KNOWN = 4096  # addresses; the one whose last proof is oldest is forgotten first


@dataclass(frozen=True, slots=True)
class _Place:
    deadline: float
    address: str | None  # None: this side connected
    known: bool


class Handshakes:
    """Bounds the lanes that peers have opened and not proved.

    When all places are taken, the address with the most lanes gives up its oldest. So connections that say
    nothing never keep a peer out, and one address cannot take the places of others. Addresses from which a
    peer has authenticated before share as many places of their own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[Lane, _Place] = {}  # oldest first
        self._known: dict[str, None] = {}  # in order of the last proof

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._places))

    def add(self, lane: Lane, address: str | None, deadline: float) -> Lane | None:
        """`address`: of the peer that connected; None: this side did, and the lane needs no place.

        Returns the lane that must close for the new one."""
        known = address in self._known
        closing = None if address is None else self._crowded_out(address, known=known)
        if closing is not None:
            del self._places[closing]
        self._places[lane] = _Place(deadline, address, known)
        return closing

    def _crowded_out(self, address: str, *, known: bool) -> Lane | None:
        rivals = {lane: p.address for lane, p in self._places.items() if p.address and p.known == known}
        if len(rivals) < self._most:
            return None
        held = Counter([*rivals.values(), address])
        busiest = max(held, key=lambda a: held[a])
        return next(lane for lane, a in rivals.items() if a == busiest)

    def proved(self, lane: Lane) -> None:
        address = self._places.pop(lane).address
        if address is not None:
            self._known.pop(address, None)
            self._known[address] = None
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]

    def closed(self, lane: Lane) -> None:
        """Idempotent."""
        self._places.pop(lane, None)

    def late(self, now: float) -> list[Lane]:
        return [lane for lane, place in self._places.items() if now >= place.deadline]
