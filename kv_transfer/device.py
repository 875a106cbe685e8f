"""Where torch begins: KV between the engine's paged pool and arena slots.

`HostPool` copies at once. `CudaPool` enqueues on a side stream of its own and answers with events; it never
waits for the device. In both, a *table* is where one request's positions lie in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kv_transfer.arena import Arena
from kv_transfer.layout import KVLayout, Slice, runs, slice_bytes

Event = Any  # torch.cuda.Event; None where everything is done at once


@dataclass(frozen=True, slots=True)
class Staged:
    """A slice in an arena slot, on its way into the pool."""

    piece: Slice
    slot: int
    table: Any


class Pool(Protocol):
    """The engine's own: per layer `[2, num_blocks, block_size, num_kv_heads, head_dim]`."""

    def enter_thread(self) -> None:
        """Call first in each thread that uses the pool."""
        ...

    def table(self, block_ids: Sequence[int], num_tokens: int) -> Any:
        """Where positions [0, num_tokens) lie."""
        ...

    def fence(self) -> None:
        """Writes from here on wait for what the current stream has queued: blocks that were just reserved
        may still be read there, for their last owner."""
        ...

    def record(self) -> Event:
        """An event on the current stream."""
        ...

    def passed(self, event: Event) -> bool: ...

    def gather(self, piece: Slice, table: Any, slot: int) -> Event:
        """Pool → slot. When the event has passed, the slot is filled and the pool no longer read."""
        ...

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        """Slots → pool. First event: the slots are free; second: the pool holds the bytes."""
        ...

    def close(self) -> None:
        """Wait for everything enqueued, and let go of the arena."""
        ...


def open_pool(
    device: str, kv_cache: Sequence[torch.Tensor], block_size: int, layout: KVLayout, arena: Arena
) -> Pool:
    assert len(kv_cache) == layout.num_layers, f"{len(kv_cache)} layers of KV, layout has {layout.num_layers}"
    for tensor in kv_cache:
        shape = (2, tensor.shape[1], block_size, layout.num_kv_heads, layout.head_dim)
        assert tensor.is_contiguous(), "KV must be contiguous"
        assert tuple(tensor.shape) == shape, f"{tuple(tensor.shape)} is not {shape}"
        assert tensor.dtype == getattr(torch, layout.dtype), (
            f"KV is {tensor.dtype}, layout says {layout.dtype}"
        )
    kind = CudaPool if torch.device(device).type == "cuda" else HostPool
    return kind(kv_cache, block_size, layout, arena)


