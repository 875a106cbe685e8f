"""The kinds of cache, as a registry: what a layer keeps of a request. Pools, the layout on the wire,
transfers, stores, tiers and memory sizing read it, and nothing else says what a layer keeps.

A layer keeps one or more *arrays* [rows, heads, head_dim], each of a kind. A kind has a *unit*: an array for
each token, in the blocks of the request, or one for each request, in its slot. One layer may keep arrays of
both units, and other layers other arrays. An attention layer has one array, with K and V as rows. A *latent*
has one row, the vector from which every query head makes its key and its value. It is cut into heads of
`latent_head_dim` numbers, so that each has a scale of its own in FP8; all ranks hold all of them. Beside a
latent a layer may have an *index key*, by which queries choose the positions that they attend to. A state
layer has an array for each of its states: those of heads, and the inputs of its convolution.

An array of tokens may have a *window*: a token reads only the tokens that are not further behind it. What the
next token does not read is not sent.

To add a kind, add a `CacheKind` here, give layers a cache with its arrays (`engine.models.cache_spec`), and
write the kernels that read it. All else follows: an array that a layer has is allocated, sent, verified,
evicted, restored and counted. An array carries its kind, so processes that only move it need not know it.
"""

import enum
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

FP8 = "float8_e4m3fn"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
SCALE_BYTES = 4
"""Of each head of a row in FP8."""
TILE_TOKENS = 128
"""Attention reads tiles of at most so many positions. It multiplies those that a token does not see by zero,
so they must be numbers."""
AHEAD_TOKENS = 24
"""Tokens behind the last one that is known to be right: of two steps under way, and of the next one."""
Range = tuple[int, int]
"""[start, stop), of positions or heads."""


