"""The interface of a rank's KV cache, as a sender or a receiver uses it: `Pool`. And what its implementations
share: where the parts of a cache (`kv_names.cache_kinds`) and of a slice lie."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch

from baton.kv_names.cache_kinds import FP8, ITEM_BYTES, CacheArray, Range
from baton.kv_transfer.layout import Dtypes, KVLayout, Piece, convertible
from baton.kv_transfer.peer_memory import PeerMemory
from baton.kv_transfer.protocol.messages import Export
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.transport import PagedKV

if TYPE_CHECKING:
    from baton.kv_transfer.transport import Rows

LARGEST_FP8 = 448.0
LEAST_OF_HEAD = 2.0**-100
"""In FP8 counts as the largest value of a head of zeros, so that its scale is not 0."""

Event = Any  # torch.cuda.Event; None where everything is done at once
Remainder = int | None
"""The checksum of a slice minus the sum of the words that a rank has read, modulo 2⁶⁴. None: wrong or
overwritten.

The ranks of a worker may read different heads of a slice. Then only the rank with the first head subtracts
from the checksum, the others from 0. So the slice is right if their remainders add up to 0."""
Outcome = Callable[[], list[Remainder]]
"""Returns the remainder of each slice that was scattered. Call it once, when its event has passed."""
Sums = Callable[[], list[int]]
"""The same of each slice that was gathered into the arena: its checksum. 0: the pool computes none."""


class Pool(Protocol):
    """The KV cache of one rank (`HostPool`, `CudaPool`), or of all ranks (`RankedPool`). Of a slice it copies
    the heads that the ranks hold."""

    def enter_thread(self) -> None:
        """Call first in each thread that uses the pool."""

    def table(self, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0) -> Any:
        """Where positions [0, num_tokens) and the states of a request lie. `block_ids`: those of all tables
        of `PagedKV`."""

    def record(self) -> Event:
        """An event on the current stream."""

    def passed(self, event: Event) -> bool: ...

    gather_most: int
    """How many slices are worth gathering together."""

    def gather(self, batch: Sequence[Slice], after: Sequence[Event] = ()) -> tuple[Event, Sums]:
        """Pool → slots, in `Slice.dtype`. When the event that is returned has passed, the slots are filled
        and the pool is no longer read. `after`: nothing, or for each slice the event after which it may be
        read. None: at once."""

    def scatter(self, batch: Sequence[Slice], memory: Any = None) -> tuple[Event, Outcome]:
        """Slots of the arena → pool. Or slices that lie `there`, in a memory of a peer that is open.

        When the event has passed, the slots may be used again and the outcome is known. Of slices that are
        not `verified`, and of those of a peer, only the outcome says whether the bytes in the pool are right.
        Raises Unreachable if the memory cannot be read any more."""

    def export(self) -> Export:
        """Lets peers on this host read slices of the memory `EXPORTED`. Raises Unreachable if that is not
        supported here. With several ranks it waits for the others."""

    def adopt(self, export: Export) -> None:
        """Instead of `export`: these slices go to slots of the transfer process.
        Raises Unreachable. With several ranks it waits for the others."""

    def open(self, export: Export, dtypes: Dtypes | None) -> PeerMemory:
        """`dtypes`: of slices in it. None: not known. Raises Unreachable unless a test copy succeeded."""

    def opened(self, memory: Any) -> bool:
        """Whether all ranks can read `memory`, which `open` returned. False: not all have answered yet.
        Raises Unreachable if a rank cannot read it."""

    def close(self) -> None:
        """Wait for everything enqueued, and let go of the arena."""


class Window(NamedTuple):
    """The part of a slice that a rank holds: positions × heads, in a pool and in the slice.

    The slice is dense: [rows, dense_positions, dense_heads, head_dim]. Of an array that each request has, the
    heads take the place of positions, and each of these has one head."""

    start: int  # position in the request's blocks, or in its slot
    count: int  # of positions
    first_head: int  # among those of this rank
    heads: int
    dense_start: int
    dense_head: int
    dense_positions: int
    dense_heads: int

    @property
    def dense_size(self) -> int:
        """Heads of all positions of the slice, in one row."""
        return self.dense_positions * self.dense_heads

    def cut(self, pieces: int) -> "Window":
        """Of an array that each request has, if each head counts as so many."""
        start, count, dense_start, positions = (
            pieces * x for x in (self.start, self.count, self.dense_start, self.dense_positions)
        )
        return self._replace(start=start, count=count, dense_start=dense_start, dense_positions=positions)

    @property
    def is_first(self) -> bool:
        """Whether the rank holds the first head of the slice."""
        return not (self.dense_start or self.dense_head)


def window(piece: Piece, array: CacheArray, rank_heads: Range) -> Window:
    """`rank_heads`: the heads of the array that this rank has."""
    start, stop = rank_heads
    first, last = max(piece.head_start, start), min(piece.head_start + piece.head_count, stop)
    in_rank, in_piece, count = first - start, first - piece.head_start, last - first
    if array.per_token:
        tokens = piece.token_count
        return Window(piece.token_start, tokens, in_rank, count, 0, in_piece, tokens, piece.head_count)
    return Window(in_rank, count, 0, 1, in_piece, 0, piece.head_count, 1)


def planes(kv: PagedKV) -> "list[list[dict[int, Rows]]]":
    """`PagedKV.planes` by layer. Asserts that all arrays of the layout are there, in their shapes."""
    by_array: list[list[dict[int, Rows]]] = []
    layout = kv.layout
    for array, layers, (first, last), of_array in zip(
        layout.arrays, layout.layers, kv.heads, kv.planes, strict=True
    ):
        heads = last - first
        sizes = (kv.block_size_of(len(by_array)), heads) if array.per_token else (heads, 1)
        dtypes = [(array.head_dim, getattr(torch, array.dtype))]
        if array.dtype == FP8:
            dtypes.append((1, torch.float32))
        by_array.append([])
        for tensors, (head_dim, dtype) in zip(of_array, dtypes, strict=True):
            by_array[-1].append(dict(zip(layers, tensors, strict=True)))
            for rows in tensors:
                assert len(rows) == array.rows, f"{array.name} has {len(rows)} rows, layout says {array.rows}"
                for x in rows:
                    shape = x.shape[0], *sizes, head_dim
                    assert tuple(x.shape) == shape, f"{array.name}: {tuple(x.shape)} is not {shape}"
                    assert x.dtype is dtype, f"{array.name} is {x.dtype}, layout says {dtype}"
    return by_array


def tensor_planes(kv: PagedKV) -> list[list[dict[int, torch.Tensor]]]:
    """As `planes`. All rows of an array must be one tensor, alike in all layers."""
    by_array = planes(kv)
    for plane in chain.from_iterable(by_array):
        assert all(isinstance(rows, torch.Tensor) for rows in plane.values()), "K and V are two tensors"
        strides = {rows.stride() for rows in plane.values() if isinstance(rows, torch.Tensor)}
        assert len(strides) == 1, f"layers keep an array with different strides: {strides}"
    return cast("list[list[dict[int, torch.Tensor]]]", by_array)


def arrays_sent(layout: KVLayout) -> dict[tuple[int, str | None], CacheArray]:
    """Each array as it may travel, by `Piece.array` and `Slice.dtype`: never in a wider dtype."""
    arrays = dict[tuple[int, str | None], CacheArray]()
    for number, array in enumerate(layout.arrays):
        arrays[number, None] = arrays[number, array.dtype] = array
        for dtype in ITEM_BYTES if array.kind.converts else ():
            is_wider = ITEM_BYTES[dtype] > ITEM_BYTES[array.dtype]
            if not is_wider and convertible(dtype, array.dtype, array.per_token):
                arrays[number, dtype] = replace(array, dtype=dtype)
    return arrays
