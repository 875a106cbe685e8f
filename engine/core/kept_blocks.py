"""What an engine leaves of its prefix cache to the next one, beside memory that outlives it
(`engine.execution.kept_cache`). Pure.

    a block is published, or came back from a tier ─▶ record of the block (name, chunks, tokens)
                         ─▶ record of its window block (name), if layers with windows have blocks of their own
    states are copied at the end of a block ─▶ record of the copy (name of that block)
    the engine dies ─▶ `left`: the prefix cache of the next engine has what is whole

A copy of the states of an answer has a record before the cache has it: so the next engine continues a stream
from there. Whatever has no record is private or free, and is never used again.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from baton.engine.api.block_sums import KeptParts
from baton.engine.api.request import CachedBlock
from baton.engine.core.cells import Cells
from baton.engine.core.kept_table import OVERHEAD, KeptTable
from baton.kv_names import CHUNK_TOKENS, NAME_BYTES

LONGEST_SALT = 256
"""Bytes of the salt and the tenant of a request together. A block with more is not kept."""
_HEAD = struct.Struct("<I6H")  # first chunk, bytes of each part


class KeptBlock(NamedTuple):
    block: int
    cached: CachedBlock


class Left(NamedTuple):
    """What is still as the engine before this one recorded it."""

    blocks: Sequence[KeptBlock]
    """With different names."""
    windows: dict[bytes, int]
    """Window blocks, by the names of their blocks."""
    states: dict[bytes, int]
    """Slots of states, by the names of the blocks before them."""


def record_bytes(block_size: int) -> int:
    """Room for a record of a block with so many positions, in multiples of 64."""
    chunks = -(-block_size // CHUNK_TOKENS) + 1
    longest = NAME_BYTES if block_size % CHUNK_TOKENS == 0 else 2 * NAME_BYTES + 4 * CHUNK_TOKENS
    size = OVERHEAD + _HEAD.size + NAME_BYTES * chunks + 2 * longest + LONGEST_SALT
    return -(-(size + 4 * block_size) // 64) * 64


class KeptBlocks:
    """Writes and reads the records.

    Attributes:
        blocks: those of blocks.
        windows: those of window blocks. None: all layers have the same blocks.
        states: those of copies of states. None: no layer has states.
    """

    def __init__(self, parts: KeptParts, block_size: int) -> None:
        """`parts`: with `record_bytes` for each place."""
        size = record_bytes(block_size)
        self.blocks = KeptTable(parts.blocks, size)
        self.windows = None if parts.windows is None else KeptTable(parts.windows, size)
        self.states = None if parts.slots is None else KeptTable(parts.slots, size)
        self._tables = [table for table in (self.blocks, self.windows, self.states) if table is not None]

    def follow(self, *pools: Cells[Any] | None) -> None:
        """Reads what these give out from now on: blocks, window blocks and copies of states."""
        for table, cells in zip((self.blocks, self.windows, self.states), pools, strict=True):
            if table is not None and cells is not None:
                cells.taken = table.taken

    def add(self, blocks: Iterable[KeptBlock]) -> None:
        """The cache has these blocks."""
        self.blocks.add({kept.block: _packed(kept) for kept in blocks})

    def add_states(self, name: bytes, slot: int) -> None:
        """A slot has the states after the block of this name."""
        if self.states is not None and slot not in self.states:
            self.states.add({slot: name})

    def settle(self) -> None:
        """Writes what devices have summed meanwhile."""
        for table in self._tables:
            table.settle()

    def clear(self) -> None:
        for table in self._tables:
            table.clear()

    def left(self, tick: Callable[[], None]) -> Left:
        """What an engine before this one has left. `tick`: as in `KeptTable.left`."""
        blocks: dict[bytes, KeptBlock] = {}
        for place, body in self.blocks.left(tick):
            kept = _unpacked(place, body)
            blocks.setdefault(kept.cached.name, kept)
        windows, states = (
            {} if table is None else {name: place for place, name in table.left(tick)}
            for table in (self.windows, self.states)
        )
        return Left([*blocks.values()], windows, states)


def _packed(kept: KeptBlock) -> bytes:
    cached = kept.cached
    tokens = array("i", cached.token_ids).tobytes()
    parts = cached.name, cached.before, cached.salt, cached.tenant, b"".join(cached.chunks), tokens
    return _HEAD.pack(cached.first_chunk, *map(len, parts)) + b"".join(parts)


def _unpacked(block: int, body: bytes) -> KeptBlock:
    """From `_packed`: the checksum of the record was right."""
    first_chunk, *sizes = _HEAD.unpack_from(body)
    parts, end = [], _HEAD.size
    for size in sizes:
        parts.append(body[end : end + size])
        end += size
    name, before, salt, tenant, chunks, tokens = parts
    names = [chunks[i : i + NAME_BYTES] for i in range(0, len(chunks), NAME_BYTES)]
    cached = CachedBlock(name, names, first_chunk, salt, before, array("i", tokens), tenant)
    return KeptBlock(block, cached)
