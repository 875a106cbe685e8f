"""Memory of a cache or of a model that is given back to the device, and taken again at the same addresses. So
a trainer on the same device has it meanwhile.

    tensors ─▶ release: their addresses have no memory ─▶ resume: they have memory with undefined content

Kernels and graphs see tensors whose addresses never change. A matrix that a CPU packs has memory of oneDNN,
which goes and comes back, too.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.api.config import EngineConfig
from baton.engine.execution.elastic_cache import memory_of, tensor_at
from baton.engine.layers.linear import packed_like
from baton.system.device_memory import DeviceMemory, Page

PAGE = 2 << 20
ALIGNMENT = 512
"""Bytes. As the allocator of torch."""
STEP = 256 << 20
"""Bytes of memory that a model takes twice while it moves here."""


class Releasable(Protocol):
    """Memory of a cache or of a model at addresses that stay."""

    def release(self) -> None:
        """Gives all memory back, while nothing uses it."""

    def resume(self) -> None:
        """Has as much memory as before `release`, with undefined content. Raises `MemoryError`, and has none
        then."""


class MemorySaver:
    """Implements `CacheMemory`. Its memory is free when no tensor is left."""

    def __init__(self, memory: DeviceMemory, device: torch.device) -> None:
        self._memory = memory
        self._device = device
        weakref.finalize(self, memory.close).atexit = False  # pyrefly: ignore[missing-attribute]
        self._mapped: dict[int, Sequence[Page]] = {}
        """By address."""
        self._packed: list[Tensor] = []
        self._shapes: Sequence[torch.Size] = ()
        """Of the packed ones that are released."""

    @property
    def nbytes(self) -> int:
        """Of the device, also while they are released."""
        return sum(map(len, self._mapped.values())) * self._memory.page_bytes

    def blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        address = self._memory.reserve(math.prod(shape) * dtype.itemsize)
        self._map(address, math.prod(shape) * dtype.itemsize)
        return tensor_at(address, shape, dtype, self._device, owner=self)

    windows = slots = blocks

    def _map(self, address: int, size: int) -> int:
        """Returns the bytes that are mapped: whole pages."""
        pages = self._memory.create(-(-size // self._memory.page_bytes))
        self._memory.map(address, pages)
        self._mapped[address] = pages
        return len(pages) * self._memory.page_bytes

    @torch.inference_mode()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Moves the memory of these tensors of this device here. Those that share some go on doing so. Each
        tensor that has memory of one of them must be among them."""
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.is_mkldnn:
                self._packed.append(tensor)
            elif tensor.device.type == self._device.type and tensor.untyped_storage().nbytes():
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        sizes = [aligned(some[0].untyped_storage().nbytes()) for some in by_storage.values()]
        if not sizes:
            return
        start = address = end = self._memory.reserve(sum(sizes))
        for size in sizes:
            some = by_storage.pop(next(iter(by_storage)))
            if (lacks := address + size - end) > 0:
                end += self._map(end, min(max(lacks, STEP), start + sum(sizes) - end))
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # what the tensors before these had
            old = some[0].untyped_storage()
            new = tensor_at(address, (old.nbytes(),), torch.uint8, self._device, owner=self)
            new.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(old))
            for tensor in some:
                place = tensor.storage_offset(), tensor.size(), tensor.stride()
                tensor.set_(new.untyped_storage(), *place)
            address += size

    def release(self) -> None:
        """Gives all memory back, while nothing uses it. Addresses stay."""
        self._memory.release(self._mapped)
        self._shapes = [tensor.shape for tensor in self._packed]
        for tensor in self._packed:
            tensor.data = packed_like(tensor, torch.Size((1, 1)))

    def resume(self) -> None:
        """Has as much memory as before `release`, with undefined content. Raises `MemoryError`, and has none
        then."""
        self._mapped = self._memory.resume(self._mapped)
        for tensor, shape in zip(self._packed, self._shapes, strict=True):
            tensor.data = packed_like(tensor, shape)


def open_memory_saver(config: EngineConfig, device: torch.device) -> MemorySaver | None:
    """None: the engine keeps its memory."""
    return MemorySaver(memory_of(device, PAGE), device) if config.enable_memory_saver else None


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
