"""The hash that names a prefix of tokens for routers and workers.

It does not depend on a worker's block size.
"""

import sys
from array import array
from collections.abc import Sequence

import xxhash

CHUNK_TOKENS = 64


def chunk_hashes(token_ids: Sequence[int], *, salt: bytes = b"") -> list[int]:
    """Returns one 64-bit hash for each full chunk of 64 tokens. Equal hashes mean equal prefixes.

    Chunk i is xxh3-64 of its tokens as little-endian u32, seeded with the hash of chunk i-1. The first seed
    is xxh3-64 of `salt`, so that tenants with different salts share no prefix.
    """
    words = array("I", token_ids)
    assert words.itemsize == 4
    if sys.byteorder == "big":
        words.byteswap()
    data = memoryview(words).cast("B")
    hashes: list[int] = []
    previous = xxhash.xxh3_64_intdigest(salt)
    step = CHUNK_TOKENS * 4
    for start in range(0, len(data) - step + 1, step):
        previous = xxhash.xxh3_64_intdigest(data[start : start + step], seed=previous)
        hashes.append(previous)
    return hashes
