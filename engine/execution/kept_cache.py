"""KV in memory that outlives its engine: a `memfd` that another process makes, and passes to each engine.

    page 0: what the rest is of ── K, V of each layer ── table of published blocks (`engine.core.kept_blocks`)

Each rank has such memory for its part of the KV. Rank 0 alone has a table. It reads the KV of the other ranks
for checksums.

The process that holds the descriptors maps nothing. The memory is given back when that process and the engine
have ended. The file has no name, so no other process can open it. Its size is sealed once its layout is
known.
"""

import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import prod

import numpy as np
import torch
import xxhash
from torch import Tensor

from baton.engine.api.config import EngineConfig
from baton.engine.execution.memory_sizing import CacheLimits, PoolSize
from baton.engine.layers.ranks import Ranks

log = logging.getLogger(__name__)

_KEY_BYTES = 32
_VERSION = b"baton kept cache 2"


class KeptCache:
    """The `CacheMemory` of one engine. `fd` is an empty `memfd` that can be sealed, or that of an engine
    before. It stays the caller's. `others`: those of the other ranks.

    Use it in this order: `blocks` for each tensor, `open`, then `table` and `checksum`."""

    def __init__(self, fd: int, num_blocks: int, record_bytes: int, others: Sequence[int] = ()) -> None:
        self._fd = fd
        self._others = others
        self._num_blocks = num_blocks
        self._record_bytes = record_bytes
        self._arrays: list[np.ndarray] = []  # uint8 [rows, blocks, bytes]
        self._layout: list[tuple[int, int, int]] = []  # offset, bytes and rows of these
        self._end = 0
        self._fits = True
        self._key = blake2b(_VERSION, digest_size=_KEY_BYTES)
        self._head = memoryview(self._map(mmap.PAGESIZE))
        self.table = memoryview(b"")
        """Of `KeptBlocks`, from `open` on."""

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
        size, offset = prod(shape) * dtype.itemsize, self._end
        memory = torch.frombuffer(self._map(size), dtype=torch.uint8)[:size]
        self._arrays.append(memory.numpy().reshape(shape[0], self._num_blocks, -1))
        self._layout.append((offset, size, shape[0]))
        self._key.update(f"{dtype} {[*shape]};".encode())
        return memory.view(dtype).view(*shape)

    def windows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise AssertionError("window blocks are not kept")

    def slots(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise AssertionError("states are not kept")

    def open(self, root: bytes, ranks: Ranks) -> bool:
        """All tensors have memory. `root`: of the names of KV. False: the memory of a rank has the KV of
        another layout or model, or is not whole."""
        if not ranks.minimum(int(self._open(root))):
            return False
        for fd in self._others:
            for offset, size, rows in self._layout:
                memory = mmap.mmap(fd, size, prot=mmap.PROT_READ, offset=offset)
                self._arrays.append(np.frombuffer(memory, np.uint8).reshape(rows, self._num_blocks, -1))
        return True

    def _open(self, root: bytes) -> bool:
        if size := self._num_blocks * self._record_bytes:
            self.table = memoryview(self._map(size))[:size]
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
        if self._record_bytes:  # the memory of another rank has no table, and rank 0 verifies what is in it
            key.update(root)
        return key.digest()

    def checksum(self, block: int) -> xxhash.xxh3_64:
        """Of the K and V of all layers in a block, on all ranks."""
        found = xxhash.xxh3_64()
        for rows in self._arrays:
            for row in rows:
                found.update(row[block])
        return found


def kept_cache(
    fds: Sequence[int],
    config: EngineConfig,
    record_bytes: Callable[[int], int],
    limits: CacheLimits,
    pool: PoolSize,
) -> KeptCache | None:
    """The memory of one rank. None: the KV ends with the engine, since `fds` is empty or it cannot be kept.

    `fds`: that of this rank, then, on rank 0, those of the others. `record_bytes`: of a block with so many
    positions; 0 but on rank 0."""
    if not fds or not config.enable_prefix_caching:
        return None
    if not config.device.startswith("cpu"):
        reason = "only a CPU keeps it"
    elif limits.state_bytes or pool.window_blocks is not None:
        reason = "the model has states, or windows with blocks of their own"
    else:
        own, *others = fds
        return KeptCache(own, pool.num_blocks, record_bytes(limits.block_size), others)
    log.info("KV ends with this engine process: %s", reason)
    return None
