"""The copies of a tier when an engine has several ranks.

    rank 0: `RankedStore` ── CopyCell(cell, place) ─▶ other ranks: `rank_copier`
                          ◀─ Copied(count, wrong) ──  each between its cache and its own memory

Each rank keeps its heads of a cell. A cell is intact if it is intact on all ranks.
"""

from collections import deque
from collections.abc import Sequence

from baton.kv_transfer.endpoint.other_ranks import Line
from baton.kv_transfer.protocol.local_messages import CopyCell
from baton.kv_transfer.stores import CellStore, Pair


class RankedStore(CellStore):
    """A store of rank 0, and those of the other ranks on the same line."""

    def __init__(self, rank0: CellStore, line: Line) -> None:
        self.batch = rank0.batch
        self.num_places, self.ready = rank0.num_places, rank0.ready
        self._rank0 = rank0
        self._line = line
        self._intact = deque[bool]()  # copies here that are over and not reported
        self._ended = 0  # copies that are over on all ranks, since the start

    def expect(self, places: int) -> None:
        self._rank0.expect(places)
        self.num_places, self.ready = self._rank0.num_places, self._rank0.ready

    @property
    def room(self) -> int:
        """As here: the other ranks begin a copy when they have room for it."""
        return self._rank0.room

    def copy(self, pairs: Sequence[Pair], *, is_load: bool, window_cells: Sequence[int]) -> None:
        self._rank0.copy(pairs, is_load=is_load, window_cells=window_cells)
        for rank in range(len(self._line.ordered)):
            of_pairs = zip(pairs, window_cells, strict=True)
            self._line.order(rank, [CopyCell(*pair, is_load, window_cell) for pair, window_cell in of_pairs])

    def ended(self) -> list[bool]:
        """Raises `ChannelClosed` if a rank is gone, and `RuntimeError` if one hangs."""
        line, intact = self._line, list[bool]()
        line.receive()
        self._intact += self._rank0.ended()
        while line.over([self._ended + 1] * len(line.ordered)) and self._intact:
            self._ended += 1
            found = [of_rank.pop(self._ended, 0) for of_rank in line.found]
            intact.append(self._intact.popleft() and all(remainder == 0 for remainder in found))
        return intact

    def close(self) -> None:
        self._rank0.close()
