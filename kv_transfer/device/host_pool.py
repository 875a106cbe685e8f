"""KV between paged memory of the host and arena slots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.device.convert import Dense
from baton.kv_transfer.device.pool import Event, Outcome, Rest, Staged, held_heads, of_each_dtype
from baton.kv_transfer.layout import runs, slice_bytes
from baton.kv_transfer.peer_memory import PeerArena, PeerMemories, PeerMemory, Unreachable, export_arena, mark
from baton.kv_transfer.protocol.messages import Export
from baton.kv_transfer.transport import PagedKV


class HostPool:
    """Copies bytes between numpy views of the pool and of the arena. Only a conversion looks at numbers."""

    gather_most = 1  # while the next is gathered, this one is on its way

    def __init__(self, kv: PagedKV, arena: Arena) -> None:
        # layer → [2, rows, heads, bytes of a head], and [2, blocks, block_size, heads]
        rows = [t.flatten(1, 2).view(torch.uint8).numpy() for t in kv.layers]
        self._rows = dict(zip(kv.layout.kv_layers, rows, strict=True))
        scales = [t.transpose(2, 3).numpy() for t in kv.scales]
        self._scales = dict(zip(kv.layout.kv_layers, scales, strict=False))  # none, or of all layers
        # state type → layer → [slots, rows, heads, bytes of a head]
        self._states = [
            dict(zip(kv.layout.state_layers, [t.view(torch.uint8).numpy() for t in layers], strict=True))
            for layers in kv.states
        ]
        self._block_size = kv.block_size
        self._layout = kv.layout
        self._layouts = of_each_dtype(kv.layout)
        self._heads = kv.heads
        self._arena = arena
        self._exported = False

    def enter_thread(self) -> None:
        pass

    def table(self, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0) -> Sequence[int]:
        """The blocks, and behind them the slot of the states."""
        assert num_tokens <= len(block_ids) * self._block_size, "more positions than blocks"
        return [*block_ids, state_slot]

    def record(self) -> Event:
        return None

    def passed(self, event: Event) -> bool:
        return True

    def gather(self, batch: Sequence[Staged], after: Sequence[Event] = ()) -> Event:
        for item in batch:
            if self._exported:  # a late reader sees that it was late, also if these bytes go over TCP
                mark(self._arena, item.slot, item.generation, 0)
            self._gather(item, self._arena.slot(item.slot))
            if item.generation:
                filled = self._arena.slot(item.slot)[: slice_bytes(self._layout, item.piece)]
                mark(self._arena, item.slot, item.generation, xxhash.xxh3_64_intdigest(filled))

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        for item in batch:
            self._scatter(item, self._arena.slot(item.slot))
        return None, None

    def export(self) -> Export:
        self._exported = True
        return export_arena(self._arena)

    def adopt(self, export: Export) -> None:
        self._exported = True  # it is the arena

    def open(self, export: Export, dtype: str) -> PeerMemories[PeerArena]:
        return PeerMemories(export, self._layout, self._heads, PeerArena)

    def opened(self, memory: Any) -> bool:
        return True

    def pull(self, memory: PeerMemories[PeerArena], batch: Sequence[Staged]) -> tuple[Event, Outcome]:
        rests: list[Rest] = []
        for item, (arena, number) in [(item, memory.place(item.slot)) for item in batch]:
            slot = arena.slot(number)[: slice_bytes(self._layouts[item.dtype], item.piece)]
            checksum = xxhash.xxh3_64_intdigest(slot)
            self._scatter(item, slot)
            right = arena.mark(number) == (item.generation, checksum)
            rests.append(0 if right else None)
        return None, lambda: rests

    def _gather(self, item: Staged, slot: memoryview) -> None:
        if item.piece.state is not None:
            pool, staged = self._state(item, slot)
            staged[:] = pool
            return
        dense = Dense.of(slot, item.piece, self._layout)
        for pool, staged in self._rows_of(item, dense.values):
            staged[:] = pool
        if dense.scales is not None:
            for places, staged in self._scales_of(item, dense.scales):
                staged[:] = self._scales[item.piece.layer][places]

    def _scatter(self, item: Staged, slot: memoryview) -> None:
        if item.piece.state is not None:
            pool, staged = self._state(item, slot)
            pool[:] = staged
            return
        dtype = item.dtype or self._layout.dtype
        dense = Dense.of(slot, item.piece, self._layouts[dtype])
        if dtype != self._layout.dtype:
            dense = dense.converted(dtype, self._layout.dtype)
        for pool, staged in self._rows_of(item, dense.values):
            pool[:] = staged
        if dense.scales is not None:
            for places, staged in self._scales_of(item, dense.scales):
                self._scales[item.piece.layer][places] = staged

    def close(self) -> None:
        self._rows.clear()
        self._scales.clear()
        self._states.clear()

    def _state(self, item: Staged, slot: memoryview) -> tuple[np.ndarray, np.ndarray]:
        """The heads of a slice of a state that this rank holds: in the pool, and in `slot`."""
        piece = item.piece
        assert piece.state is not None
        pool = self._states[piece.state][piece.layer][item.table[-1]]
        shape = len(pool), piece.head_count, pool.shape[2]
        staged = np.frombuffer(slot, np.uint8, math.prod(shape)).reshape(shape)
        first_head, _ = self._heads[piece.state]
        first, last = held_heads(piece, self._heads[piece.state])
        pool = pool[:, first - first_head : last - first_head]
        return pool, staged[:, first - piece.head_start : last - piece.head_start]

    def _rows_of(self, item: Staged, staged: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Neighbouring rows of the pool, and where they are in `staged` [2, tokens, heads, …]."""
        for row, heads, part in self._runs(item, staged):
            yield self._rows[item.piece.layer][:, row : row + part.shape[1], heads], part

    def _scales_of(self, item: Staged, staged: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
        """Places in the scales of the layer, and where they are in `staged` [2, tokens, heads]."""
        for row, heads, part in self._runs(item, staged):
            rows = np.arange(row, row + part.shape[1])
            yield (slice(None), rows // self._block_size, rows % self._block_size, heads), part

    def _runs(self, item: Staged, staged: np.ndarray) -> Iterator[tuple[int, slice, np.ndarray]]:
        """The first of neighbouring rows of the pool, the heads there, and the same part of `staged`."""
        piece = item.piece
        first, last = held_heads(piece, self._heads[None])
        staged = staged[:, :, first - piece.head_start : last - piece.head_start]
        heads = slice(first - self._heads[None][0], last - self._heads[None][0])
        start, stop = piece.token_start, piece.token_start + piece.token_count
        for position, row, count in runs(item.table, self._block_size, start, stop):
            at = position - start
            yield row, heads, staged[:, at : at + count]


class NoPool:
    """For KV on torch's device "meta", which has no bytes: slots travel as they are. What remains is what
    moving KV costs without the copies of either device; `bench.kv` measures it."""

    gather_most = 8  # as on CUDA

    def enter_thread(self) -> None:
        pass

    def table(self, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0) -> Sequence[int]:
        return block_ids

    def record(self) -> Event:
        return None

    def passed(self, event: Event) -> bool:
        return True

    def gather(self, batch: Sequence[Staged], after: Sequence[Event] = ()) -> Event:
        return None

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        return None, None

    def export(self) -> Export:
        raise Unreachable("no KV")

    def adopt(self, export: Export) -> None:
        raise Unreachable("no KV")

    def open(self, export: Export, dtype: str) -> PeerMemory:
        raise Unreachable("no KV")

    def opened(self, memory: Any) -> bool:
        raise AssertionError("nothing was opened")

    def pull(self, memory: Any, batch: Sequence[Staged]) -> tuple[Event, Outcome]:
        raise AssertionError("nothing was opened")

    def close(self) -> None:
        pass
