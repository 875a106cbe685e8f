"""What one rank gives back to its device for a while, such as for a trainer, and takes again."""

from collections.abc import Mapping
from typing import Protocol

import torch

from baton.engine.api.config import MemoryTag


class Releasable(Protocol):
    """Memory of a cache or of a model. Kernels and graphs see tensors whose addresses never change."""

    def release(self) -> None:
        """Gives all memory back, while nothing uses it."""

    def resume(self) -> None:
        """Has as much memory as before `release`, with undefined content. Raises `MemoryError`, and has none
        then."""


class RankMemory:
    """The memory that one rank can give back. The thread of the rank makes all calls."""

    def __init__(self, memory: Mapping[MemoryTag, Releasable]) -> None:
        """`memory`: of `EngineConfig.enable_memory_saver`; else empty."""
        self._memory = memory
        self._released: set[MemoryTag] = set()

    def __bool__(self) -> bool:
        """Whether there is something to give back."""
        return bool(self._memory)

    def set(self, tag: MemoryTag, *, release: bool) -> None:
        """Gives memory back, or takes it again; what was done already stays. No step is under way. Raises
        `MemoryError` if the device has not as much."""
        if release == (tag in self._released):
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if release:
            self._memory[tag].release()
            self._released.add(tag)
            torch.cuda.empty_cache()
        else:
            self._memory[tag].resume()
            self._released.remove(tag)
