"""Copies slices into reserved blocks: from arena slots, or from memory that the sender exports.

One injection costs the host some 0.2 ms, and the same thread launches steps. So while the device computes, a
slice waits up to 2 ms for others, unless it is of the last layer. While a launch is due, all slices wait.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.kv_transfer.endpoint.copies import Copies
from baton.kv_transfer.endpoint.live_fetch import LiveFetch
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
        copies: those that are under way, and the memory of peers.
    """

    def __init__(self, pool: "Pool", layout: KVLayout, trace: TraceWriter, slot_bytes: int) -> None:
        self.live: dict[bytes, LiveFetch] = {}
        self.copies = Copies(pool)
        self._layout = layout
        self._trace = trace
        self._at_once = scattered_at_once(slot_bytes) if pool.gather_most > 1 else AT_ONCE_ON_HOST
        self.arrivals: deque[Slice] = deque()
        self._oldest = 0.0  # when the first of them came
        # Since the last `emptied`: slots that nothing reads any more, and those of wrong slices.
        self._emptied: list[int] = []
        self._damaged: list[int] = []

    def __bool__(self) -> bool:
        """Whether anything has arrived and is not in its place, or a slot is not given back."""
        return bool(self.arrivals or self.copies or self._emptied)

    def arrived(self, s: Slice) -> None:
        fetch = self.live.get(s.transfer_id)
        if fetch is not None and fetch.layers is not None:
            fetch.layers.arrived(s.piece)
        self._oldest = self._oldest if self.arrivals else time.monotonic()
        self.arrivals.append(s)

    def emptied(self) -> list[local.Emptied]:
        """The slots that nothing reads any more, since the last call: of copies that are over, and of ended
        transfers."""
        self.look()
        slots, damaged = self._emptied, self._damaged
        self._emptied, self._damaged = [], []
        return [local.Emptied(slots, damaged)] if slots else []

    def look(self) -> None:
        """Ends copies that are over. Only then may a slice be used, if it is right."""
        for slices, intact in self.copies.ended():
            for s, right in zip(slices, intact, strict=True):
                self._emptied.append(s.slot)
                if not right:
                    self._damaged.append(s.slot)
                elif fetch := self.live.get(s.transfer_id):
                    fetch.unwritten -= 1
                    if fetch.layers is not None:
                        fetch.layers.written(s.piece)

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
                    self._emptied.append(s.slot)
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
        now, way = time.monotonic(), "inject" if slices[0].memory == ARENA else "pull"
        layers = sorted({s.piece.layer for s in slices}) if self._trace.enabled else ()
        fetches = [self.live[s.transfer_id] for s in slices]
        with self._trace.measure(way, slices=len(slices), layers=layers):
            started = self.copies.start(slices)
        for fetch in fetches:
            fetch.unwritten += 1
            if started:
                fetch.last_scatter, fetch.scatter_at = started[0], fetch.scatter_at or now
