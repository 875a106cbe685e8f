"""The table of published blocks beside KV that outlives its engine (`engine.execution.kept_cache`). Pure.

    publish ─▶ sum of the KV, on a GPU after some steps ─▶ record (name, chunks, tokens, checksum of sum and
    record) ─▶ evict: the record goes first
    the engine dies ─▶ the next one reads the table ─▶ verify each checksum ─▶ the prefix cache has the block

Each block of the pool has one place for a record, so the table is bounded. The length of a record is written
last and erased first. So a record that an engine left half written does not count. A block without a record
is private or free, and its KV is never used again.
"""

import struct
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from baton.content import CHUNK_TOKENS, NAME_BYTES
from baton.engine.api.block_sums import Outcome, Sums
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


_Batch = dict[bytes, tuple[int, bytes]]
"""By name: a block whose sum is under way, and the body of its record."""


class KeptBlocks:
    """Writes and reads the records in `table`, of `record_bytes` for each block."""

    def __init__(self, table: memoryview, block_size: int, sums: Sums) -> None:
        self._table = table
        self._size = record_bytes(block_size)
        self._sums = sums
        self._block_of: dict[bytes, int] = {}  # by name, those with a record
        self._under_way: deque[tuple[Outcome, Sequence[int], _Batch]] = deque()
        """With the blocks that are summed, in order."""
        self._batch_of: dict[bytes, _Batch] = {}

    def add(self, blocks: Sequence[int], cached: Sequence[CachedBlock], tenant: bytes) -> None:
        """The cache has these blocks, whose KV does not change before `remove`."""
        batch: _Batch = {}
        for block, each in zip(blocks, cached, strict=True):
            self.remove(each.name)
            tokens = array("i", each.token_ids).tobytes()
            parts = each.name, each.before, each.salt, tenant, b"".join(each.chunks), tokens
            body = _HEAD.pack(each.first_chunk, *map(len, parts)) + b"".join(parts)
            if _LENGTH.size + _CHECKSUM.size + len(body) <= self._size:
                batch[each.name] = block, body
        if batch:
            summed = [block for block, _ in batch.values()]
            self._under_way.append((self._sums(summed), summed, batch))
            self._batch_of.update(dict.fromkeys(batch, batch))
            self.settle()

    def settle(self) -> None:
        """Writes the records of blocks whose sums have come."""
        while self._under_way and self._under_way[0][0].passed():
            outcome, summed, batch = self._under_way.popleft()
            sums = dict(zip(summed, outcome.wait(), strict=True))
            for name, (block, body) in batch.items():
                del self._batch_of[name]
                at = block * self._size
                start = at + _LENGTH.size + _CHECKSUM.size
                self._table[start : start + len(body)] = body
                checksum = xxhash.xxh3_64_intdigest(body, seed=sums[block])
                _CHECKSUM.pack_into(self._table, at + _LENGTH.size, checksum)
                _LENGTH.pack_into(self._table, at, len(body))
                self._block_of[name] = block

    def remove(self, name: bytes) -> None:
        """The cache forgets the block of this name. Must be called before its KV changes."""
        if (batch := self._batch_of.pop(name, None)) is not None:
            del batch[name]
        if (block := self._block_of.pop(name, None)) is not None:
            _LENGTH.pack_into(self._table, block * self._size, 0)

    def clear(self) -> None:
        for name in [*self._block_of, *self._batch_of]:
            self.remove(name)

    def left(self) -> Iterator[KeptBlock]:
        """Yields the blocks that an engine before this one has left and that are still what it published.
        Erases all other records."""
        bodies = {
            block: body
            for block in range(len(self._table) // self._size)
            if (body := self._body(block)) is not None
        }
        sums = dict(zip(bodies, self._sums([*bodies]).wait() if bodies else (), strict=True))
        for block in range(len(self._table) // self._size):
            found = self._read(block, bodies[block], sums[block]) if block in bodies else None
            if found is None:
                _LENGTH.pack_into(self._table, block * self._size, 0)
            else:
                self._block_of[found.cached.name] = block
                yield found

    def _body(self, block: int) -> bytes | None:
        at = block * self._size
        start = at + _LENGTH.size + _CHECKSUM.size
        (length,) = _LENGTH.unpack_from(self._table, at)
        if not _HEAD.size <= length <= at + self._size - start:
            return None
        return bytes(self._table[start : start + length])

    def _read(self, block: int, body: bytes, kv_sum: int) -> KeptBlock | None:
        checksum = xxhash.xxh3_64_intdigest(body, seed=kv_sum)
        if checksum != _CHECKSUM.unpack_from(self._table, block * self._size + _LENGTH.size)[0]:
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
