"""The table of published blocks beside KV that outlives its engine (`engine.execution.kept_cache`). Pure.

    publish ─▶ record (name, chunks, tokens, checksum of KV and record) ─▶ evict: the record goes first
    the engine dies ─▶ the next one reads the table ─▶ verify each checksum ─▶ the prefix cache has the block

Each block of the pool has one place for a record, so the table is bounded. The length of a record is written
last and erased first. So a record that an engine left half written does not count. A block without a record
is private or free, and its KV is never used again.
"""

import struct
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

import xxhash

from baton.content import CHUNK_TOKENS, NAME_BYTES
from baton.engine.api.request import CachedBlock

LONGEST_SALT = 256
"""Bytes of the salt and the tenant of a request together. A block with more is not kept."""
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<Q")
_HEAD = struct.Struct("<I6H")  # first chunk, bytes of each part


class KeptBlock(NamedTuple):
    block: int
    cached: CachedBlock
    tenant: bytes


def record_bytes(block_size: int) -> int:
    """Room for the record of a block with so many positions, in multiples of 64."""
    chunks = -(-block_size // CHUNK_TOKENS) + 1
    size = _LENGTH.size + _CHECKSUM.size + _HEAD.size + NAME_BYTES * (2 + chunks) + LONGEST_SALT
    return -(-(size + 4 * block_size) // 64) * 64


class KeptBlocks:
    """Writes and reads the records in `table`, of `record_bytes` for each block. `checksum` begins the
    checksum of a block: that of its KV."""

    def __init__(self, table: memoryview, block_size: int, checksum: Callable[[int], xxhash.xxh3_64]) -> None:
        self._table = table
        self._size = record_bytes(block_size)
        self._checksum = checksum
        self._block_of: dict[bytes, int] = {}  # by name, those with a record

    def add(self, block: int, cached: CachedBlock, tenant: bytes) -> None:
        """The cache has this block, whose KV does not change before `remove`."""
        tokens = array("i", cached.token_ids).tobytes()
        parts = cached.name, cached.before, cached.salt, tenant, b"".join(cached.chunks), tokens
        body = _HEAD.pack(cached.first_chunk, *map(len, parts)) + b"".join(parts)
        at, start = block * self._size, block * self._size + _LENGTH.size + _CHECKSUM.size
        if start + len(body) > at + self._size:
            return
        checksum = self._checksum(block)
        checksum.update(body)
        self._table[start : start + len(body)] = body
        _CHECKSUM.pack_into(self._table, at + _LENGTH.size, checksum.intdigest())
        _LENGTH.pack_into(self._table, at, len(body))
        self._block_of[cached.name] = block

    def remove(self, name: bytes) -> None:
        """The cache forgets the block of this name. Must be called before its KV changes."""
        if (block := self._block_of.pop(name, None)) is not None:
            _LENGTH.pack_into(self._table, block * self._size, 0)

    def clear(self) -> None:
        for name in [*self._block_of]:
            self.remove(name)

    def left(self) -> Iterator[KeptBlock]:
        """Yields the blocks that an engine before this one has left and that are still what it published.
        Erases all other records."""
        for block in range(len(self._table) // self._size):
            if (found := self._read(block)) is None:
                _LENGTH.pack_into(self._table, block * self._size, 0)
            else:
                self._block_of[found.cached.name] = block
                yield found

    def _read(self, block: int) -> KeptBlock | None:
        at, start = block * self._size, block * self._size + _LENGTH.size + _CHECKSUM.size
        (length,) = _LENGTH.unpack_from(self._table, at)
        if not _HEAD.size <= length <= at + self._size - start:
            return None
        body = bytes(self._table[start : start + length])
        checksum = self._checksum(block)
        checksum.update(body)
        if checksum.intdigest() != _CHECKSUM.unpack_from(self._table, at + _LENGTH.size)[0]:
            return None
        first_chunk, *sizes = _HEAD.unpack_from(body)
        parts, end = [], _HEAD.size
        for size in sizes:
            parts.append(body[end : end + size])
            end += size
        name, before, salt, tenant, chunks, tokens = parts
        names = [chunks[i : i + NAME_BYTES] for i in range(0, len(chunks), NAME_BYTES)]
        cached = CachedBlock(name, names, first_chunk, salt, before, array("i", tokens))
        return None if name in self._block_of else KeptBlock(block, cached, tenant)
