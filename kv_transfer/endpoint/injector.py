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
from baton.kv_transfer.slices import ARENA, Slice
from baton.kv_transfer.staging import scattered_at_once
from baton.kv_transfer.trace import TraceWriter

if TYPE_CHECKING:
    from baton.kv_transfer.device.pool import Pool

INJECTING = 0.0005  # seconds that one injection may take the host, rarely longer
HOLD = 0.002  # seconds that a slice waits for others
AT_ONCE_ON_HOST = 2  # slices that this thread copies before it looks at the time: a host needs some ms
PATIENCE = 0.02  # seconds after which launches wait for a slice: on a busy host a launch is always due


class Injector:
    """What has arrived, and what is copied. It has a slot from `arrived` until `emptied` names it.

    Attributes:
        live: the fetches that still get slices, by transfer id. The receiver adds and removes them.
        arrivals: what has come and is not yet looked at.
        pulls: the copies from exported memory.
    """

    def __init__(self, pool: "Pool", layout: KVLayout, trace: TraceWriter, slot_bytes: int) -> None:
        self.live: dict[bytes, LiveFetch] = {}
        self.pulls = Pulls(pool)
        self._pool = pool
        self._layout = layout
        self._trace = trace
        self._at_once = scattered_at_once(slot_bytes) if pool.gather_most > 1 else AT_ONCE_ON_HOST
        self.arrivals: deque[Slice] = deque()
        self._oldest = 0.0  # when the first of them came
        self._copies: deque[tuple[Any, list[int]]] = deque()  # in stream order: event → slots it frees
        self._dropped: list[int] = []  # slots of ended transfers

    def __bool__(self) -> bool:
        """Whether anything has arrived and is not in its place."""
        return bool(self.arrivals or self._copies or self.pulls)

    def arrived(self, s: Slice) -> None:
        fetch = self.live.get(s.transfer_id)
        if fetch is not None and fetch.layers is not None:
            fetch.layers.arrived(s.piece)
        self._oldest = self._oldest if self.arrivals else time.monotonic()
        self.arrivals.append(s)

    def emptied(self) -> list[local.Emptied]:
        """The slots that nothing reads any more, since the last call: of copies that are over, and of ended
        transfers."""
        slots, self._dropped = self._dropped, []
        damaged: list[int] = []
        while self._copies and self._pool.passed(self._copies[0][0]):
            slots += self._copies.popleft()[1]
        for slices, intact in self.pulls.ended():
            slots += [s.slot for s in slices]
            for s, right in zip(slices, intact, strict=True):
                if not right:
                    damaged.append(s.slot)
                elif fetch := self.live.get(s.transfer_id):
                    fetch.unread -= 1
                    if fetch.layers is not None:
                        fetch.layers.written(s.piece)
        return [local.Emptied(slots, damaged)] if slots else []

    def take(self, spare: float) -> None:
        """Injects what arrived, as far as there is time. `spare`: seconds until the next step must be
        launched."""
        taken_at = time.monotonic()
        if self.arrivals and taken_at - self._oldest > PATIENCE:
            spare = math.inf
        until, last = taken_at + spare - INJECTING, self._layout.num_layers - 1
        complete = any(fetch.complete for fetch in self.live.values())
        is_late = spare == math.inf or complete or any(s.piece.layer == last for s in self.arrivals)
        while self.arrivals and (now := time.monotonic()) <= until:
            if not is_late and now - self._oldest < HOLD:
                break
            by_memory: dict[int, list[Slice]] = {}
            for s in [self.arrivals.popleft() for _ in range(min(len(self.arrivals), self._at_once))]:
                if s.transfer_id in self.live:
                    by_memory.setdefault(s.memory, []).append(s)
                else:  # cancelled, or fetched anew
                    self._dropped.append(s.slot)
            for slices in by_memory.values():
                for s in slices:
                    self._place(s, taken_at)
                self._inject(slices)

    def _place(self, s: Slice, taken_at: float) -> None:
        fetch, piece = self.live[s.transfer_id], s.piece
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
        fetch.bytes += s.size
        if piece.token_start + piece.token_count == stop and not (fetch.request.chunks or fetch.layers):
            fetch.pace.came(piece.layer, self._layout.num_layers, taken_at)
        s.table = fetch.table

    def _inject(self, slices: Sequence[Slice]) -> None:
        """Slices of one memory."""
        now, in_arena = time.monotonic(), slices[0].memory == ARENA
        layers = sorted({s.piece.layer for s in slices}) if self._trace.enabled else ()
        fetches = [self.live[s.transfer_id] for s in slices]
        with self._trace.measure("inject" if in_arena else "pull", slices=len(slices), layers=layers):
            if in_arena:
                copied, *scattered = self._pool.scatter(slices)
                self._copies.append((copied, [s.slot for s in slices]))
            else:
                scattered = self.pulls.start(slices)
        for fetch, s in zip(fetches, slices, strict=True):
            if not in_arena:
                fetch.unread += 1
            if scattered:
                fetch.last_scatter, fetch.scatter_at = scattered[0], fetch.scatter_at or now
                if in_arena and fetch.layers is not None:
                    fetch.layers.scattered(scattered[0], s.piece)
