"""What a receiver knows of a fetch: what came, what is in the blocks, and when the rest should come. Pure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.kv_transfer.layout import KVLayout, Piece, Range
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.transport import Closed, FetchFailed


@dataclass(slots=True)
class LayerPace:
    """Estimates when the last layer of a prompt's last tokens comes, from the speed of the layers before.

    Layers that are taken at the same time do not show the speed: the first of them waited for the others."""

    ends_at: float = math.inf
    _first: int = -1  # the last layer of those that were taken first
    _since: float = 0.0

    def came(self, layer: int, layers: int, now: float) -> None:
        if self._first < 0 or now == self._since:
            self._first, self._since = max(self._first, layer), now
        done, left = layer - self._first, layers - 1 - layer
        if done > 0 or not left:
            self.ends_at = now + left * (now - self._since) / max(1, done)


class LayersThere:
    """What is in the blocks of the ranges of a split prompt, by layer, and which states are in their slot.
    States are here all arrays of a request.

    A layer needs its states before it begins. So they count with the layer before: the first ones with −1."""

    def __init__(
        self,
        ranges: Sequence[Range],
        layout: KVLayout,
        states_at: Sequence[int],
        next_positions: Sequence[int] = (),
    ) -> None:
        """`states_at`: ends of ranges after which states come. `next_positions`: as in `Fetch`."""
        self._ranges = ranges
        # Of each layer and range: heads of positions and of states that are not in their place.
        self._missing = {layer: [0] * len(ranges) for layer in range(-1, layout.num_layers)}
        for array, layers in zip(layout.arrays, layout.layers, strict=True):
            for layer, (i, each) in itertools.product(layers, enumerate(ranges)):
                if array.per_token:
                    read = array.read_of([each], next_positions)
                    self._missing[layer][i] += array.heads * sum(stop - start for start, stop in read)
                else:
                    self._missing[layer - 1][i] += array.heads * (each[1] in states_at)
        of_ranges = zip(ranges, zip(*self._missing.values(), strict=True), strict=True)
        # Ends of ranges of which something came, or of which no layer gets anything, until `began`.
        self.beginning = {stop for (_, stop), missing in of_ranges if not any(missing)}
        self._no_kv = {stop for _, stop in ranges} - self.beginning  # ends of ranges of which nothing came

    def arrived(self, piece: Piece) -> None:
        stop = piece.token_start + piece.token_count
        if stop in self._no_kv:
            self._no_kv.remove(stop)
            self.beginning.add(stop)

    def began(self) -> list[int]:
        """The ends of ranges of which KV came, and all states of the first layer, since the last call."""
        ends = [stop for stop in sorted(self.beginning) if self.has(-1, stop)]
        self.beginning.difference_update(ends)
        return ends

    def written(self, piece: Piece) -> None:
        """A slice is in its place, verified."""
        last = piece.token_start + piece.token_count
        index = next(i for i, (_, stop) in enumerate(self._ranges) if last <= stop)
        layer = piece.layer if piece.token_count else piece.layer - 1
        self._missing[layer][index] -= max(1, piece.token_count) * piece.head_count

    def has(self, layer: int, stop: int) -> bool:
        """Whether the layer has all positions below `stop`, and the next layer its states."""
        of_ranges = zip(self._ranges, self._missing[layer], strict=True)
        return not any(missing for (start, _), missing in of_ranges if start < stop)

    def has_all(self, stop: int) -> bool:
        """As `has`, of all layers."""
        return all(self.has(layer, stop) for layer in reversed(self._missing))


@dataclass(slots=True, eq=False)
class LiveFetch:
    decode_id: bytes
    request: local.FetchIn  # as last sent, with the current transfer id
    table: Any
    started: float
    owner: Any  # of the engine, for the events
    refetches: int = 0
    frames: int = 0  # taken from the channel
    bytes: int = 0
    unwritten: int = 0  # slices whose copy is not over, or which were wrong
    pace: LayerPace = field(default_factory=LayerPace)  # of the last tokens
    layers: LayersThere | None = None  # of ranges of a split prompt
    scatter_at: float = 0.0  # the first one
    complete: local.Complete | None = None  # all frames are there, though some may be in `_arrivals` yet
    last_scatter: Any = None  # event
    outcome: FetchFailed | Closed | None = None  # reported when the last scatter is over
