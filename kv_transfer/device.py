"""Where torch begins: KV between the engine's paged pool and arena slots.

`HostPool` copies at once. `CudaPool` enqueues on a side stream of its own and answers with events; it never
waits for the device. In both, a *table* is where one request's positions lie in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from msgspec.structs import replace

from kv_transfer.arena import Arena
from kv_transfer.convert import Dense
from kv_transfer.layout import FP8, ITEM_BYTES, KVLayout, Range, Slice, convertible, runs, slice_bytes
from kv_transfer.transport import PagedKV

Event = Any  # torch.cuda.Event; None where everything is done at once


@dataclass(frozen=True, slots=True)
class Staged:
    """A slice in an arena slot, on its way to or from the pool."""

    piece: Slice
    slot: int
    table: Any
    dtype: str | None = None  # of the slot; None: that of the pool. `scatter` converts


class Pool(Protocol):
    """The KV cache of one rank. Of a slice it copies the heads that the rank holds."""

    def enter_thread(self) -> None:
        """Call first in each thread that uses the pool."""
        ...

    def table(self, block_ids: Sequence[int], num_tokens: int) -> Any:
        """Where positions [0, num_tokens) lie."""
        ...

    def record(self) -> Event:
        """An event on the current stream."""
        ...

    def passed(self, event: Event) -> bool: ...

    gather_most: int
    """How many slices are worth gathering together."""

    def gather(self, batch: Sequence[Staged], after: Sequence[Event] = ()) -> Event:
        """Pool → slots. When the event that is returned has passed, the slots are filled and the pool is no
        longer read. `after`: nothing, or for each slice the event after which it may be read."""
        ...

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        """Slots → pool. First event: the slots are free; second: the pool holds the bytes."""
        ...

    def close(self) -> None:
        """Wait for everything enqueued, and let go of the arena."""
        ...


def open_pool(kv: PagedKV, arena: Arena) -> Pool:
    layout = kv.layout
    assert len(kv.layers) == layout.num_layers, (
        f"{len(kv.layers)} layers of KV, layout has {layout.num_layers}"
    )
    first, last = kv.heads
    assert len(kv.scales) == (layout.num_layers if layout.dtype == FP8 else 0), "FP8 has scales"
    for scales, tensor in zip(kv.scales, kv.layers, strict=False):
        shape = (2, tensor.shape[1], last - first, kv.block_size)
        assert tuple(scales.shape) == shape, f"{tuple(scales.shape)} is not {shape}"
        assert scales.is_contiguous(), "scales must be contiguous"
        assert scales.dtype is torch.float32, f"scales are {scales.dtype}"
    for tensor in kv.layers:
        shape = (2, tensor.shape[1], kv.block_size, last - first, layout.head_dim)
        assert tensor.is_contiguous(), "KV must be contiguous"
        assert tuple(tensor.shape) == shape, f"{tuple(tensor.shape)} is not {shape}"
        assert tensor.dtype == getattr(torch, layout.dtype), (
            f"KV is {tensor.dtype}, layout says {layout.dtype}"
        )
    match torch.device(kv.device).type:
        case "cuda":
            return CudaPool(kv, arena)
        case "meta":
            return NoPool()
        case _:
            return HostPool(kv, arena)


def _of_each_dtype(layout: KVLayout) -> dict[str, KVLayout]:
    return {dtype: replace(layout, dtype=dtype) for dtype in ITEM_BYTES}


def _heads(piece: Slice) -> int:
    """Of all positions of a slice."""
    return piece.token_count * piece.head_count


def _held(piece: Slice, heads: Range) -> Range:
    """The heads of a slice that are among `heads`."""
    return max(piece.head_start, heads[0]), min(piece.head_start + piece.head_count, heads[1])


class HostPool:
    """Bytes are bytes: numpy views of the pool and the arena. Only a conversion looks at numbers."""

    gather_most = 1  # while the next is gathered, this one is on its way

    def __init__(self, kv: PagedKV, arena: Arena) -> None:
        # layer → [2, rows, heads, bytes of a head], and [2, blocks, block_size, heads]
        self._rows = [t.flatten(1, 2).view(torch.uint8).numpy() for t in kv.layers]
        self._scales = [t.transpose(2, 3).numpy() for t in kv.scales]
        self._block_size = kv.block_size
        self._layout = kv.layout
        self._layouts = _of_each_dtype(kv.layout)
        self._heads = kv.heads
        self._arena = arena

    def enter_thread(self) -> None:
        pass

    def table(self, block_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        assert num_tokens <= len(block_ids) * self._block_size, "more positions than blocks"
        return list(block_ids)

    def record(self) -> Event:
        return None

    def passed(self, event: Event) -> bool:
        return True

    def gather(self, batch: Sequence[Staged], after: Sequence[Event] = ()) -> Event:
        for item in batch:
            dense = Dense.of(self._arena.slot(item.slot), item.piece, self._layout)
            for pool, staged in self._rows_of(item, dense.values):
                staged[:] = pool
            if dense.scales is not None:
                for places, staged in self._scales_of(item, dense.scales):
                    staged[:] = self._scales[item.piece.layer][places]

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        for item in batch:
            dtype = item.dtype or self._layout.dtype
            dense = Dense.of(self._arena.slot(item.slot), item.piece, self._layouts[dtype])
            if dtype != self._layout.dtype:
                dense = dense.converted(dtype, self._layout.dtype)
            for pool, staged in self._rows_of(item, dense.values):
                pool[:] = staged
            if dense.scales is not None:
                for places, staged in self._scales_of(item, dense.scales):
                    self._scales[item.piece.layer][places] = staged
        return None, None

    def close(self) -> None:
        self._rows.clear()
        self._scales.clear()

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
        first, last = _held(piece, self._heads)
        staged = staged[:, :, first - piece.head_start : last - piece.head_start]
        heads = slice(first - self._heads[0], last - self._heads[0])
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

    def table(self, block_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        return block_ids

    def record(self) -> Event:
        return None

    def passed(self, event: Event) -> bool:
        return True

    def gather(self, batch: Sequence[Staged], after: Sequence[Event] = ()) -> Event:
        return None

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        return None, None

    def close(self) -> None:
        pass


class CudaPool:
    """Gathers and scatters on a side stream, between the pool and the pinned arena.

    However many slices a batch has, it is one kernel, one copy of the kernel's table, and a copy for each
    run of neighbouring slots. A launch costs the host more than a slice costs the device, and the host has
    the next step to launch.
    """

    gather_most = 8

    def __init__(self, kv: PagedKV, arena: Arena) -> None:
        from kv_transfer import copy_kernels  # Triton: on GPUs only

        self._kernels = copy_kernels
        layout = kv.layout
        self._layers = list(kv.layers)
        self._scales = list(kv.scales)
        self._device = kv.layers[0].device
        self._block_size = kv.block_size
        self._layout = layout
        self._layouts = _of_each_dtype(layout)
        self._heads = kv.heads
        self._slot_bytes = arena.slot_bytes
        self._arena = torch.frombuffer(arena.memory, dtype=torch.uint8)
        # Pinned in place: it is shared with the transfer process, so it cannot be torch's to allocate.
        _pin(self._arena)
        # Of high priority: few short programs, which would else wait for the end of a large matrix product.
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        # What torch has pinned once it gives out again at once; pinning more would wait for the device.
        _ = [torch.empty(1 << i, dtype=torch.int64, pin_memory=True) for i in range(5, 13) for _ in range(8)]
        # Compiles all kernels now, not during the first transfer: one position of block 0, there and back,
        # and none for the kernels that convert, since they would not give back the same bytes.
        row = Staged(Slice(0, 0, layout.num_kv_heads, 0, 1), 0, self.table([0], 1))
        nothing = Staged(Slice(0, 0, layout.num_kv_heads, 0, 0), 0, row.table)
        with torch.cuda.stream(self._stream):
            dense = torch.empty(layout.bytes_per_token_layer, dtype=torch.uint8, device=self._device)
            for into_pool in (False, True):
                self._copy([(row, dense.data_ptr())], into_pool=into_pool)
            for dtype in ITEM_BYTES:
                if dtype != layout.dtype and convertible(dtype, layout.dtype):
                    self._convert([(nothing, dense.data_ptr())], dtype)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def table(self, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """int64 [blocks] on the device."""
        assert num_tokens <= len(block_ids) * self._block_size, "more positions than blocks"
        with torch.cuda.stream(self._stream):
            return self._upload(list(block_ids))

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, event: Event) -> bool:
        return event.query()

    def gather(self, batch: Sequence[Staged], after: Sequence[Event] = ()) -> Event:
        with torch.cuda.stream(self._stream):
            batch, dense, addresses, copies = self._stage(batch)
            for event in {id(event): event for event in after}.values():
                self._stream.wait_event(event)
            self._copy(list(zip(batch, addresses, strict=True)), into_pool=False)
            for slot, at, size in copies:
                self._arena[slot : slot + size].copy_(dense[at : at + size], non_blocking=True)
            return self.record()

    def scatter(self, batch: Sequence[Staged]) -> tuple[Event, Event]:
        with torch.cuda.stream(self._stream):
            batch, dense, addresses, copies = self._stage(batch)
            for slot, at, size in copies:
                dense[at : at + size].copy_(self._arena[slot : slot + size], non_blocking=True)
            copied = self.record()
            by_dtype: dict[str, list[tuple[Staged, int]]] = {}
            for item, address in zip(batch, addresses, strict=True):
                by_dtype.setdefault(item.dtype or self._layout.dtype, []).append((item, address))
            for dtype, items in by_dtype.items():
                if dtype == self._layout.dtype:
                    self._copy(items, into_pool=True)
                else:
                    self._convert(items, dtype)
            return copied, self.record()

    def close(self) -> None:
        self._stream.synchronize()
        _unpin(self._arena)
        self._layers.clear()
        self._scales.clear()
        self._arena = torch.empty(0)

    def _stage(
        self, batch: Sequence[Staged]
    ) -> tuple[list[Staged], torch.Tensor, list[int], list[tuple[int, int, int]]]:
        """By slot; memory on the device, the address there of each, and what to copy: (byte of the arena,
        byte of that memory, size)."""
        batch = sorted(batch, key=lambda x: x.slot)
        copies, offsets = coalesce(
            [(x.slot, slice_bytes(self._layouts[x.dtype or self._layout.dtype], x.piece)) for x in batch],
            self._slot_bytes,
        )
        dense = torch.empty(copies[-1][1] + copies[-1][2], dtype=torch.uint8, device=self._device)
        base = dense.data_ptr()
        return batch, dense, [base + at for at in offsets], copies

    def _copy(self, items: Sequence[tuple[Staged, int]], *, into_pool: bool) -> None:
        """Each item with the address of its dense memory."""
        pools = [self._layers, self._scales] if self._scales else [self._layers]
        values = 2 * self._layout.head_dim * ITEM_BYTES[self._layout.dtype]  # bytes of a head; scales follow
        lines = [
            self._kernels.line(
                pool[x.piece.layer], x.table, address + (pool is self._scales) * values * _heads(x.piece),
                x.piece, _held(x.piece, self._heads), self._heads[0],
            )
            for pool in pools for x, address in items
        ]  # fmt: skip
        tables = self._upload([field for line in lines for field in line]).view(len(pools), len(items), -1)
        tokens = max(x.piece.token_count for x, _ in items)
        heads = max(x.piece.head_count for x, _ in items)
        for pool, table in zip(pools, tables, strict=True):
            self._kernels.launch(table, pool[0], tokens, heads, into_pool=into_pool)

    def _convert(self, items: Sequence[tuple[Staged, int]], dtype: str) -> None:
        """As `_copy`, into the pool, from memory in another dtype."""
        lines = [
            self._kernels.line_to_convert(
                self._layers[x.piece.layer], self._scales[x.piece.layer] if self._scales else None, x.table,
                address, x.piece, _held(x.piece, self._heads), self._heads[0],
            )
            for x, address in items
        ]  # fmt: skip
        table = self._upload([field for line in lines for field in line]).view(len(lines), -1)
        most = max(1, *(_heads(x.piece) for x, _ in items))
        self._kernels.launch_converting(table, self._layers[0], getattr(torch, dtype), most)

    def _upload(self, numbers: list[int]) -> torch.Tensor:
        """int64, on the device once the current stream gets there."""
        return torch.tensor(numbers, pin_memory=True).to(self._device, non_blocking=True)


# Bytes that are copied in vain rather than with a copy more (5 µs of the bus, or 17 of the host).
_SLACK = 256 << 10


def coalesce(
    slots: Sequence[tuple[int, int]], slot_bytes: int
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Few copies between slots (number, bytes used; ascending) and one piece of other memory.

    Gives the copies (byte in the arena, byte in the other memory, size) and where each slot's bytes are in
    the other memory. Slots of which all but a little is used, and their next neighbours, are one copy."""
    copies: list[tuple[int, int, int]] = []
    offsets: list[int] = []
    before = -2
    for slot, size in slots:
        at = slot * slot_bytes
        if copies and slot == before + 1 and at - sum(copies[-1][::2]) <= _SLACK:
            start, there, _ = copies[-1]
            copies[-1] = start, there, at + size - start
            offsets.append(there + at - start)
        else:
            there = -(-sum(copies[-1][1:]) // 16) * 16 if copies else 0  # the kernel moves whole words
            copies.append((at, there, size))
            offsets.append(there)
        before = slot
    return copies, offsets


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
