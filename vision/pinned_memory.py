"""Memory that a GPU copies to and from without the help of the host.

To take such memory from the system lasts 40 ms for an image of 1080p (67 MB), and the GPU's driver does
little else meanwhile. So it is taken once.
"""

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

ALIGNMENT = 256


class PinnedMemory:
    """Parts are given back when no array refers to them any more. One thread takes parts.

    A copy to the GPU that is under way refers to none: the step that began it keeps the array until its end.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        """`pinned` False: memory of the system, where there is no GPU."""
        self._pinned = pinned
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._free = [(0, nbytes)]  # (start, stop), in order
        self._returned = deque[tuple[int, int]]()  # by any thread

    @property
    def free_bytes(self) -> int:
        self._join()
        return sum(stop - start for start, stop in self._free)

    def take(self, nbytes: int) -> np.ndarray:
        """[nbytes] uint8. If no part is as large, it is taken from the system."""
        self._join()
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                owner = _Part(self._memory, start, nbytes)
                weakref.finalize(owner, self._returned.append, (start, start + size))
                return np.asarray(owner)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned).numpy()

    def _join(self) -> None:
        """Makes parts that were given back parts that can be taken."""
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self._free):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        self._free = joined


class _Part:
    """What an array of a part, and each view of that, refers to."""

    def __init__(self, memory: torch.Tensor, start: int, nbytes: int) -> None:
        self._memory = memory
        self.__array_interface__: dict[str, Any] = {
            "data": (memory.data_ptr() + start, False), "shape": (nbytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip
