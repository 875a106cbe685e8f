"""What a record of a block says (`kept_table`), for the prefix cache of the next engine. Pure.

    a block is published, or came back from a tier ─▶ record of the block (name, chunks, tokens)
                         ─▶ record of its window block (name), if layers with windows have blocks of their own
    states are copied at the end of a block ─▶ record of the copy (name of that block)
    the engine dies ─▶ the prefix cache of the next engine has what is whole (`PrefixCache.take_over`)

A copy of the states of an answer has a record before the cache has it: so the next engine continues a stream
from there. Whatever has no record is private or free, and is never used again.
"""

import struct
from array import array

from baton.engine.api.request import CachedBlock
from baton.engine.core.kept_table import OVERHEAD
from baton.kv_names import CHUNK_TOKENS, NAME_BYTES

LONGEST_SALT = 256
"""Bytes of the salt and the tenant of a request together. A block with more is not kept."""
_HEAD = struct.Struct("<I6H")  # first chunk, bytes of each part


def record_bytes(block_size: int) -> int:
    """Room for a record of a block with so many positions, in multiples of 64."""
    chunks = -(-block_size // CHUNK_TOKENS) + 1
    longest = NAME_BYTES if block_size % CHUNK_TOKENS == 0 else 2 * NAME_BYTES + 4 * CHUNK_TOKENS
    size = OVERHEAD + _HEAD.size + NAME_BYTES * chunks + 2 * longest + LONGEST_SALT
    return -(-(size + 4 * block_size) // 64) * 64


def packed(cached: CachedBlock) -> bytes:
    tokens = array("i", cached.token_ids).tobytes()
    parts = cached.name, cached.before, cached.salt, cached.tenant, b"".join(cached.chunks), tokens
    return _HEAD.pack(cached.first_chunk, *map(len, parts)) + b"".join(parts)


def unpacked(body: bytes) -> CachedBlock:
    """From `packed`: the checksum of the record was right."""
    first_chunk, *sizes = _HEAD.unpack_from(body)
    parts, end = [], _HEAD.size
    for size in sizes:
        parts.append(body[end : end + size])
        end += size
    name, before, salt, tenant, chunks, tokens = parts
    names = [chunks[i : i + NAME_BYTES] for i in range(0, len(chunks), NAME_BYTES)]
    return CachedBlock(name, names, first_chunk, salt, before, array("i", tokens), tenant)
