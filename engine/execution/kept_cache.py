"""KV in memory that outlives its engine: a `memfd` that another process makes, and passes to each engine.

    page 0: what the rest is of ── table of published blocks (`engine.core.kept_blocks`) ── K, V of each layer

The process that holds the descriptor maps nothing. The memory is given back when that process and the engine
have ended. The file has no name, so no other process can open it. Its size is sealed once its layout is
known.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from hashlib import blake2b
from math import prod

import numpy as np
import torch
import xxhash
from torch import Tensor

_KEY_BYTES = 32
_VERSION = b"baton kept cache 1"


class KeptCache:
    """The `CacheMemory` of one engine. `fd` is an empty `memfd` that can be sealed, or that of an engine
    before. It stays the caller's.

    Use it in this order: `blocks` for each tensor, `open`, then `table` and `checksum`."""

    def __init__(self, fd: int, num_blocks: int, record_bytes: int) -> None:
        self._fd = fd
        self._num_blocks = num_blocks
        self._arrays: list[np.ndarray] = []  # uint8 [rows, blocks, bytes]
        self._end = 0
        self._fits = True
        self._key = blake2b(_VERSION, digest_size=_KEY_BYTES)
        self._head = memoryview(self._map(mmap.PAGESIZE))
        self.table = memoryview(self._map(num_blocks * record_bytes))[: num_blocks * record_bytes]
        """Of `KeptBlocks`."""

    def _map(self, size: int) -> mmap.mmap:
        """The next `size` bytes of the file. If its sealed size has no room for them, other memory."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self._fd).st_size < self._end + size:
            try:
                os.ftruncate(self._fd, self._end + size)
            except PermissionError:
                self._fits = False
                return mmap.mmap(-1, size)
        found = mmap.mmap(self._fd, size, offset=self._end)
        self._end += size
        return found

    def blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        memory = torch.frombuffer(self._map(size), dtype=torch.uint8)[:size]
        self._arrays.append(memory.numpy().reshape(shape[0], self._num_blocks, -1))
        self._key.update(f"{dtype} {[*shape]};".encode())
        return memory.view(dtype).view(*shape)

    def windows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise AssertionError("window blocks are not kept")

    def slots(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise AssertionError("states are not kept")

    def open(self, root: bytes) -> bool:
        """All tensors have memory. `root`: of the names of KV. False: the memory has the KV of another layout
        or model, or is not whole."""
        key = self._key_of(root)
        found = bytes(self._head[:_KEY_BYTES])
        if found == key:
            return True
        if any(found) or not self._fits:
            return False
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._head[:_KEY_BYTES] = key
        return True

    def rename(self, root: bytes) -> None:
        """The names of KV begin at this root from now on. The table is empty."""
        self._head[:_KEY_BYTES] = self._key_of(root)

    def _key_of(self, root: bytes) -> bytes:
        key = self._key.copy()
        key.update(root)
        return key.digest()

    def checksum(self, block: int) -> xxhash.xxh3_64:
        """Of the K and V of all layers in a block."""
        found = xxhash.xxh3_64()
        for rows in self._arrays:
            for row in rows:
                found.update(row[block])
        return found
