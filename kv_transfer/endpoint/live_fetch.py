"""What a receiver knows of a fetch: what came, what is in the blocks, and when the rest should come. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.kv_transfer.layout import Range, Slice
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
    """What is in the blocks of the ranges of a shared prompt, by layer."""

    def __init__(self, ranges: Sequence[Range], layers: Sequence[int], heads: int) -> None:
        self._ranges = ranges
        # Of each layer and range: heads of positions that are not in their blocks.
        self._missing = {layer: [heads * (stop - start) for start, stop in ranges] for layer in layers}
        self._scatters: deque[tuple[Any, Slice]] = deque()  # under way, with their events
        self.not_begun = {stop for _, stop in ranges}  # ends of ranges of which no KV came

    def scattered(self, event: Any, piece: Slice) -> None:
        self._scatters.append((event, piece))

    def written(self, piece: Slice) -> None:
        missing = self._missing[piece.layer]
        index = next(i for i, (_, stop) in enumerate(self._ranges) if piece.token_start < stop)
        missing[index] -= piece.token_count * piece.head_count

    def has(self, layer: int, stop: int, passed: Callable[[Any], bool]) -> bool:
        """Whether the layer has all positions below `stop`."""
        while self._scatters and passed(self._scatters[0][0]):
            self.written(self._scatters.popleft()[1])
        of_ranges = zip(self._ranges, self._missing[layer], strict=True)
        return not any(missing for (start, _), missing in of_ranges if start < stop)


@dataclass(slots=True, eq=False)
class LiveFetch:
    decode_id: bytes
    request: local.FetchIn  # as last sent, with the current transfer id
    table: Any
    started: float
    refetches: int = 0
    frames: int = 0  # taken from the channel
    bytes: int = 0
    heads: int = 0  # of K and V, over all positions and layers
    unread: int = 0  # slices in exported memory: not verified yet, or wrong
    pace: LayerPace = field(default_factory=LayerPace)  # of the last tokens
    layers: LayersThere | None = None  # of ranges of a shared prompt
    scatter_at: float = 0.0  # the first one
    complete: local.Complete | None = None  # all frames are there, though some may be in `_arrivals` yet
    last_scatter: Any = None  # event
    outcome: FetchFailed | Closed | None = None  # reported when the last scatter is over
