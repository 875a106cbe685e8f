"""The kinds of cache, as a registry: what a layer keeps of a request. Pools, the layout on the wire,
transfers, stores and memory sizing read it.

A cache has one or more *arrays* [rows, heads, head_dim] in each layer: for each token, in the blocks of the
request, or for each request, in its slot. An attention layer has one array, with K and V as rows. A *latent*
has one row, the vector from which every query head makes its key and its value. It is cut into heads of
`latent_head_dim` numbers, so that each has a scale of its own in FP8; all ranks hold all of them. A state
layer has an array for each of its states.

To add a kind, add it to `KINDS`, give it a cache in `engine.models.cache_spec`, and the kernels that read it.
"""

import math
from dataclasses import dataclass

FP8 = "float8_e4m3fn"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
SCALE_BYTES = 4
"""Of each head of a row in FP8."""
Range = tuple[int, int]
"""[start, stop), of positions or heads."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    per_token: bool
    """Whether there is an array for each token. If not, there is one for each request."""
    identity: str
    """What peers compare of an array, beside the dtype that a receiver may convert."""
    rows: int | None = None
    """Of each array. None: its arrays differ."""
    shared: bool = False
    """Whether all ranks hold all heads."""


KINDS = {
    "attention": CacheKind(True, "kv_heads={0.heads} head_dim={0.head_dim}", rows=2),
    "latent": CacheKind(True, "latent={0.heads}x{0.head_dim}", rows=1, shared=True),
    "state": CacheKind(False, "{0.name}={0.rows}x{0.heads}x{0.head_dim}:{0.dtype}"),
}


@dataclass(frozen=True, slots=True)
class CacheArray:
    """An array [rows, heads, head_dim] that each layer of a kind keeps."""

    kind: str
    """A key of `KINDS`."""
    name: str
    rows: int
    heads: int
    """Of the model over all ranks, or of one rank."""
    head_dim: int
    dtype: str
    """A key of `ITEM_BYTES`."""

    @property
    def per_token(self) -> bool:
        return KINDS[self.kind].per_token

    @property
    def identity(self) -> str:
        return KINDS[self.kind].identity.format(self)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in all rows, with their scales."""
        scale = SCALE_BYTES if self.dtype == FP8 else 0
        return self.rows * (self.head_dim * ITEM_BYTES[self.dtype] + scale)

    @property
    def bytes(self) -> int:
        """Of one token, or of one request, in one layer."""
        return self.heads * self.head_bytes

    def bytes_of(self, heads: int, tokens: int) -> int:
        """Of some heads of some tokens, or of a request."""
        return (tokens if self.per_token else 1) * heads * self.head_bytes

    def heads_of(self, rank: int, ranks: int) -> Range:
        """The heads that a rank holds. With fewer heads than ranks, each head is held by several ranks in a
        row."""
        if KINDS[self.kind].shared:
            return 0, self.heads
        first = rank * self.heads // ranks
        return first, first + max(1, self.heads // ranks)


def latent_head_dim(rank: int, size: int) -> int:
    """The size of the heads of a latent of `size` numbers. The first `rank` of them make all keys and values,
    the others are a part of all keys, and no head has numbers of both."""
    return math.gcd(rank, size)
