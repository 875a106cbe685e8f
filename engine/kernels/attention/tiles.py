"""Cuts the work of prefill chunks into parts, one for each program. Pure, on the host."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    block_m: int  # rows: (token, head of the group) pairs
    block_n: int  # keys at a time
    warps: int

    def tokens(self, group: int) -> int:
        """Tokens of a tile, if `group` query heads share a KV head."""
        return self.block_m // group


# Measured on an H200.
SHORT = Shape(64, 64, 4)
SHORT_PER_SM = 2  # programs that share a multiprocessor
LONG = Shape(128, 128, 8)
LONG_FROM = 4096  # positions
MOST_IN_LONG = 256
"""Numbers of a head. With more, the sums of a long tile do not fit into registers."""

TILE_FIELDS = 10
LARGEST_N = 128
"""Pieces are cut at multiples of this number of keys, because tiles of every shape divide it."""
LEAST_KEYS = 4 * LARGEST_N
"""Keys of a piece, if a tile has several. Shorter pieces save less time than combining them costs."""
MOST_WAVES = 3
"""Most pieces for each program that runs at once."""
PIECE_KEYS = 2048
"""The fixed cost of a piece, in keys: loading queries and combining pieces takes as long as attending to so
many keys. Measured on an H200, with two programs on each multiprocessor."""


Images = Mapping[int, Sequence[tuple[int, int]]]
"""By chunk, the images (start, stop) of which it has tokens, up to the last. Each of these sees all of its
image."""
NO_IMAGES: Images = MappingProxyType({})


class Run(NamedTuple):
    """Successive queries of a chunk."""

    start: int
    stop: int
    seen: int
    """Each query sees the positions up to its own, and all before this one."""


def runs_of(chunk: tuple[int, int], images: Sequence[tuple[int, int]]) -> Iterator[Run]:
    """Cuts a chunk (start, stop) where its images begin and end."""
    start, stop = chunk
    for begin, end in images:
        if start < begin:
            yield Run(start, begin, 0)
        yield Run(max(start, begin), end, end)
        start = end
    if start < stop:
        yield Run(start, stop, 0)


def shape_for(prefills: Sequence[tuple[int, int]], group: int, programs: int, *, wgmma: bool) -> Shape:
    """The shape of tiles for chunks (start, stop). `wgmma`: `prefill_wgmma` attends if they are `LONG`. Then
    one such tile for each of `programs`, which run at once for a head, is faster than several short ones."""
    if wgmma and sum(-(-(stop - start) // LONG.tokens(group)) for start, stop in prefills) > programs:
        return LONG
    return LONG if max(stop for _, stop in prefills) >= LONG_FROM else SHORT


def tile_work(
    prefills: Sequence[tuple[int, int]],
    num_decodes: int,
    tokens: int,
    programs: int,
    images: Images = NO_IMAGES,
) -> np.ndarray:
    """[pieces, TILE_FIELDS] int32: request (index into the block tables), first row of q, number of tokens
    (at most `tokens`), first position; first key and last key + 1; place of the piece, first place and number
    of pieces of its tile; and `Run.seen`.

    The chunks (start, stop) follow `num_decodes` requests of one row each. Tiles that see most keys come
    first, so that the last programs are short. The keys of the longest ones are cut into pieces, if
    `programs` at once are then over sooner. There are at most `most_pieces`, or one for each tile. A tile of
    one piece has no place.
    """
    tiles, row = [], num_decodes
    for request, (start, stop) in enumerate(prefills, num_decodes):
        tiles += [
            (request, row + position - start, min(tokens, run.stop - position), position, run.seen)
            for run in runs_of((start, stop), images.get(request - num_decodes, ()))
            for position in range(run.start, run.stop, tokens)
        ]
        row += stop - start
    tiles.sort(key=lambda tile: -tile[3])
    most = most_pieces(row - num_decodes, tokens, programs)
    length = _piece_length([tile[3] for tile in tiles], programs, most)
    work, place = [], 0
    for *tile, seen in tiles:
        # The last piece begins before the first token, so each token sees a key of each piece.
        ends = [*range(length, tile[3], length), max(tile[3] + tile[2], seen)]
        for i, end in enumerate(ends):
            work.append((*tile, i * length, end, place + i, place, len(ends), seen))
        place += len(ends) if len(ends) > 1 else 0
    return np.array(work, dtype=np.int32).reshape(-1, TILE_FIELDS)


def most_pieces(rows: int, tokens: int, programs: int) -> int:
    """The most pieces of chunks with so many tokens in all, unless there are more tiles. With few tiles, two
    and more pieces of each are computed at once, and no smaller ones are sooner."""
    return programs if rows <= programs // 2 * tokens else MOST_WAVES * programs


def _piece_length(positions: Sequence[int], programs: int, most: int) -> int:
    """The most keys of a piece, for tiles from these positions on."""
    longest = max(positions, default=0)
    if not longest or not programs:
        return max(longest, 1)
    units = range(LEAST_KEYS // LARGEST_N, longest // LARGEST_N + 2)

    def pieces(length: int) -> int:
        return sum(-(-position // length) or 1 for position in positions)

    def keys(length: int) -> int:
        """Keys that a program attends to, one piece after the other."""
        return -(-pieces(length) // programs) * (length + PIECE_KEYS)

    lengths = [longest]
    for at_most in range(programs, most + 1, programs):
        # If most tiles stayed whole in a second wave, it would be over no sooner.
        if len(positions) <= max(programs, at_most // 2):
            index = bisect_left(units, True, key=lambda n, most=at_most: pieces(n * LARGEST_N) <= most)
            lengths.append(LARGEST_N * (units.start + index))
    return min(lengths, key=keys)
