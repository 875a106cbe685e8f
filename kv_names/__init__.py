"""Names KV by its content: two names are equal only if the KV is.

A prompt is cut into chunks of 64 tokens. The name of a chunk stands for all tokens up to its end, and for
everything else that their KV depends on:

    root ─▶ root of the tenant's salt ─▶ name of chunk 0 ─▶ name of chunk 1 ─▶ …

Each arrow is blake2b. What stands left of it is the key. The salt, or the tokens of the chunk, are hashed.
The tokens of an image are all the same, so its name and its place are hashed, too (`ImageSpan`). So a name
depends on no block size, no rank and no worker. An adapter is in the salt (`with_adapter`).

Prefix caches and KV transfers compare whole names.
Routers index 60 bits of a name as a hint. `vocabulary_fingerprint` says what the tokens mean, and
`cache_kinds` what a layer keeps of a request.

The values are part of the protocol: workers and routers of different releases compare them. The package
imports no other package of Baton.
"""

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from hashlib import blake2b, sha256
from typing import NamedTuple

CHUNK_TOKENS = 64
MOST_STORED = 1 << 20
"""Chunks that a worker or a router knows to be in the shared store. One more replaces the oldest."""
NAME_BYTES = 16


IMAGE_NAME_BYTES = 32


class ImageSpan(NamedTuple):
    """Where an image is in a prompt, and which one."""

    start: int
    """The position of its first token."""
    stop: int
    name: bytes
    """`IMAGE_NAME_BYTES` bytes. Images with equal names have equal embeddings and equal positions."""


class Tier(IntEnum):
    """Where a worker has cached KV, the fastest first. The numbers are those of `Tier` in
    proto/worker.proto."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    STORE = 3


def content_root(model_fingerprint: str, weight_format: str, kv_dtype: str, numerics: str = "") -> bytes:
    """The root of all names of a worker. Workers with equal roots compute equal KV for equal tokens: equal
    bits, if they have `numerics`.

    A worker may also keep KV that it converted from the dtype of a peer. It has the worker's own names, and
    differs from what the worker would compute by the rounding of both formats."""
    named = model_fingerprint, weight_format, kv_dtype, *filter(None, [numerics])
    parts = "".join(f"{len(part)}:{part}" for part in named)
    return blake2b(parts.encode(), digest_size=32).digest()


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Returns the fingerprint of a map from token text to token id, added tokens included.

    Equal fingerprints mean that ids stand for equal text. The result is "" for an empty vocabulary. It does
    not depend on the file format: a GGUF file and a Hugging Face directory of one model have the same one.
    """
    if not vocabulary:
        return ""
    by_id = sorted((token_id, token) for token, token_id in vocabulary.items())
    return sha256(json.dumps(by_id).encode()).hexdigest()[:32]


def salted(root: bytes, salt: bytes) -> bytes:
    """The root for requests with this salt. Names of different salts have nothing in common."""
    return blake2b(salt, key=root, digest_size=32).digest()


def with_adapter(salt: bytes, fingerprint: bytes) -> bytes:
    """The salt of requests that an adapter with this fingerprint computes. Empty: none does.

    The first 16 bytes stay: they are those of an API key."""
    if not fingerprint:
        return salt
    return salt[:16].ljust(16, b"\0") + blake2b(salt, key=fingerprint, digest_size=48).digest()


def extend_names(
    names: list[bytes], token_ids: Sequence[int], count: int, root: bytes, images: Sequence[ImageSpan] = ()
) -> None:
    """Extends `names`, those of the first chunks, to all full chunks within the first `count` tokens.

    `root` is salted. `images`: those of the prompt, in order."""
    start, stop = len(names) * CHUNK_TOKENS, count // CHUNK_TOKENS * CHUNK_TOKENS
    if start >= stop:
        return
    data, step = _words(token_ids[start:stop]), CHUNK_TOKENS * 4
    name = names[-1] if names else root
    for at in range(0, len(data), step):
        begin, words = start + at // 4, data[at : at + step]
        if images and (pictured := _with_images(words, begin, begin + CHUNK_TOKENS, images)):
            name = _of_images(pictured, name)
        else:
            name = blake2b(words, key=name, digest_size=NAME_BYTES).digest()
        names.append(name)


def names_of_prefixes(
    names: Sequence[bytes],
    token_ids: Sequence[int],
    lengths: range,
    root: bytes,
    images: Sequence[ImageSpan] = (),
) -> list[bytes]:
    """The name of the first tokens, for each of these lengths, ascending. `names` are those of the full
    chunks among them, or more. Within a chunk it is the name of the chunk before, and the tokens behind that.
    It is no hash, and other workers never see it."""
    found: list[bytes] = []
    if not lengths:
        return found
    first = lengths[0] // CHUNK_TOKENS * CHUNK_TOKENS
    words = bytes(_words(token_ids[first : lengths[-1]]))
    for length in lengths:
        chunks = length // CHUNK_TOKENS
        begin = chunks * CHUNK_TOKENS
        name = names[chunks - 1] if chunks else root
        if length > begin:
            behind = words[4 * (begin - first) : 4 * (length - first)]
            if images and (pictured := _with_images(behind, begin, length, images)):
                name = _of_images(pictured, name)
            else:
                name += behind
        found.append(name)
    return found


def _with_images(words: memoryview | bytes, start: int, stop: int, images: Sequence[ImageSpan]) -> bytes:
    """What is hashed of the tokens [start, stop), of which an image stands for some. Empty: none does."""
    within = [image for image in images if image.start < stop and image.stop > start]
    if not within:
        return b""
    # The number of images and their size come first: no tokens look like an image.
    places = b"".join(_PLACE.pack(x.start - start, x.stop - start, x.name) for x in within)
    return _COUNT.pack(len(within)) + places + words


def _of_images(data: bytes, key: bytes) -> bytes:
    return blake2b(data, key=key, digest_size=NAME_BYTES, person=b"images").digest()


_COUNT = struct.Struct("<I")
_PLACE = struct.Struct(f"<qq{IMAGE_NAME_BYTES}s")


HINT_BITS = 60
_HINT = (1 << HINT_BITS) - 1


def hint(name: bytes) -> int:
    """What routers know of a name: 60 bits. Python takes 32 bytes for such a number, and 48 for one of 64
    bits. A router has millions."""
    return int.from_bytes(name[:8], "little") & _HINT


def prompt_hints(
    token_ids: Sequence[int], root: bytes, salt: bytes, images: Sequence[ImageSpan] = ()
) -> list[int]:
    """The hints of all full chunks of a prompt."""
    names: list[bytes] = []
    extend_names(names, token_ids, len(token_ids), salted(root, salt), images)
    return [hint(name) for name in names]


def packed(token_ids: Sequence[int]) -> "array[int]":
    """A copy of tokens below 2^31, as an array of typecode i."""
    return _array("i", token_ids)


def _words(token_ids: Sequence[int]) -> memoryview:
    """The tokens as little-endian u32."""
    words = _array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return memoryview(words).cast("B")


def _array(typecode: str, token_ids: Sequence[int]) -> "array[int]":
    if len(token_ids) == 0:
        return array(typecode)
    if isinstance(token_ids, array):
        assert token_ids.typecode in "iI"
        return token_ids[:]
    # `struct` packs a list three times as fast as `array` does.
    return array(typecode, struct.pack(f"{len(token_ids)}{typecode}", *token_ids))
