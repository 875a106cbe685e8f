"""KV between paged memory of the host and arena slots, and the pool of an engine on any device: `open_pool`.

In FP8 a head of a position stands for values · scale. To FP8: scale = largest |x| of the head / 448, and
values = x / scale, rounded to the nearest FP8 number. A NaN or infinite number gives NaN in its own head
only.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from baton.kv_names.cache_kinds import FP8, CacheArray
from baton.kv_transfer.arena import Arena
from baton.kv_transfer.dense_slices import dense_planes
from baton.kv_transfer.device.pool import (
    LARGEST_FP8,
    LEAST_OF_HEAD,
    Event,
    Outcome,
    Pool,
    Remainder,
    Sums,
    Window,
    arrays_sent,
    planes,
    window,
)
from baton.kv_transfer.layout import Dtypes, runs
from baton.kv_transfer.peer_memory import PeerArena, PeerMemories, export_arena, mark
from baton.kv_transfer.protocol.messages import Export
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.transport import PagedKV

_ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Numbers of so many bytes: numpy does not know all of torch's."""


def prepare(arena: Arena, device: str) -> None:
    """Does what pools on this device need of an arena, once. An engine that stands by does it before its
    turn, since memory is pinned at some 3 GB/s. Raises ValueError if the host has too little memory."""
    if torch.device(device).type == "cuda":
        from baton.kv_transfer.device.cuda_pool import pin_arena

        pin_arena(arena)


def open_pool(kv: PagedKV, arena: Arena) -> Pool:
    """Opens the KV cache of an engine for one direction, on the device where it is."""
    match torch.device(kv.device).type:
        case "cuda":
            from baton.kv_transfer.device.cuda_pool import CudaPool

            return CudaPool(kv, arena)
        case "meta":
            return NoPool()
        case _:
            return HostPool(kv, arena)


