"""Which rows of a step attend to latents how (`latent_kernels` says what the ways are). On the host."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from baton.engine.kernels.attention import index_kernels, latent_wgmma, prefill_wgmma
from baton.engine.kernels.attention.index_kernels import Choice, choice_of_chunk, columns_of
from baton.engine.kernels.attention.online_softmax import SEGMENT, SEGMENTS, Expanded
from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.kernels.attention.pieces import Pieces, most_pieces, partition
from baton.engine.kernels.attention.prefill import Tiles
from baton.engine.kernels.attention.tiles import SHORT, Shape, tile_work
from baton.engine.kernels.launch import on_hopper
from baton.engine.kernels.upload import upload
from baton.engine.model_config import LatentConfig

EXPANDED = Shape(prefill_wgmma.BLOCK_M, 64, 8)  # measured on an H200; of tiles in 16 bits
SCRATCH_BYTES = 1 << 30
SCRATCH_BLOCK = 128  # positions; the tiles of `prefill` divide it
MOST_ABSORBED = 512
"""Queries of a chunk at a time: their partial results are larger than those of other kernels."""
MOST_EXACT = 128
"""Queries at a time in the exact mode, decodes as well: each may have SEGMENTS partial results."""


class Form(NamedTuple):
    """How a program attends."""

    rows: int  # query heads
    block_n: int  # positions of a tile; pieces are cut at multiples of it
    wgmma: bool  # by `latent_wgmma`


class Absorbed(NamedTuple):
    """Rows that read the cache as it is."""

    rows: slice
    form: Form
    pieces: Pieces
    tables: Tensor  # [rows, blocks], or [blocks] of all rows. With a choice, its slots
    exact: bool
    choice: Choice | None = None  # None: rows attend to all that they see


class ExpandedChunks(NamedTuple):
    """Consecutive chunks whose keys and values are made of the latents."""

    rows: slice
    slots: Tensor  # [positions] int64: of each position in the scratch memory
    scratch: Expanded  # of all layers, for as many heads as are computed at a time
    tables: Tensor  # [chunks, blocks] int32: of the scratch memory
    tiles: Tiles


LatentTiling = Sequence[Absorbed | ExpandedChunks]


class Scratch:
    """Memory of `SCRATCH_BYTES` for keys and values of expanded chunks; allocated when it is first used."""

    def __init__(
        self, num_heads: int, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_heads, self._sizes = num_heads, sizes
        self._blocks = SCRATCH_BYTES // (sum(sizes) * dtype.itemsize * SCRATCH_BLOCK)  # of one head
        self._empty = functools.partial(torch.empty, dtype=dtype, device=device)
        self._memory: list[Tensor] = []

    def heads(self, positions: int) -> int:
        """How many heads of so many positions it holds: all, or a share that divides them; 0: not one."""
        most = self._blocks * SCRATCH_BLOCK // positions
        return next((n for n in range(min(most, self._num_heads), 0, -1) if self._num_heads % n == 0), 0)

    def of(self, positions: int) -> Expanded:
        """The memory, for `heads(positions)`."""
        if not self._memory:
            self._memory = [self._empty(self._blocks * SCRATCH_BLOCK * size) for size in self._sizes]
        heads = self.heads(positions)
        shape = (1, self._blocks // heads, SCRATCH_BLOCK, heads)
        keys, values = (
            memory[: math.prod(shape) * size].view(*shape, size)
            for memory, size in zip(self._memory, self._sizes, strict=True)
        )
        return Expanded(keys, values)


def form_of(num_heads: int, shape: LatentConfig, dtype: torch.dtype, block_size: int, *, fp8: bool) -> Form:
    """`block_size`: positions that an entry of a table stands for."""
    if dtype is torch.float32:
        return Form(16, 32, wgmma=False)  # larger tiles do not fit into shared memory
    sizes = shape.rank == latent_wgmma.RANK and shape.rope_dim == latent_wgmma.ROPE
    tiles = block_size % latent_wgmma.BLOCK_N == 0 or block_size == 1
    if not fp8 and sizes and tiles and on_hopper():
        return Form(latent_wgmma.ROWS, latent_wgmma.BLOCK_N, wgmma=True)
    return Form(16 if num_heads <= 16 else 32, 64, wgmma=False)


def tile_latent(
    metadata: AttentionMetadata,
    num_heads: int,
    shape: LatentConfig,
    min_expanded_queries: int,
    dtype: torch.dtype,
    multiprocessors: int,
    *,
    fp8: bool = False,
    exact: bool = False,
) -> LatentTiling:
    """`min_expanded_queries`: queries of a chunk. `fp8`: as in `Kernels.tile_latent`."""
    decodes, device = metadata.num_decodes, metadata.contexts.device
    dense = form_of(num_heads, shape, dtype, metadata.block_size, fp8=fp8)
    sparse = form_of(num_heads, shape, dtype, 1, fp8=fp8)
    longest = metadata.block_tables.shape[1] * metadata.block_size
    # None: no query sees more than it may choose.
    most = shape.index.most_chosen if shape.index and longest > shape.index.most_chosen else None
    tiling: list[Absorbed | ExpandedChunks] = []
    for first in range(0, decodes, MOST_EXACT if exact else max(1, decodes)):
        rows = slice(first, min(first + MOST_EXACT, decodes) if exact else decodes)
        contexts, tables, form, choice = metadata.contexts[rows], metadata.block_tables[rows], dense, None
        if most is not None:
            count = most_pieces(len(contexts), 1, multiprocessors)
            work = partition(contexts, 1, count, block_n=index_kernels.BLOCK_N).work
            slots = tables.new_empty(len(contexts), most)
            choice, form = Choice(contexts, tables, work, 1, longest, slots), sparse
            contexts, tables = contexts.clamp_max(most), slots
        if exact:
            pieces = partition(contexts, 1, SEGMENTS.value * len(contexts), segments=True)
        else:
            # A program fills a multiprocessor. So the pieces are as many as run at once, or twice as many, …
            programs = max(1, multiprocessors // triton.cdiv(num_heads, form.rows))
            count = triton.cdiv(decodes + programs // 2, programs) * programs
            pieces = partition(contexts, 1, count, block_n=form.block_n)
        tiling.append(Absorbed(rows, form, pieces, tables, exact, choice))
    scratch = Scratch(num_heads, (shape.key_dim, shape.value_dim), dtype, device)
    expanded: list[tuple[int, int, int]] = []  # request, start, stop
    row = decodes

    def expand() -> None:
        if expanded:
            first = row - sum(stop - start for _, start, stop in expanded)
            tiling.append(_expanded_chunks(metadata, expanded, slice(first, row), scratch))
            expanded.clear()

    for request, start, stop, chooses in _chunks(metadata, most, exact=exact):
        short = stop - start < min_expanded_queries
        if exact or chooses or short or not scratch.heads(_padded(stop)):
            expand()
            form, at_once = sparse if chooses else dense, MOST_EXACT if exact else MOST_ABSORBED
            at_once = index_kernels.rows_at_once(stop, longest, at_once) if chooses else at_once
            programs = max(1, multiprocessors // triton.cdiv(num_heads, form.rows))
            for begin in range(start, stop, at_once):
                end = min(begin + at_once, stop)
                rows = slice(row + begin - start, row + end - start)
                table, choice, entries = metadata.block_tables[request], None, None
                if chooses and most is not None:
                    choice = choice_of_chunk(
                        begin, end, table, columns_of(stop, longest), most, multiprocessors, exact=exact
                    )
                    table, entries = choice.slots, most
                pieces = pieces_between(begin, end, form.block_n, programs, device, entries, exact=exact)
                tiling.append(Absorbed(rows, form, pieces, table, exact, choice))
        else:
            if scratch.heads(sum(map(_padded, (*(end for *_, end in expanded), stop)))) < num_heads:
                expand()
            expanded.append((request, start, stop))
        row += stop - start
    expand()
    return tiling


def _chunks(
    metadata: AttentionMetadata, most: int | None, *, exact: bool
) -> Iterator[tuple[int, int, int, bool]]:
    """The chunks of a step: request, start, stop, and whether its queries choose. Those of a chunk that see
    at most `most` positions attend to all of them, but in the exact mode, where they do as decodes do.
    `most` is None if none chooses."""
    for request, (start, stop) in enumerate(metadata.prefills, metadata.num_decodes):
        middle = stop
        if most is not None:
            middle = start if exact else min(stop, max(start, most))
        if start < middle:
            yield request, start, middle, False
        if middle < stop:
            yield request, middle, stop, True


def _padded(positions: int) -> int:
    return -(-positions // SCRATCH_BLOCK) * SCRATCH_BLOCK


def _expanded_chunks(
    metadata: AttentionMetadata, chunks: Sequence[tuple[int, int, int]], rows: slice, memory: Scratch
) -> ExpandedChunks:
    """The contexts of the chunks (request, start, stop) follow each other in the scratch memory."""
    device, size = metadata.contexts.device, metadata.block_size
    width, blocks_of, in_block, first = metadata.block_tables.shape[1], [], [], [0]
    for request, _, stop in chunks:
        padded = _padded(stop)
        block, place = np.divmod(np.minimum(np.arange(padded), stop - 1), size)
        blocks_of.append(request * width + block)
        in_block.append(place)
        first.append(first[-1] + padded // SCRATCH_BLOCK)
    scratch = memory.of(first[-1] * SCRATCH_BLOCK)
    spans = [(start, stop) for _, start, stop in chunks]
    shape = EXPANDED if scratch.keys.itemsize == 2 else SHORT
    work = tile_work(spans, 0, shape.tokens(1), 0)
    most = max(map(_padded, (stop for _, stop in spans))) // SCRATCH_BLOCK
    tables = np.array(first[:-1], dtype=np.int32)[:, None] + np.arange(most, dtype=np.int32)
    index, place, on_device, blocks = upload(
        [*map(np.concatenate, (blocks_of, in_block)), work, tables], device
    )
    slots = place.add_(metadata.block_tables.flatten().index_select(0, index), alpha=size)
    wgmma = prefill_wgmma.suits(scratch.keys.dtype, scratch.keys.shape[4], SCRATCH_BLOCK)
    return ExpandedChunks(rows, slots, scratch, blocks, Tiles(on_device, shape, wgmma=wgmma))


def pieces_between(
    start: int,
    stop: int,
    block_n: int,
    programs: int,
    device: torch.device,
    most: int | None = None,
    *,
    exact: bool = False,
) -> Pieces:
    """Cuts the contexts of queries at positions [start, stop) for so many programs at once. `most`: a query
    attends to at most so many positions, which it chose. `exact`: into segments."""
    contexts = np.arange(start + 1, stop + 1, dtype=np.int32)
    if most is not None:
        contexts = np.minimum(contexts, np.int32(most))
    tiles = -(-int(contexts[-1]) * len(contexts) // (block_n * max(programs, len(contexts))))
    length = np.full_like(contexts, SEGMENT.value if exact else max(1, tiles) * block_n)
    while exact and (contexts > length * SEGMENTS.value).any():  # as `segment_of`
        length = np.where(contexts > length * SEGMENTS.value, length * 2, length)
    counts = -(-contexts // length)
    first = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    rows = np.repeat(np.arange(len(contexts), dtype=np.int32), counts)
    begins = (np.arange(first[-1], dtype=np.int32) - first[rows]) * length[rows]
    work = np.stack((rows, begins, np.minimum(begins + length[rows], contexts[rows])), axis=1)
    on_device = upload([work, first], device)
    single = len(work) == len(contexts)
    return Pieces(
        on_device[0], on_device[1], on_device[0], single=single
    )  # no program counts what is finished
