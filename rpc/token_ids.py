"""Token ids as messages have them: u32, little-endian. A list of numbers would take far longer."""

import sys
from array import array
from collections.abc import Sequence

BYTES = 4
"""Of a token id."""


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """`token_ids`: in an array, of four bytes each."""
    return _swapped(token_ids if isinstance(token_ids, array) else array("I", token_ids)).tobytes()


def unpacked_ids(data: bytes) -> "array[int]":
    """Typecode i: an id from 2^31 on, which no vocabulary has, is below 0. Raises ValueError for a part of an
    id."""
    if len(data) % BYTES:
        raise ValueError(f"token ids have {len(data)} bytes, which is no multiple of {BYTES}")
    return _swapped(array("i", data))


def _swapped(words: "array[int]") -> "array[int]":
    assert words.itemsize == BYTES
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words