class HostPool:
    """Copies items between numpy views of the pool and of the arena. Only a conversion looks at numbers."""

    gather_most = 1  # while the next is gathered, this one is on its way

    def __init__(self, kv: PagedKV, arena: Arena) -> None:
        # As `planes`.
        self._planes = [
            [{layer: [_items(x) for x in rows] for layer, rows in plane.items()} for plane in of_array]
            for of_array in planes(kv)
        ]
        self._kv = kv
        self._layout = kv.layout
        self._arrays = arrays_sent(kv.layout)
        self._heads = kv.heads
        self._arena = arena
        self._exported = False

    def enter_thread(self) -> None:
        pass

    def table(
        self, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0
    ) -> tuple[Sequence[int], int]:
        """The blocks, and the slot of the states."""
        assert self._kv.holds(block_ids, num_tokens), "more positions than blocks"
        return list(block_ids), state_slot

    def record(self) -> Event:
        return None

    def passed(self, event: Event) -> bool:
        return True

    def gather(self, batch: Sequence[Slice], after: Sequence[Event] = ()) -> tuple[Event, Sums]:
        for item in batch:
            if self._exported:  # a late reader sees that it was late, also if these bytes go over TCP
                mark(self._arena, item.slot, item.sum, 0)
            self._gather(item, self._arena.slot(item.slot))
            if item.memory:
                filled = self._arena.slot(item.slot)[: self._slice_bytes(item)]
                mark(self._arena, item.slot, item.sum, xxhash.xxh3_64_intdigest(filled))
        return None, lambda: [0] * len(batch)

    def scatter(
        self, batch: Sequence[Slice], memory: PeerMemories[PeerArena] | None = None
    ) -> tuple[Event, Outcome]:
        if memory is not None:
            return self._pull(memory, batch)
        assert all(item.verified for item in batch), "sums of lanes are those of GPUs"
        for item in batch:
            self._scatter(item, self._arena.slot(item.slot))
        return None, lambda: [0] * len(batch)

    def export(self) -> Export:
        self._exported = True
        return export_arena(self._arena)

    def adopt(self, export: Export) -> None:
        self._exported = True  # it is the arena

    def open(self, export: Export, dtypes: Dtypes | None) -> PeerMemories[PeerArena]:
        return PeerMemories(export, self._layout, self._heads, PeerArena)

    def opened(self, memory: Any) -> bool:
        return True

    def _pull(self, memory: PeerMemories[PeerArena], batch: Sequence[Slice]) -> tuple[Event, Outcome]:
        remainders: list[Remainder] = []
        for item, (arena, number) in [(item, memory.place(item.there)) for item in batch]:
            slot = arena.slot(number)[: self._slice_bytes(item)]
            checksum = xxhash.xxh3_64_intdigest(slot)
            self._scatter(item, slot)
            right = arena.mark(number) == (item.sum, checksum)
            remainders.append(0 if right else None)
        return None, lambda: remainders

    def close(self) -> None:
        self._planes.clear()

    def _slice_bytes(self, item: Slice) -> int:
        array = self._arrays[item.piece.array, item.dtype]
        return array.bytes_of(item.piece.head_count, item.piece.token_count)

    def _gather(self, item: Slice, slot: memoryview) -> None:
        piece, sent = item.piece, self._arrays[item.piece.array, item.dtype]
        kept, plain = self._layout.arrays[piece.array], slot
        if sent.dtype != kept.dtype:
            plain = memoryview(bytearray(kept.bytes_of(piece.head_count, piece.token_count)))
        dense = self._dense(item, plain, kept)
        for pool, staged in self._runs(item, dense):
            staged[:] = pool
        if sent.dtype != kept.dtype:
            numbers = converted(dense, kept.dtype, sent.dtype)
            for plane, x in zip(self._dense(item, slot, sent), numbers, strict=True):
                plane[:] = x

    def _scatter(self, item: Slice, slot: memoryview) -> None:
        kept, sent = self._layout.arrays[item.piece.array], self._arrays[item.piece.array, item.dtype]
        dense = self._dense(item, slot, sent)
        if sent.dtype != kept.dtype:
            dense = converted(dense, sent.dtype, kept.dtype)
        for pool, staged in self._runs(item, dense):
            pool[:] = staged

    def _window(self, item: Slice) -> Window:
        return window(item.piece, self._layout.arrays[item.piece.array], self._heads[item.piece.array])

    def _dense(self, item: Slice, memory: memoryview, array: CacheArray) -> list[np.ndarray]:
        part = self._window(item)
        return dense_planes(memory, array, part.dense_positions, part.dense_heads)

    def _runs(self, item: Slice, dense: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Neighbouring positions of the pool with the heads that are held, and where they are in `dense`."""
        number, part = item.piece.array, self._window(item)
        blocks, start = self._kv.blocks(item.piece, *item.table)
        block_size = self._kv.block_size_of(number)
        if not self._layout.arrays[number].per_token:
            first, last = self._heads[number]
            block_size, start = last - first, part.start
        heads = slice(part.first_head, part.first_head + part.heads)
        for plane, dense_plane in zip(self._planes[item.piece.array], dense, strict=True):
            rows = plane[item.piece.layer]
            items = dense_plane.view(rows[0].dtype)
            staged = items[:, part.dense_start :, part.dense_head : part.dense_head + part.heads]
            for pool, of_row in zip(rows, staged, strict=True):
                is_joined, stop = pool.shape[0] == 1, start + part.count
                for position, row, count in runs(blocks, block_size, start, stop, joined=is_joined):
                    block, offset = (0, row) if is_joined else divmod(row, block_size)
                    at = position - start
                    yield pool[block, offset : offset + count, heads], of_row[at : at + count]


def _items(x: torch.Tensor) -> np.ndarray:
    """[blocks, positions, heads, head_dim]. Blocks that lie behind each other are one."""
    if x.stride(0) == x.shape[1] * x.stride(1):
        x = x.flatten(0, 1).unsqueeze(0)
    return x.view(_ITEMS[x.element_size()]).numpy()


def converted(dense: Sequence[np.ndarray], dtype: str, to: str) -> list[np.ndarray]:
    """The slice in new memory, from one dtype to the other."""
    values, *scales = [torch.from_numpy(x) for x in dense]
    exact = values.view(getattr(torch, dtype)).to(torch.float32, copy=True)
    if scales:
        exact *= scales[0].view(torch.float32)
    scale_planes = []
    if to == FP8:
        scale = exact.abs().amax(dim=-1, keepdim=True).clamp_min(LEAST_OF_HEAD) / LARGEST_FP8
        exact /= scale
        scale_planes = [scale]
    return [x.view(torch.uint8).numpy() for x in (exact.to(getattr(torch, to)), *scale_planes)]


class NoPool(HostPool):
    """For KV on torch's device "meta", which has no bytes: slots travel as they are. What remains is what
    moving KV costs without the copies of either device; `bench.kv` measures it."""

    gather_most = 8  # as on CUDA

    def __init__(self) -> None:
        self._planes = []

    def table(
        self, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0
    ) -> tuple[Sequence[int], int]:
        return block_ids, state_slot

    def gather(self, batch: Sequence[Slice], after: Sequence[Event] = ()) -> tuple[Event, Sums]:
        return None, lambda: [0] * len(batch)

    def scatter(self, batch: Sequence[Slice], memory: Any = None) -> tuple[Event, Outcome]:
        return None, lambda: [0] * len(batch)
