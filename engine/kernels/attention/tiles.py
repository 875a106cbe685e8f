"""Cuts the work of prefill chunks into parts, one for each program. Pure, on the host."""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heapreplace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    block_m: int  # rows: (token, head of the group) pairs
    block_n: int  # keys at a time
    warps: int
    per_sm: int = 1  # programs that share a multiprocessor
    piece_keys: int = 512
    """The fixed cost of a piece, in keys: loading queries and combining pieces takes as long as attending to
    so many keys."""

    def tokens(self, group: int) -> int:
        """Tokens of a tile, if `group` query heads share a KV head."""
        return self.block_m // group


SHORT = Shape(64, 64, 4, per_sm=2, piece_keys=2048)  # measured on an H200
LONG = Shape(128, 128, 8)
LONG_FROM = 4096  # positions
MOST_IN_LONG = 256
"""Numbers of a head. With more, the sums of a long tile do not fit into registers."""

TILE_FIELDS = 14
LARGEST_N = 128
"""Pieces are cut at multiples of this number of keys, because tiles of every shape divide it."""
LEAST_KEYS = 4 * LARGEST_N
"""Keys of a piece, if a tile has several. Shorter pieces save less time than combining them costs."""
MOST_WAVES = 2
"""Most pieces of tiles that are cut, for each program that runs at once."""


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


def tile_work(
    prefills: Sequence[tuple[int, int]],
    num_decodes: int,
    tokens: int,
    programs: int,
    piece_keys: int = 0,
    images: Images = NO_IMAGES,
) -> np.ndarray:
    """[pieces, TILE_FIELDS] int32: request (index into the block tables), first row of q, number of tokens
    (at most `tokens`), first position; first key and last key + 1; place of the piece, and number of pieces
    of its tile; `Run.seen`; and the positions of all chunks and those before them. Line i also has the i-th
    of the tiles that are cut: first row of q, number of tokens, first place and number of pieces, or zeros.

    The chunks (start, stop) follow `num_decodes` requests of one row each. The longest pieces come first, so
    that the last programs are short. The longest tiles are cut into pieces, if `programs` at once, with this
    fixed cost (`Shape.piece_keys`), are then over sooner. A tile of one piece has no place. There are at most
    `most_places` places, and `most_pieces` pieces.
    """
    tiles, row = [], num_decodes
    for request, (start, stop) in enumerate(prefills, num_decodes):
        tiles += [
            (request, row + position - start, min(tokens, run.stop - position), position, run.seen)
            for run in runs_of((start, stop), images.get(request - num_decodes, ()))
            for position in range(run.start, run.stop, tokens)
        ]
        row += stop - start
    tiles.sort(key=_keys, reverse=True)
    longest, count = _cut([_keys(tile) for tile in tiles], programs, piece_keys)
    positions, work, joined, place = sum(stop for _, stop in prefills), [], [], 0
    for i, tile in enumerate(tiles):
        # The last piece begins before the first token, so each token sees a key of each piece.
        begins = range(0, tile[3] or 1, longest) if i < count else (0,)
        ends = [*begins[1:], _keys(tile)]
        for j, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            work.append((*tile[:4], begin, end, place + j, len(ends), tile[4], positions))
        if len(ends) > 1:
            joined.append((*tile[1:3], place, len(ends)))
            place += len(ends)
    work.sort(key=lambda piece: piece[4] - piece[5])
    lines = np.zeros((len(work), TILE_FIELDS), dtype=np.int32)
    lines[:, :10] = np.array(work, dtype=np.int32).reshape(-1, 10)
    lines[: len(joined), 10:] = np.array(joined, dtype=np.int32).reshape(-1, 4)
    return lines


def _keys(tile: tuple[int, ...]) -> int:
    """Those that a tile (request, row, tokens, first position, seen) sees."""
    return max(tile[3] + tile[2], tile[4])


def most_places(programs: int) -> int:
    """The most pieces of tiles that are cut."""
    return MOST_WAVES * programs


def most_pieces(tiles: int, programs: int) -> int:
    """The most pieces of so many tiles."""
    return tiles + most_places(programs)


def _cut(lengths: Sequence[int], programs: int, piece_keys: int) -> tuple[int, int]:
    """The most keys of a piece, and how many of the tiles with so many keys, which are in descending order,
    are cut into such pieces.

    Whole tiles fill all waves but the last one. So those that are cut are as many as would be in the last
    wave, or those that are longer than a program's share of all keys. All are cut into equally many."""
    best = 1, 0
    if not programs or not lengths:
        return best
    soonest, total = _ends(lengths, programs, piece_keys), sum(lengths)
    longer = sum(length > total / programs for length in lengths)
    for count in {len(lengths) % programs, longer} - {0}:
        whole, before = lengths[count:], 0
        for pieces in range(2, min(most_places(programs) // count, lengths[0] // LEAST_KEYS) + 1):
            length = -(-lengths[0] // (pieces * LARGEST_N)) * LARGEST_N
            if length == before:
                continue
            cut = [min(length, n - k) for n in lengths[:count] for k in range(0, n, length)]
            busy = total + piece_keys * (len(whole) + len(cut))
            if max(busy / programs, max(whole, default=0) + piece_keys) >= soonest:
                break  # nor are shorter pieces over sooner
            ends = _ends(sorted([*whole, *cut], reverse=True), programs, piece_keys)
            if ends < soonest:
                best, soonest = (length, count), ends
            before = length
    return best


def _ends(lengths: Sequence[int], programs: int, piece_keys: int) -> int:
    """When the last of these pieces ends, each begun as soon as one of the programs is free, in keys. The
    longest come first."""
    busy = [length + piece_keys for length in lengths[:programs]]
    heapify(busy)
    for length in lengths[programs:]:
        heapreplace(busy, busy[0] + length + piece_keys)
    return max(busy)
