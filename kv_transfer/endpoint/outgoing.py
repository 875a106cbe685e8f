"""What a sender has to send: prefills, their transfers, the slices of these, and which slice is next. Pure;
only the pump uses it.

A *prefill* is known until it is released. A *transfer* of it is open while a peer fetches it, one at a time.
Its slices need credit and room in the window of the session with that peer.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.kv_names.cache_kinds import overlaps
from baton.kv_transfer.endpoint.orders import Ready
from baton.kv_transfer.layout import KVLayout, Piece, Range, cut, intersect, rank_of, slice_bytes
from baton.kv_transfer.protocol.credits import SenderAccount
from baton.kv_transfer.protocol.messages import FirstToken
from baton.kv_transfer.slices import Slice

_LEAST_BYTES = 1 << 20
"""Of a slice of the last layer, if the layer has more: fewer bytes are not worth a frame."""


@dataclass(slots=True, eq=False)
class OutgoingPrefill:
    id: bytes
    table: Any = None  # None until open()
    num_tokens: int = 0
    ready: list[Ready] = field(default_factory=list)
    due: float = math.inf  # since when a client or peer waits for it; infinite: what is ready may wait
    launched: bool = False  # nothing more becomes ready
    first_token: FirstToken | None = None
    transfer: "OutgoingTransfer | None" = None
    gathers: int = 0  # enqueued, their events not passed
    ended: str | None = None
    states_at: tuple[int, ...] = ()  # the positions after which its states are sent
    is_part: bool = False  # of a split prompt: a transfer gets states only at the ends of its ranges
    next_positions: tuple[int, ...] = ()  # it has arrays with windows as far as they are read there; or all
    owner: Any = None  # of the engine, for `Released`


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    id: bytes
    prefill: OutgoingPrefill
    account: SenderAccount  # of its session
    layout: KVLayout  # of slices as they travel
    slot_bytes: int
    large: bool  # its slices only fit into slots that peers read
    ranges: tuple[Range, ...]
    reads: Sequence[Sequence[Range]] = ()  # of each array of the layout, the positions that the peer reads
    pending: deque[tuple[Slice, Any]] = field(default_factory=deque)  # with the event that makes it ready
    frames: int = 0  # pending and handed over
    bytes: int = 0
    left: int = 0  # of these, in `pending`
    goes_on: bool = True  # the peer computes after these positions, and needs states
    lanes: int = 1  # that share its last layer


class Slicing:
    """Cuts KV and states into slices that fit the slots of a transfer. Each slice has heads of one rank.

    Few large slices take the least CPU time. But nothing hides the way of the last layer, so its slices are
    as small as lets each lane take a part."""

    def __init__(self, layout: KVLayout, ranks: int, *, frees_windows: bool = False) -> None:
        """`ranks`: of the sender. `frees_windows`: a prefill without `next_positions` keeps only what the
        next token reads of arrays with windows."""
        self._layout = layout
        self._frees_windows = frees_windows
        # Of each array of the layout. Ranks may hold the same head.
        self._heads = [
            sorted({array.heads_of(rank, ranks) for rank in range(ranks)}) for array in layout.arrays
        ]
        self._ranks = [
            [rank_of(layout, head, ranks, number) for head in range(array.heads)]
            for number, array in enumerate(layout.arrays)
        ]

    def rank(self, s: Slice) -> int:
        """The first rank that holds the heads of a slice."""
        return self._ranks[s.piece.array][s.piece.head_start]

    def can_serve(self, transfer: OutgoingTransfer) -> bool:
        """Whether the prefill has what the transfer asks for, and a slot holds the least that a frame has."""
        prefill, last = transfer.prefill, transfer.ranges[-1][1] if transfer.ranges else 0
        kept_at = prefill.next_positions or ((prefill.num_tokens,) if self._frees_windows else ())
        if kept_at:
            for array, reads in zip(self._layout.arrays, transfer.reads, strict=True):
                if array.window and reads != [*overlaps(reads, array.window.reads(kept_at))]:
                    return False
        return last <= prefill.num_tokens and transfer.layout.least_slice <= transfer.slot_bytes

    def reads(self, ranges: Sequence[Range], next_positions: Sequence[int]) -> list[list[Range]]:
        """Of each array, the positions in `ranges` that a peer reads. `next_positions`: as in `Fetch`."""
        return [[*array.read_of(ranges, next_positions)] for array in self._layout.arrays]

    def add(self, transfer: OutgoingTransfer, ready: Ready) -> None:
        """Makes the slices of all arrays of the layers."""
        if transfer.ranges or transfer.goes_on:
            for layer in self._layout.token_layers if ready.layer is None else (ready.layer,):
                self._add(transfer, ready, layer)

    def _add(self, transfer: OutgoingTransfer, ready: Ready, layer: int) -> None:
        layout = self._layout
        # Later positions change the states. Those of cached positions are not in the slot.
        final = ready.layer is not None and ready.stop in transfer.prefill.states_at
        parts: list[tuple[Range, Range, int]] = []
        for number in layout.numbers[layer]:
            # An array of the request goes in full, whatever positions the peer asks for.
            ranges = [(ready.start, ready.stop)] if final else []
            if layout.sizes[number][0]:
                array, (start, stop) = layout.arrays[number], (ready.start, ready.stop)
                if array.block > 1:
                    is_last = stop == transfer.prefill.num_tokens
                    start, stop = array.in_blocks(start, stop, complete=is_last)
                ranges = intersect(start, stop, transfer.reads[number])
            elif transfer.prefill.is_part:
                ranges = [(a, b) for a, b in transfer.ranges if final and b == ready.stop]
            parts += [(*part, number) for part in itertools.product(ranges, self._heads[number])]
        sent = transfer.layout
        pieces = _cut(sent, layer, parts, transfer.slot_bytes)
        if layer == layout.num_layers - 1 and ready.stop == transfer.prefill.num_tokens:
            share = sum(slice_bytes(sent, piece) for piece in pieces) // transfer.lanes
            most = min(transfer.slot_bytes, max(share, sent.least_slice, _LEAST_BYTES))
            pieces = _cut(sent, layer, parts, most)
        for seq, piece in enumerate(pieces, transfer.frames):
            size, dtype = slice_bytes(sent, piece), sent.arrays[piece.array].dtype
            s = Slice(piece, transfer.id, seq, size, dtype=dtype)
            transfer.pending.append((s, ready.event))
            transfer.bytes += size
            transfer.left += size
        transfer.frames += len(pieces)


def _cut(layout: KVLayout, layer: int, parts: Sequence[tuple[Range, Range, int]], most: int) -> list[Piece]:
    """`parts`: positions, heads and array. `most`: bytes of a slice."""
    return [x for tokens, held, number in parts for x in cut(layout, layer, tokens, held, most, number)]


class Turns:
    """Whose slice is next: that of the stream that needs it most.

    Transfers that a client or peer waits for come first, and of these the one that has waited longest for its
    bytes (highest response ratio next, P. Brinch Hansen 1971). If they shared the link, all would end late.
    So a short one does not wait for long ones, nor a long one for all that are shorter. Others have time
    until their prefills end, which is in their order."""

    def __init__(self, num_layers: int) -> None:
        self._last_layer = num_layers - 1
        self._open: list[OutgoingTransfer] = []

    def add(self, transfer: OutgoingTransfer) -> None:
        self._open.append(transfer)

    def remove(self, transfer: OutgoingTransfer) -> None:
        self._open.remove(transfer)

    def next(self, passed: Callable[[Any], bool], now: float, *, ahead: bool) -> OutgoingTransfer | None:
        """The first transfer with credit, window and a slice that is ready. With `ahead`, a slice of the last
        layer need not be ready."""

        def need(transfer: OutgoingTransfer) -> float:
            return (now - transfer.prefill.due) / max(1, transfer.left)

        for transfer in sorted(self._with_room(), key=need, reverse=True):
            s, event = transfer.pending[0]
            if event is None or (ahead and s.piece.layer == self._last_layer) or passed(event):
                return transfer
        return None

    @property
    def waiting(self) -> bool:
        """Whether a slice with credit and window waits to be ready. Ask only after `next` found nothing."""
        return any(True for _ in self._with_room())

    @property
    def urgent(self) -> bool:
        """Whether KV of a prefill that is launched up to its end has not left yet."""
        return any(t.prefill.launched and (t.pending or t.prefill.gathers) for t in self._open)

    def _with_room(self) -> Iterator[OutgoingTransfer]:
        return (t for t in self._open if t.pending and t.account.has_room)