class Unit(enum.Enum):
    """What has an array, and so where the value of the array ends."""

    TOKEN = enum.auto()
    """It depends on the tokens up to its own. So any range of positions travels and is shared by itself."""
    REQUEST = enum.auto()
    """It depends on all tokens so far. It travels and is shared as it is after one position, in full."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    name: str
    """Unlike those of other kinds."""
    unit: Unit
    copied: bool = False
    """Whether all ranks hold all heads. If not, ranks share the heads out."""
    converts: bool = False
    """Whether peers may keep it in different dtypes, as `layout.Dtypes` says. All arrays of
    a layout that convert have one dtype for each unit."""
    by_name: bool = True
    """Whether its value follows from what content names say. If not, requests share nothing of the model."""


ATTENTION = CacheKind("attention", Unit.TOKEN, converts=True)
LATENT = CacheKind("latent", Unit.TOKEN, copied=True, converts=True)
INDEX = CacheKind("index", Unit.TOKEN, copied=True)
STATE = CacheKind("state", Unit.REQUEST)
HEAD_STATE = CacheKind("head_state", Unit.REQUEST, converts=True)
"""States of Mamba-2 and linear attention. Each worker chooses their dtype."""
EMBEDDING = CacheKind("embedding", Unit.TOKEN, copied=True)
"""Embeddings of images. No layer of a model keeps them: encoders send them to workers."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which tokens a token reads, up to itself. Sliding: the last `length`. Chunked: positions are cut into
    chunks of `length`, and a token reads its own chunk."""

    length: int
    chunked: bool = False
    tile: int = TILE_TOKENS
    """What is kept and sent begins at a multiple of so many positions."""

    def first_read(self, position: int) -> int:
        """The first position that the token at this position reads, and all later tokens: its tile begins
        there."""
        first = position // self.length * self.length if self.chunked else position + 1 - self.length
        return max(0, first) // self.tile * self.tile

    def reads(self, next_positions: Sequence[int]) -> list[Range]:
        """What the tokens at these positions (ascending) read before them: ascending, disjoint."""
        ranges: list[Range] = []
        for position in next_positions:
            first = self.first_read(position)
            if ranges and first <= ranges[-1][1]:
                first, _ = ranges.pop()
            if first < position:
                ranges.append((first, position))
        return ranges


def overlaps(ranges: Sequence[Range], other_ranges: Sequence[Range]) -> Iterator[Range]:
    """The positions that are in both. Each is ascending and disjoint."""
    i = j = 0
    while i < len(ranges) and j < len(other_ranges):
        start, stop = max(ranges[i][0], other_ranges[j][0]), min(ranges[i][1], other_ranges[j][1])
        if start < stop:
            yield start, stop
        if ranges[i][1] < other_ranges[j][1]:
            i += 1
        else:
            j += 1


def first_read(windows: Collection[Window], position: int) -> int:
    """The first position that tokens from this position on read in an array with one of these windows."""
    return min((window.first_read(position) for window in windows), default=position)


def last_unread(windows: Collection[Window], position: int) -> int:
    """The position from which on tokens from this position on may read all arrays with these windows."""
    return max((window.first_read(position) for window in windows), default=0)


def window_blocks(windows: Collection[Window], block_size: int) -> int:
    """Blocks with what a request reads in arrays with these windows, at most, while it decodes."""
    longest = max(window.length + window.tile for window in windows)
    return -(-(longest + AHEAD_TOKENS) // block_size) + 1


@dataclass(frozen=True, slots=True)
class CacheArray:
    """An array [rows, heads, head_dim] that a layer keeps of each token, or of each request."""

    kind: CacheKind
    name: str
    """Unlike those of other arrays of the layer."""
    rows: int
    heads: int
    """Of the model over all ranks, or of one rank."""
    head_dim: int
    dtype: str
    """A key of `ITEM_BYTES`."""
    window: Window | None = None
    """Of an array of tokens. None: a token reads all earlier ones."""
    block: int = 1
    """Of an array of tokens: so many neighbours are one block of bytes, of which each has an equal share. The
    block travels in full, once all of its tokens are computed, or the last one of the request."""

    @property
    def per_token(self) -> bool:
        return self.kind.unit is Unit.TOKEN

    @property
    def identity(self) -> str:
        """What peers compare: all but a dtype that may differ."""
        dtype = "" if self.kind.converts else f":{self.dtype}"
        words = f"{self.kind.name}.{self.name}={self.rows}x{self.heads}x{self.head_dim}{dtype}"
        if self.block > 1:
            words += f"/{self.block}"
        if self.window is None:
            return words
        words += f"{'|' if self.window.chunked else '<'}{self.window.length}"
        return words if self.window.tile == TILE_TOKENS else f"{words}%{self.window.tile}"

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in all rows, with their scales."""
        scale = SCALE_BYTES if self.dtype == FP8 else 0
        return self.rows * (self.head_dim * ITEM_BYTES[self.dtype] + scale)

    @property
    def bytes(self) -> int:
        """Of one token, or of one request, in one layer."""
        return self.heads * self.head_bytes

    def read_of(self, ranges: Sequence[Range], next_positions: Sequence[int]) -> Iterator[Range]:
        """Of these positions (ascending, disjoint), those before one of `next_positions` (ascending) that the
        token there reads. None: all. They grow to full blocks."""
        reads: Iterator[Range] = iter(ranges)
        if self.window is not None and next_positions:
            reads = overlaps(ranges, self.window.reads(next_positions))
        return reads if self.block == 1 else (self.in_blocks(*each) for each in reads)

    def in_blocks(self, start: int, stop: int, *, complete: bool = True) -> Range:
        """The blocks with these positions. Not `complete`: without the last one if it goes on behind them."""
        last = -(-stop // self.block) if complete else stop // self.block
        return start // self.block * self.block, last * self.block

    def bytes_of(self, heads: int, tokens: int) -> int:
        """Of some heads of some tokens, or of a request."""
        return (tokens if self.per_token else 1) * heads * self.head_bytes

    def heads_of(self, rank: int, ranks: int) -> Range:
        """The heads that a rank holds. With fewer heads than ranks, each head is held by several ranks in a
        row."""
        if self.kind.copied:
            return 0, self.heads
        first = rank * self.heads // ranks
        return first, first + max(1, self.heads // ranks)


def latent_head_dim(rank: int, size: int) -> int:
    """The size of the heads of a latent of `size` numbers. The first `rank` of them make all keys and values,
    the others are a part of all keys, and no head has numbers of both."""
    return math.gcd(rank, size)
