"""Copies between rank 0 and the other ranks: kernels that write to the memory of another GPU.

    gather      the ranks from 1 on ─▶ rank 0: the columns of each, side by side
    broadcast   rank 0 ─▶ the ranks from 1 on

A program copies a tile. Programs of the same tile meet, and no others:

    sender      wait until the receiver has read the tile of the call before ─▶ write the tile to the
                receiver's inbox ─▶ count there
    receiver    wait until the sender has counted ─▶ read the inbox ─▶ count at the sender

The first wait is over at once, unless calls follow each other closely. NCCL's copies meet twice, and its
gather needs a copy more to put the columns of each rank beside the others.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options

MAX_TILES = 1 << 14
BLOCK = 4096  # elements of a tile of `gather`
WORDS = 1024  # of a tile of `broadcast`, 8 bytes each


class PeerMemory:
    """Memory of each rank that the others write to: counts, then inboxes."""

    counted: ClassVar[int]
    """Places that have a count for each rank."""

    def __init__(self, rank: int, addresses: Sequence[int], nbytes: int, device: torch.device) -> None:
        """`addresses` [ranks]: where this device sees the memory of each rank, which holds `nbytes` that are
        zero at first. It belongs to this object from then on."""
        self._rank = rank
        self._ranks = len(addresses)
        self._counts_bytes = self.counted * self._ranks * 8
        self._inboxes_bytes = nbytes - self._counts_bytes
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)


class PeerCopy(PeerMemory):
    """The end of one rank: for calls of `gather`, or for calls of `broadcast`. Calls need the same shapes, in
    the same order, on all ranks."""

    counted = MAX_TILES

    def can_gather(self, rows: int, share: int, itemsize: int) -> bool:
        """Whether the memory holds so many rows, of which each rank has `share` columns."""
        tiles = rows * triton.cdiv(share, BLOCK)
        return rows <= self._capacity(share, itemsize) and tiles <= MAX_TILES

    def gather(self, x: Tensor, size: int) -> Tensor:
        """x [rows, part]: the columns of this rank, an equal share but for those of the last rank. Returns
        [rows, size], which is undefined on the ranks from 1 on.

        `size` and the dtype are the same in all calls: the place of a tile in the inbox depends on them."""
        assert x.is_contiguous(), "the kernel assumes dense rows"
        rows, width = x.shape
        share = triton.cdiv(size, self._ranks)
        out = x.new_empty(rows, size)
        _gather[(rows, triton.cdiv(share, BLOCK))](
            self._addresses,
            x,
            out,
            width,
            share,
            size,
            self._capacity(share, x.itemsize),
            self._counts_bytes,
            RANK=self._rank,
            RANKS=self._ranks,
            BLOCK=BLOCK,
            num_warps=4,
            **launch_options(),
        )
        return out

    def can_broadcast(self, x: Tensor) -> bool:
        return x.is_contiguous() and x.nbytes % 8 == 0 and x.nbytes <= self._inboxes_bytes

    def broadcast(self, x: Tensor) -> None:
        """Overwrites x with that of rank 0."""
        words = x.view(-1).view(torch.int64)
        _broadcast[(triton.cdiv(len(words), WORDS),)](
            self._addresses,
            words,
            len(words),
            self._counts_bytes,
            RANK=self._rank,
            RANKS=self._ranks,
            WORDS=WORDS,
            num_warps=4,
            **launch_options(),
        )

    def _capacity(self, share: int, itemsize: int) -> int:
        """Rows of an inbox."""
        return self._inboxes_bytes // ((self._ranks - 1) * share * itemsize)


def counts_bytes(ranks: int) -> int:
    """Bytes of memory before the inboxes."""
    return MAX_TILES * ranks * 8


@triton.jit
def _gather(
    addresses,
    x,
    out,
    width,
    share,
    size,
    capacity,  # rows of an inbox
    counts_bytes,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inputs_ready()
    row = tl.program_id(0).to(tl.int64)
    tile = row * tl.num_programs(1) + tl.program_id(1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts = _counts(addresses, RANK, tile, RANKS)
    calls = tl.load(counts + RANK)
    values = tl.load(x + row * width + column, mask=column < width, other=0.0)
    # Inbox i of rank 0 is for rank i + 1.
    inboxes = (tl.load(addresses) + counts_bytes).to(tl.pointer_type(x.dtype.element_ty))
    if RANK == 0:
        to = out + row * size + column
        tl.store(to, values, mask=column < width)
        _wait(counts, calls + 1, RANK, RANKS)
        for source in tl.static_range(1, RANKS):
            inside = (column < share) & (source * share + column < size)
            inbox = inboxes + ((source - 1) * capacity + row) * share + column
            tl.store(to + source * share, tl.load(inbox, mask=inside, other=0.0), mask=inside)
    else:
        _wait(counts, calls, RANK, RANKS)
        tl.store(inboxes + ((RANK - 1) * capacity + row) * share + column, values, mask=column < width)
    _count(addresses, counts, calls, tile, RANK, RANKS)


@triton.jit
def _broadcast(
    addresses, x, count, counts_bytes, RANK: tl.constexpr, RANKS: tl.constexpr, WORDS: tl.constexpr
):
    inputs_ready()
    tile = tl.program_id(0).to(tl.int64)
    word = tile * WORDS + tl.arange(0, WORDS)
    inside = word < count
    counts = _counts(addresses, RANK, tile, RANKS)
    calls = tl.load(counts + RANK)
    if RANK == 0:
        values = tl.load(x + word, mask=inside, other=0)
        _wait(counts, calls, RANK, RANKS)
        for to in tl.static_range(1, RANKS):
            inbox = (tl.load(addresses + to) + counts_bytes).to(tl.pointer_type(tl.int64))
            tl.store(inbox + word, values, mask=inside)
    else:
        _wait(counts, calls + 1, RANK, RANKS)
        inbox = (tl.load(addresses + RANK) + counts_bytes).to(tl.pointer_type(tl.int64))
        tl.store(x + word, tl.load(inbox + word, mask=inside, other=0), mask=inside)
    _count(addresses, counts, calls, tile, RANK, RANKS)


@triton.jit
def _counts(addresses, rank, tile, RANKS: tl.constexpr):
    """The counts of a tile in the memory of a rank [ranks]. At the index of that rank: its own calls. At the
    index of a rank on the other side: how often that rank has counted here."""
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + tile * RANKS


@triton.jit
def _wait(counts, calls, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Waits until each rank on the other side has counted here for so many calls."""
    for other in tl.static_range(RANKS):
        if (other == 0) != (RANK == 0):
            while tl.atomic_add(counts + other, 0, sem="acquire", scope="sys") < calls:
                pass
    tl.debug_barrier()  # one thread has seen the counts before all of them go on


@triton.jit
def _count(addresses, counts, calls, tile, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Counts a call here, and at each rank on the other side."""
    tl.debug_barrier()  # all threads have read or written before one of them counts
    for other in tl.static_range(RANKS):
        if (other == 0) != (RANK == 0):
            peer_counts = _counts(addresses, other, tile, RANKS)
            tl.atomic_add(peer_counts + RANK, 1, sem="release", scope="sys")
    tl.store(counts + RANK, calls + 1)