class HostPool:
    """Bytes are bytes: numpy views of the pool and the arena, no dtype involved."""

    def __init__(
        self, kv_cache: Sequence[torch.Tensor], block_size: int, layout: KVLayout, arena: Arena
    ) -> None:
        # layer → [2, rows, heads, bytes of a head]
        self._rows = [t.flatten(1, 2).view(torch.uint8).numpy() for t in kv_cache]
        self._block_size = block_size
        self._layout = layout
        self._arena = arena

    def enter_thread(self) -> None:
        pass

    def table(self, block_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        assert num_tokens <= len(block_ids) * self._block_size, "more positions than blocks"
        return list(block_ids)

    def fence(self) -> None:
        pass

    def record(self) -> Event:
        return None

    def passed(self, event: Event) -> bool:
        return True

    def gather(self, piece: Slice, table: Sequence[int], slot: int) -> Event:
        pool, staged, heads = self._views(piece, slot)
        start, stop = piece.token_start, piece.token_start + piece.token_count
        for position, row, count in runs(table, self._block_size, start, stop):
            at = position - start
            staged[:, at : at + count] = pool[:, row : row + count, heads]

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        for item in batch:
            pool, staged, heads = self._views(item.piece, item.slot)
            start, stop = item.piece.token_start, item.piece.token_start + item.piece.token_count
            for position, row, count in runs(item.table, self._block_size, start, stop):
                at = position - start
                pool[:, row : row + count, heads] = staged[:, at : at + count]
        return None, None

    def close(self) -> None:
        self._rows.clear()

    def _views(self, piece: Slice, slot: int) -> tuple[np.ndarray, np.ndarray, slice]:
        size = slice_bytes(self._layout, piece)
        staged = np.frombuffer(self._arena.slot(slot), np.uint8, size)
        shape = (2, piece.token_count, piece.head_count, self._layout.head_bytes // 2)
        heads = slice(piece.head_start, piece.head_start + piece.head_count)
        return self._rows[piece.layer], staged.reshape(shape), heads


class CudaPool:
    """Gathers and scatters on a side stream, between the pool and the pinned arena."""

    def __init__(
        self, kv_cache: Sequence[torch.Tensor], block_size: int, layout: KVLayout, arena: Arena
    ) -> None:
        from kv_transfer import copy_kernels  # Triton: on GPUs only

        self._kernels = copy_kernels
        self._rows = [t.flatten(1, 2) for t in kv_cache]  # layer → [2, rows, heads, head_dim]
        self._device = kv_cache[0].device
        self._block_size = block_size
        self._layout = layout
        self._dtype = kv_cache[0].dtype
        self._slot_bytes = arena.slot_bytes
        self._arena = torch.frombuffer(arena.memory, dtype=torch.uint8)
        # Pinned in place: it is shared with the transfer process, so it cannot be torch's to allocate.
        _pin(self._arena)
        self._stream = torch.cuda.Stream(self._device)
        # Compiles both kernels now, not during the first transfer: one row, there and back.
        row = torch.zeros(1, dtype=torch.int64, device=self._device)
        dense = self._rows[0].new_empty(2, 1, *self._rows[0].shape[2:])
        copy_kernels.gather(self._rows[0], row, 0, dense)
        copy_kernels.scatter(dense, self._rows[0], row, 0)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def table(self, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """int64 [num_tokens] on the device: the row of each position."""
        assert num_tokens <= len(block_ids) * self._block_size, "more positions than blocks"
        blocks = torch.tensor(block_ids, dtype=torch.int64).pin_memory()
        with torch.cuda.stream(self._stream):
            first = blocks.to(self._device, non_blocking=True)[:, None] * self._block_size
            rows = first + torch.arange(self._block_size, device=self._device)
            return rows.flatten()[:num_tokens]

    def fence(self) -> None:
        self._stream.wait_event(self.record())

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, event: Event) -> bool:
        return event.query()

    def gather(self, piece: Slice, table: torch.Tensor, slot: int) -> Event:
        staged = self._staged(piece, slot)
        with torch.cuda.stream(self._stream):
            dense = torch.empty_like(staged, device=self._device)
            self._kernels.gather(self._rows[piece.layer], _rows_of(piece, table), piece.head_start, dense)
            staged.copy_(dense, non_blocking=True)
            return self.record()

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        with torch.cuda.stream(self._stream):
            dense = [self._staged(x.piece, x.slot).to(self._device, non_blocking=True) for x in batch]
            copied = self.record()
            for item, source in zip(batch, dense, strict=True):
                layer, rows = self._rows[item.piece.layer], _rows_of(item.piece, item.table)
                self._kernels.scatter(source, layer, rows, item.piece.head_start)
            return copied, self.record()

    def close(self) -> None:
        self._stream.synchronize()
        _unpin(self._arena)
        self._rows.clear()
        self._arena = torch.empty(0)

    def _staged(self, piece: Slice, slot: int) -> torch.Tensor:
        at = slot * self._slot_bytes
        flat = self._arena[at : at + slice_bytes(self._layout, piece)].view(self._dtype)
        return flat.view(2, piece.token_count, piece.head_count, self._layout.head_dim)


def _rows_of(piece: Slice, table: torch.Tensor) -> torch.Tensor:
    return table[piece.token_start : piece.token_start + piece.token_count]


def _pin(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    assert cudart is not None
    error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if error:
        raise RuntimeError(f"cannot pin the arena's {memory.numel()} bytes: CUDA error {error}")


def _unpin(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    assert cudart is not None
    error = int(cudart.cudaHostUnregister(memory.data_ptr()))
    assert error == 0, f"cudaHostUnregister: CUDA error {error}"
