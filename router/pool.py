"""The workers that there are right now, and which of them to ask.

Follows discovery, keeps a connection to each address and, for the policies, their loads; tells requests that
wait for a worker or for room when something changed.
"""

import asyncio
import itertools
import logging
import os
import random
from collections.abc import Collection, Iterable
from typing import Protocol

from router.connection import Refused, State, WorkerConnection
from router.discovery import Discovery
from router.policy import DecodeLoad, Ring, least_loaded, sticky
from router.room import RoomQueue
from rpc import worker_pb2 as pb

log = logging.getLogger(__name__)


class WorkerWaiter(Protocol):
    def on_workers(self) -> None:
        """A worker came."""
        ...


class WorkerPool:
    """Owns the connections. All of it runs on the event loop; nothing here waits.

    Attributes:
        room: requests that wait for room on a decode worker.
        waiters: requests that wait for a worker of some role.
    """

    def __init__(self, secret: bytes, discovery: Discovery) -> None:
        self.room = RoomQueue()
        self.waiters: dict[WorkerWaiter, None] = {}
        self._secret = secret
        self._discovery = discovery
        self._router_id = os.urandom(16)
        self._rng = random.Random()
        self._arrivals = itertools.count()
        self._connections: dict[str, WorkerConnection] = {}
        self._prefill_ring = Ring(())
        self._prefill_tokens: dict[str, int] = {}
        self._prefill_total = 0
        self._decode_loads: dict[str, DecodeLoad] = {}
        self._decode_list: list[DecodeLoad] = []
        self._offering = False

    async def run(self) -> None:
        """Follows discovery until cancelled, then closes every connection."""
        try:
            async for addresses in self._discovery.watch():
                for address in addresses - self._connections.keys():
                    self._connections[address] = WorkerConnection(
                        address, self._secret, self._router_id, self
                    )
                for address in self._connections.keys() - addresses:
                    self._connections.pop(address).retire()
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(*(c.close() for c in self._connections.values()))

    # ------------------------------------------------------------ who is there

    @property
    def connections(self) -> list[WorkerConnection]:
        return sorted(
            self._connections.values(), key=lambda c: (c.description.role, c.description.index, c.address)
        )

    def ready(self, role: "pb.Role") -> list[WorkerConnection]:
        """Those that take new work."""
        return [c for c in self._connections.values() if _serves(c, role)]

    @property
    def complete(self) -> bool:
        """Whether there is a worker of each role."""
        return bool(self._prefill_ring.size and self._decode_list)

    @property
    def capacity(self) -> int | None:
        """Positions that one request may have anywhere; None while there is no worker."""
        sizes = [
            min(d.max_model_len, d.num_blocks * d.block_size)
            for d in (c.description for c in self._connections.values())
            if d.max_model_len and d.num_blocks
        ]
        return min(sizes, default=None)

    @property
    def prefill_tokens_per_s(self) -> float:
        return sum(c.status.prefill_tokens_per_s for c in self.ready(pb.ROLE_PREFILL))

    def arrival(self) -> int:
        return next(self._arrivals)

    # ------------------------------------------------------------ choices

    def choose_prefill(self, key: int, tokens: int, avoid: Collection[str]) -> WorkerConnection | None:
        """For a session's 64-bit key; None when there is no worker."""
        chosen = sticky(
            self._prefill_ring,
            self._prefill_tokens,
            self._prefill_total,
            key=key,
            cost=tokens,
            avoid=avoid,
        )
        return None if chosen is None else self._connections[chosen]

    def choose_decode(self, tokens: int, avoid: Collection[str]) -> WorkerConnection | None:
        """With room for `tokens` positions; None when there seems to be none (or no worker at all)."""
        chosen = least_loaded(self._decode_list, tokens=tokens, rng=self._rng, avoid=avoid)
        return None if chosen is None else self._connections[chosen]

    @property
    def has_decode(self) -> bool:
        return bool(self._decode_list)

    # ------------------------------------------------------------ what connections report

    def check(self, connection: WorkerConnection) -> None:
        described = connection.description
        if described.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
            raise Refused(f"it has no known role ({described.role})")
        if not described.block_size or not described.max_model_len:
            raise Refused("its description has no block size or context length")
        for other in self._connections.values():
            if other is connection or other.state not in (State.READY, State.DRAINING):
                continue
            theirs = other.description
            if described.model_fingerprint != theirs.model_fingerprint:
                raise Refused(f"its model ({described.model}) is not that of {other} ({theirs.model})")
            if described.layout_fingerprint != theirs.layout_fingerprint:
                raise Refused(f"its KV layout is not that of {other}")

    def membership_changed(self, connection: WorkerConnection) -> None:
        self._prefill_ring = Ring([c.address for c in self.ready(pb.ROLE_PREFILL)])
        self._prefill_tokens = {c.address: _prefill_load(c) for c in self.ready(pb.ROLE_PREFILL)}
        self._prefill_total = sum(self._prefill_tokens.values())
        self._decode_loads = {c.address: _decode_load(c) for c in self.ready(pb.ROLE_DECODE)}
        self._decode_list = list(self._decode_loads.values())
        if not connection.retired and connection.state is State.READY:
            self._wake(list(self.waiters))
            self._offer_room()

    def load_changed(self, connection: WorkerConnection) -> None:
        address = connection.address
        if address in self._prefill_tokens:
            load = _prefill_load(connection)
            self._prefill_total += load - self._prefill_tokens[address]
            self._prefill_tokens[address] = load
        elif address in self._decode_loads:
            _update(self._decode_loads[address], connection)
            self._offer_room()

    def _wake(self, waiters: Iterable[WorkerWaiter]) -> None:
        for waiter in waiters:
            self.waiters.pop(waiter, None)
            waiter.on_workers()

    def _offer_room(self) -> None:
        # An offer submits, which changes loads, which ends here again.
        if not self._offering:
            self._offering = True
            try:
                self.room.offer()
            finally:
                self._offering = False


def _serves(connection: WorkerConnection, role: "pb.Role") -> bool:
    return connection.description.role == role and connection.state is State.READY and not connection.retired


def _prefill_load(connection: WorkerConnection) -> int:
    # What it reports includes other routers' work, but is up to a second old.
    return max(connection.waiting_tokens, connection.status.tokens_waiting)


def _decode_load(connection: WorkerConnection) -> DecodeLoad:
    described = connection.description
    load = DecodeLoad(
        worker=connection.address,
        block_size=described.block_size,
        blocks_total=described.num_blocks,
        max_running=described.max_num_seqs,
    )
    _update(load, connection)
    return load


def _update(load: DecodeLoad, connection: WorkerConnection) -> None:
    status = connection.status
    load.blocks_free = 0 if connection.full else status.blocks_free - connection.blocks_taken
    load.running = max(connection.attempts, status.requests_running + status.reservations)
