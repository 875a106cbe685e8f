"""Copies slices into reserved blocks: from arena slots, or from memory that the sender exports.

One injection costs the host some 0.2 ms, and the same thread launches steps. So while the device computes, a
slice waits up to 2 ms for others, unless it is of the last layer. While a launch is due, all slices wait.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from baton.kv_transfer.endpoint.live_fetch import LiveFetch
from baton.kv_transfer.endpoint.pulls import Pulls
from baton.kv_transfer.layout import KVLayout
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.staging import scattered_at_once
from baton.kv_transfer.trace import TraceWriter

if TYPE_CHECKING:
    from baton.kv_transfer.device.pool import Pool

INJECTING = 0.0005  # seconds that one injection may take the host, rarely longer
HOLD = 0.002  # seconds that a slice waits for others
PATIENCE = 0.02  # seconds after which launches wait for a slice: on a busy host a launch is always due


class Injector:
    """What has arrived, and what is copied. It has a slot from `arrived` until `take` returns it.

    Attributes:
        live: the fetches that still get slices, by transfer id. The receiver adds and removes them.
        arrivals: what has come and is not yet looked at.
        pulls: the copies from exported memory.
    """

    def __init__(
        self, pool: "Pool", layout: KVLayout, trace: TraceWriter, slot_bytes: int, *, pulls: bool
    ) -> None:
        """`pulls`: as in `Receiver`."""
        self.live: dict[bytes, LiveFetch] = {}
        self.pulls = Pulls(pool, allowed=pulls)
        self._pool = pool
        self._layout = layout
        self._trace = trace
        self._at_once = scattered_at_once(slot_bytes)
        self.arrivals: deque[local.Arrived] = deque()
        self._oldest = 0.0  # when the first of them came
        self._copies: deque[tuple[Any, list[int]]] = deque()  # in stream order: event → slots it frees

    def __bool__(self) -> bool:
        """Whether anything has arrived and is not in its place."""
        return bool(self.arrivals or self._copies or self.pulls)

    def arrived(self, message: local.Arrived) -> None:
        fetch = self.live.get(message.header.transfer_id)
        if fetch is not None and fetch.layers is not None:
            fetch.layers.arrived(message.header.piece)
        self._oldest = self._oldest if self.arrivals else time.monotonic()
        self.arrivals.append(message)

    def pulled(self) -> list[local.PulledIn]:
        """What has been read of exported memory since the last call, for the transfer process."""
        said = []
        for arrived, intact in self.pulls.ended():
            said.append(local.PulledIn([m.slot for m in arrived], intact))
            for m, right in zip(arrived, intact, strict=True):
                if right and (fetch := self.live.get(m.header.transfer_id)):
                    fetch.unread -= 1
                    if fetch.layers is not None:
                        fetch.layers.written(m.header.piece)
        return said

    def take(self, spare: float) -> list[int]:
        """Injects what arrived, as far as there is time. `spare`: seconds until the next step must be
        launched. Returns the slots that are free now: of ended transfers, and of copies that are over."""
        taken_at = time.monotonic()
        if self.arrivals and taken_at - self._oldest > PATIENCE:
            spare = math.inf
        until, free = taken_at + spare - INJECTING, []
        last = self._layout.num_layers - 1
        complete = any(fetch.complete for fetch in self.live.values())
        is_late = spare == math.inf or complete or any(m.header.piece.layer == last for m in self.arrivals)
        while self.arrivals and (now := time.monotonic()) <= until:
            if not is_late and now - self._oldest < HOLD:
                break
            taken = [self.arrivals.popleft() for _ in range(min(len(self.arrivals), self._at_once))]
            by_session: dict[int | None, list[local.Arrived]] = {}
            for m in taken:
                if m.header.transfer_id in self.live:
                    by_session.setdefault(m.session, []).append(m)
                else:  # cancelled, or fetched anew
                    free.append(m.slot)
            for session, arrived in by_session.items():
                if session is None:
                    fetches = [self.live[m.header.transfer_id] for m in arrived]
                    self._inject([self._staged(m, m.slot, taken_at) for m in arrived], fetches)
                else:
                    self._pull(session, arrived, taken_at)
        while self._copies and self._pool.passed(self._copies[0][0]):
            free += self._copies.popleft()[1]
        return free

    def _staged(self, m: local.Arrived, slot: int, taken_at: float) -> local.Staged:
        fetch, piece = self.live[m.header.transfer_id], m.header.piece
        # The transfer process has refused what does not fit; a write outside the reservation must not happen.
        if (array := self._layout.arrays[piece.array]).per_token:
            ranges = (array.in_blocks(*each) for each in fetch.request.ranges)
            start, stop = next((r for r in ranges if piece.token_start < r[1]), (0, 0))
            assert start <= piece.token_start < piece.token_start + piece.token_count <= stop, piece
        else:
            stop = piece.token_start
            assert stop in fetch.request.states_at, piece
        assert piece.layer < self._layout.num_layers, piece
        fetch.frames += 1
        fetch.bytes += m.header.length
        if piece.token_start + piece.token_count == stop and not (fetch.request.chunks or fetch.layers):
            fetch.pace.came(piece.layer, self._layout.num_layers, taken_at)
        return local.Staged(piece, slot, fetch.table, m.dtype, m.generation)

    def _inject(self, batch: list[local.Staged], fetches: Sequence[LiveFetch]) -> None:
        now = time.monotonic()
        with self._trace.measure("inject", slices=len(batch), layers=sorted({x.piece.layer for x in batch})):
            copied, scattered = self._pool.scatter(batch)
        self._copies.append((copied, [x.slot for x in batch]))
        self._note_scatter(batch, scattered, now)
        for fetch, item in zip(fetches, batch, strict=True):
            if fetch.layers is not None:
                fetch.layers.scattered(scattered, item.piece)

    def _pull(self, session: int, arrived: Sequence[local.Arrived], taken_at: float) -> None:
        now, batch = time.monotonic(), [self._staged(m, m.peer_slot, taken_at) for m in arrived]
        with self._trace.measure("pull", slices=len(batch), layers=sorted({x.piece.layer for x in batch})):
            scattered = self.pulls.start(session, batch, arrived)
        for m in arrived:
            self.live[m.header.transfer_id].unread += 1
        if scattered:
            self._note_scatter(batch, *scattered, now)

    def _note_scatter(self, batch: Sequence[local.Staged], scattered: Any, now: float) -> None:
        tables = {id(x.table) for x in batch}
        for fetch in self.live.values():
            if id(fetch.table) in tables:
                fetch.last_scatter = scattered
                fetch.scatter_at = fetch.scatter_at or now
