"""When a worker leaves, offers the prefixes that it used last to other workers, through a router.

Life of an offer:

1. The prefix goes to a router, which tells another worker to fetch it. If no other worker lacks the prefix,
   the router declines.
2. That worker asks for the chunks that it lacks. They are pinned here, and sent.
3. The pin ends, and the next prefix is offered.

A few offers are open at a time, because a worker serves few transfers at a time. Offers end after the last
prefix, at a limit of seconds or of bytes, when routers decline many in a row, or when no peer asks.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from baton.content import CHUNK_TOKENS
from baton.engine import CachedPrefix

SECONDS = 5.0
"""A worker leaves at the latest after so many seconds, whether its prefixes are sent or not."""
BYTES = 8 << 30
"""KV that is sent at most."""
OPEN = 2
"""Offers that are open at a time: as many transfers by content as a worker serves (`HeldPrefills`)."""
ANSWER = 1.0
"""Seconds in which a peer asks for an offered prefix. It may have to open lanes first."""
DECLINED = 32
"""After so many offers in a row that routers declined, no more are made."""


@dataclass(slots=True)
class _Offer:
    chunks: frozenset[bytes]
    pin_id: bytes | None = None  # None: no peer has asked for it


class PrefixOffers:
    """Owns the offers of one worker. The caller pins and unpins."""

    def __init__(self, send: Callable[[int, CachedPrefix], None], token_bytes: int) -> None:
        """`send` passes the number of an offer and its prefix to a router. `token_bytes`: of the KV of one
        token."""
        self._send = send
        self._tokens = BYTES // token_bytes
        self._left: Iterator[CachedPrefix] | None = None
        self._offers: dict[int, _Offer] = {}  # by number
        self._number = self._declined = 0
        self._until = self._moved = 0.0  # time.monotonic()

    @property
    def open(self) -> bool:
        """Whether prefixes are offered. `pump` must be called often then."""
        return self._left is not None

    def start(self, prefixes: Iterator[CachedPrefix]) -> None:
        """Offers these prefixes, in their order."""
        self._left, self._declined = prefixes, 0
        self._moved = time.monotonic()
        self._until = self._moved + SECONDS

    def asked(self, pin_id: bytes, chunks: Collection[bytes]) -> None:
        """A peer fetches these chunks, which are pinned."""
        for offer in self._offers.values():
            if offer.pin_id is None and not offer.chunks.isdisjoint(chunks):
                offer.pin_id, self._declined = pin_id, 0
                self._tokens -= len(chunks) * CHUNK_TOKENS
                return

    def unpinned(self, pin_id: bytes) -> None:
        """A transfer from here is over."""
        self._moved = time.monotonic()
        self._offers = {n: offer for n, offer in self._offers.items() if offer.pin_id != pin_id}

    def declined(self, number: int) -> None:
        """A router knows no worker that lacks this prefix."""
        if self._offers.pop(number, None) is not None:
            self._declined += 1

    def pump(self) -> list[bytes]:
        """Makes the next offers. Returns the pins of transfers that must end now, since the time is over."""
        if self._left is None:
            return []
        now = time.monotonic()
        if now >= self._until:
            return self._end()
        is_silent = all(offer.pin_id is None for offer in self._offers.values())
        if self._offers and is_silent and now >= self._moved + ANSWER:
            return self._end()
        while len(self._offers) < OPEN and self._declined < DECLINED:
            prefix = next(self._left, None)
            if prefix is None or len(prefix.token_ids) > self._tokens:
                break
            if prefix.chunks:
                self._number += 1
                self._offers[self._number] = _Offer(frozenset(prefix.chunks))
                self._moved = now
                self._send(self._number, prefix)
        return [] if self._offers else self._end()

    def _end(self) -> list[bytes]:
        pins = [offer.pin_id for offer in self._offers.values() if offer.pin_id is not None]
        self._left = None
        self._offers.clear()
        return pins
