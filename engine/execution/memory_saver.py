"""Memory of a cache that is given back to the device, and taken again at the same addresses. So a trainer on
the same device has it meanwhile. `shared_weights` does the same with weights.

    tensors ─▶ release: their addresses have no memory ─▶ resume: they have memory with undefined content

Kernels and graphs see tensors whose addresses never change.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.api.config import EngineConfig
from baton.engine.execution.elastic_cache import memory_of, tensor_at
from baton.system.device_memory import DeviceMemory, Page

PAGE = 2 << 20
ALIGNMENT = 512
"""Bytes. As the allocator of torch."""


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

    def blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        address = self._memory.reserve(size)
        self._mapped[address] = pages = self._memory.create(-(-size // self._memory.page_bytes))
        self._memory.map(address, pages)
        return tensor_at(address, shape, dtype, self._device, owner=self)

    windows = slots = blocks

    def release(self) -> None:
        """Gives all memory back, while nothing uses it. Addresses stay."""
        self._memory.release(self._mapped)

    def resume(self) -> None:
        """As in `Releasable`."""
        self._mapped = self._memory.resume(self._mapped)


def open_memory_saver(config: EngineConfig, device: torch.device) -> MemorySaver | None:
    """None: the engine keeps its memory."""
    return MemorySaver(memory_of(device, PAGE), device) if config.enable_memory_saver else None


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
