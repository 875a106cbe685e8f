"""Cuts the work of prefill chunks into parts, one for each program. Pure, on the host."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Shape of a tile."""

    block_m: int  # rows: (token, head of the group) pairs
    block_n: int  # keys at a time
    warps: int

    def tokens(self, group: int) -> int:
        """Tokens of a tile, if `group` query heads share a KV head."""
        return self.block_m // group


# Measured on an H200 (`python -m bench.kernels --sweep`).
SHORT = Shape(64, 64, 4)
SHORT_PER_SM = 2  # programs that share a multiprocessor
LONG = Shape(128, 128, 8)
LONG_FROM = 4096  # positions

TILE_FIELDS = 9
LARGEST_N = 128
"""Keys are cut at multiples of it, which are tiles of keys in every shape."""
LEAST_KEYS = 4 * LARGEST_N
"""Of a piece that is not alone: a shorter one saves less than putting pieces together takes."""


def shape_for(prefills: Sequence[tuple[int, int]]) -> Shape:
    """The shape of tiles for chunks (start, stop)."""
    return LONG if max(stop for _, stop in prefills) >= LONG_FROM else SHORT


def tile_work(
    prefills: Sequence[tuple[int, int]], num_decodes: int, tokens: int, programs: int
) -> np.ndarray:
    """[pieces, TILE_FIELDS] int32: request (index into the block tables), first row of q, number of tokens
    (at most `tokens`), first position; first key and last key + 1; place of the piece, first place and number
    of pieces of its tile.

    The chunks (start, stop) follow `num_decodes` requests of one row each. Tiles that see most keys come
    first, so that the last programs are short. If there are fewer tiles than `programs`, the keys of the
    longest ones are cut into pieces, until there are about as many pieces. A tile of one piece has no place.
    """
    tiles, row = [], num_decodes
    for request, (start, stop) in enumerate(prefills, num_decodes):
        tiles += [
            (request, row + position - start, min(tokens, stop - position), position)
            for position in range(start, stop, tokens)
        ]
        row += stop - start
    tiles.sort(key=lambda tile: -tile[3])
    length = _piece_length([position for *_, position in tiles], programs)
    work, place = [], 0
    for tile in tiles:
        # The last piece begins before the first token, so each token sees a key of each piece.
        ends = [*range(length, tile[3], length), tile[3] + tile[2]]
        for i, end in enumerate(ends):
            work.append((*tile, i * length, end, place + i, place, len(ends)))
        place += len(ends) if len(ends) > 1 else 0
    return np.array(work, dtype=np.int32).reshape(-1, TILE_FIELDS)


def _piece_length(positions: Sequence[int], programs: int) -> int:
    """The fewest keys of a piece that give at most `programs` pieces to tiles from these positions on."""
    longest = max(positions, default=0)
    if len(positions) >= programs:
        return max(longest, 1)

    def enough(units: int) -> bool:
        length = units * LARGEST_N
        return sum(max(1, math.ceil(position / length)) for position in positions) <= programs

    units = range(LEAST_KEYS // LARGEST_N, longest // LARGEST_N + 2)
    return LARGEST_N * (units.start + bisect_left(units, True, key=enough))


def scan_work(prefills: Sequence[tuple[int, int]], num_decodes: int, tokens: int) -> np.ndarray:
    """The chunks of state layers, [chunks, 6] int32: request (index into the slots), first row, number of
    tokens (at most `tokens`), number among the chunks of its request, tokens of the request from this chunk
    on, first position. `prefills` (start, stop) follow `num_decodes` requests of one row each.

    The first chunks of all requests come first. A program of a scan begins there and takes all chunks of its
    request."""
    chunks, row = [], num_decodes
    for request, (start, stop) in enumerate(prefills, num_decodes):
        chunks += [
            (request, row + at - start, min(tokens, stop - at), number, stop - at, at)
            for number, at in enumerate(range(start, stop, tokens))
        ]
        row += stop - start
    chunks.sort(key=lambda chunk: chunk[3])
    return np.array(chunks, dtype=np.int32).reshape(-1, 6)
