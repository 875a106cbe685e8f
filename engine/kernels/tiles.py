"""Cuts the work of prefill chunks into parts, one for each program. Pure, on the host."""

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
SHORT = Shape(64, 64, 4)  # two programs share a multiprocessor
LONG = Shape(128, 128, 8)
LONG_FROM = 4096  # positions


def shape_for(prefills: Sequence[tuple[int, int]]) -> Shape:
    """The shape of tiles for chunks (start, stop)."""
    return LONG if max(stop for _, stop in prefills) >= LONG_FROM else SHORT


def tile_work(prefills: Sequence[tuple[int, int]], num_decodes: int, tokens: int) -> np.ndarray:
    """[tiles, 4] int32: request (index into the block tables), first row of q, number of tokens (at most
    `tokens`), first position. The chunks (start, stop) follow `num_decodes` requests of one row each. Tiles
    that see most keys come first, so that the last programs are short."""
    tiles, row = [], num_decodes
    for request, (start, stop) in enumerate(prefills, num_decodes):
        tiles += [
            (request, row + position - start, min(tokens, stop - position), position)
            for position in range(start, stop, tokens)
        ]
        row += stop - start
    tiles.sort(key=lambda tile: -tile[3])
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)


def scan_work(prefills: Sequence[tuple[int, int]], num_decodes: int, tokens: int) -> np.ndarray:
    """The chunks of state layers, [chunks, 6] int32: request (index into the slots), first row, number of
    tokens (at most `tokens`), number among the chunks of its request, tokens of the request from this chunk
    on, first position. `prefills` (start, stop) follow `num_decodes` requests of one row each.

    A chunk needs the state after the one before it. So the first chunks of all requests come first."""
    chunks, row = [], num_decodes
    for request, (start, stop) in enumerate(prefills, num_decodes):
        chunks += [
            (request, row + at - start, min(tokens, stop - at), number, stop - at, at)
            for number, at in enumerate(range(start, stop, tokens))
        ]
        row += stop - start
    chunks.sort(key=lambda chunk: chunk[3])
    return np.array(chunks, dtype=np.int32).reshape(-1, 6)
