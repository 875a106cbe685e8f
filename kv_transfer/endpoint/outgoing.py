"""What a sender has to send: prefills, their transfers, and the slices of these. Pure; only the pump uses it.

A *prefill* is known until it is released. A *transfer* of it is open while a peer fetches it, one at a time.
Its slices need credit and room in the window of the session with that peer.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from baton.kv_transfer.layout import KVLayout, Range, Slice, cut, intersect, rank_of, slice_bytes
from baton.kv_transfer.protocol.credits import SenderAccount
from baton.kv_transfer.protocol.messages import FirstToken


@dataclass(slots=True, eq=False)
class OutgoingPrefill:
    id: bytes
    table: Any = None  # None until open()
    num_tokens: int = 0
    ready: list[tuple[int, int, int, Any]] = field(default_factory=list)  # (layer, start, stop, event)
    launched: bool = False  # nothing more becomes ready
    first_token: FirstToken | None = None
    transfer: OutgoingTransfer | None = None
    gathers: int = 0  # enqueued, their events not passed
    ended: str | None = None


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    id: bytes
    prefill: OutgoingPrefill
    account: SenderAccount  # of its session
    slot_bytes: int
    large: bool  # its slices only fit into slots that peers read
    ranges: tuple[Range, ...]
    heads: Range
    pending: deque[tuple[Slice, Any]] = field(default_factory=deque)  # with the event that makes it ready
    frames: int = 0  # pending and handed over
    bytes: int = 0
    seq: int = 0


class Slicing:
    """Cuts KV and states into slices that fit the slots of a transfer. Each slice has heads of one rank."""

    def __init__(self, layout: KVLayout, ranks: int) -> None:
        """`ranks`: of the sender."""
        self._layout = layout
        self._ranks = ranks
        # Ranks may hold the same head. By state type; None: KV.
        self._heads = {
            state: sorted({part.heads_of(rank, ranks) for rank in range(ranks)})
            for state, part in layout.parts.items()
        }

    def rank(self, piece: Slice) -> int:
        """The first rank that holds the heads of a slice."""
        return rank_of(self._layout, piece.head_start, self._ranks, piece.state)

    def can_serve(self, transfer: OutgoingTransfer) -> bool:
        """Whether the prefill has what the transfer asks for, and a slot holds the least that a frame has."""
        layout, (first_head, head) = self._layout, transfer.heads
        last = transfer.ranges[-1][1] if transfer.ranges else 0
        least = [
            part.head_bytes * (head - first_head if part.per_token else 1) for part in layout.parts.values()
        ]
        there = last <= transfer.prefill.num_tokens and head <= layout.num_kv_heads
        return there and max(least) <= transfer.slot_bytes

    def add(self, transfer: OutgoingTransfer, layer: int, start: int, stop: int, event: Any) -> None:
        """These positions of a layer are ready once `event` has passed: adds their slices to the transfer."""
        layout, pieces = self._layout, []
        for state, part in layout.parts.items():
            if layer not in layout.layers_of(state):
                continue
            # A part of each request goes in full, whatever positions and heads the peer asks for.
            ranges, heads = [(start, stop)], self._heads[state]
            if part.per_token:
                ranges = intersect(start, stop, transfer.ranges)
                heads = list(intersect(*transfer.heads, heads))
            for tokens, held in itertools.product(ranges, heads):
                pieces += cut(layout, layer, tokens, held, transfer.slot_bytes, state)
        transfer.bytes += sum(slice_bytes(layout, piece) for piece in pieces)
        transfer.pending.extend((piece, event) for piece in pieces)
        transfer.frames += len(pieces)
