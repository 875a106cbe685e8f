"""Copies of cells of a cache, for the tiers below the device: memory of the host, and its disk.

A *cell* is a block of KV, or a slot of states. A tier of the engine decides what is copied, loaded and
dropped. A store here copies the cells of one kind: `host_store` to memory of the host (`cuda_store` from a
GPU), `disk_store` to a file, `endpoint.ranked_store` on all ranks of an engine.

A *place* has all layers of one cell, as this rank holds them. A cell gets a checksum when it is saved. When
it is loaded, the checksum must match. If it does not, the bytes of the cell are undefined.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from baton.kv_names.cache_kinds import FP8
from baton.kv_transfer.device.pool import tensor_planes
from baton.kv_transfer.transport import PagedKV

if TYPE_CHECKING:
    import torch

Pair = tuple[int, int]
"""A cell and a place."""


@dataclass(frozen=True, slots=True)
class CacheCells:
    """The cells of a cache: blocks of all arrays of tokens, or slots of all arrays of requests."""

    kv: PagedKV
    of_states: bool = False

    @property
    def planes(self) -> "list[dict[int, torch.Tensor]]":
        """By layer, as in `pool.planes`: [rows, cells, positions, heads, head_dim]."""
        of_arrays = zip(self.kv.layout.arrays, tensor_planes(self.kv), strict=True)
        return [*chain.from_iterable(x for array, x in of_arrays if array.per_token != self.of_states)]

    @property
    def windowed(self) -> list[bool]:
        """Of each of `planes`, whether its array has a window."""
        arrays = (array for array in self.kv.layout.arrays if array.per_token != self.of_states)
        return [array.window is not None for array in arrays for _ in range(1 + (array.dtype == FP8))]

    @property
    def cell_bytes(self) -> int:
        """The bytes of a cell, as this rank holds it."""
        return sum(pool[:, 0].nbytes for plane in self.planes for pool in plane.values())


class CellStore(Protocol):
    """The base of stores. The caller has one thread. It owns cells and places from the start of their copy to
    its end."""

    batch: int
    """Cells that are worth copying together."""
    num_places: int
    """Places that it may have. It falls to `ready` if no more memory can be had."""
    ready: int
    """Places that have memory: the first ones. It only grows."""

    def expect(self, places: int) -> None:
        """So many places are in use: more should soon be ready. Does not wait for them. Does nothing if all
        are ready from the start."""
        return

    @property
    def room(self) -> int:
        """How many cells may be copied now."""

    def copy(self, pairs: Sequence[Pair], *, is_load: bool, window_cells: Sequence[int]) -> None:
        """Starts to copy cells to places, or places into cells. No step writes a cell that is saved, or the
        caller does not use its place. No step uses a cell that is loaded. `window_cells`: of each pair, the
        cell in arrays with windows."""

    def ended(self) -> list[bool]:
        """Of each cell with a copy that is over, in the order of the copies: whether it is whole. A cell that
        is saved is, unless a disk fails."""

    def close(self) -> None:
        """Waits for the copies, and frees the places."""


class HostStore(CellStore, Protocol):
    """The base of stores in the memory of the host."""

    sums: list[int | None]
    """The checksum of each place. None: a cell that is loaded from there is not whole."""

    def have_all(self) -> None:
        """Waits until all places are ready, or no more memory can be had. Does nothing if they are."""
        return

    def memory(self, place: int) -> memoryview:
        """The bytes of a place. No copy uses them while the caller does."""
