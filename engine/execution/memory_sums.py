"""Checksums of memory at addresses, on the device that has it."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from baton.engine.api.pools import Outcome, Sums
from baton.engine.execution.sampler import to_host
from baton.engine.kernels.upload import upload

WORD = 8
"""Bytes of which a GPU sums one at a time."""


def sums_of(rows: Sequence[tuple[int, int]], device: torch.device) -> Sums:
    """Sums of places, each over all rows. `rows`: the address of the first place, and bytes of a place, whole
    words. More may be added later."""
    return _DeviceSums(rows, device) if device.type == "cuda" else _HostSums(rows)


class _HostSums:
    """Of memory of the host, at once."""

    def __init__(self, rows: Sequence[tuple[int, int]]) -> None:
        self._rows = rows

    def __call__(self, blocks: Sequence[int]) -> Outcome:
        sums = [self._sum(block) for block in blocks]
        return Outcome(lambda: True, lambda: sums)

    def _sum(self, block: int) -> int:
        checksum = xxhash.xxh3_64()
        for address, size in self._rows:
            checksum.update((ctypes.c_ubyte * size).from_address(address + block * size))
        return checksum.intdigest()


class _DeviceSums:
    """Of memory of a GPU, on a stream of its own. The KV of the blocks is there."""

    def __init__(self, rows: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._words = 0
        self._on_device = torch.empty(0)

    def __call__(self, blocks: Sequence[int]) -> Outcome:
        from baton.engine.kernels.block_sums import block_sums  # it needs Triton

        with torch.cuda.stream(self._stream):
            if len(self._on_device) != len(self._rows):
                words = [(address, size // WORD) for address, size in self._rows]
                self._words = max(count for _, count in words)
                [self._on_device] = upload([np.array(words, np.int64)], self._device)
            [places] = upload([np.array(blocks, np.int64)], self._device)
            sums = to_host(block_sums(self._on_device, self._words, places))
            over = torch.cuda.Event()
            over.record(self._stream)

        def wait() -> Sequence[int]:
            over.synchronize()
            return [each % (1 << 64) for each in sums.tolist()]

        return Outcome(over.query, wait)
