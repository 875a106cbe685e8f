"""Cuts contexts into pieces for the programs of a step, and puts the results of the pieces together.

`_partition` cuts the contexts of a batch into at most `pieces` pieces of equal length. It takes the shortest
length that allows this. The result of a piece is attention over its keys alone, and the logarithm to base 2
of its softmax sum, lse(i). Those of a request give, in their order:

    out = Σ 2^(lse(i) − max) · out(i) / Σ 2^(lse(i) − max)
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.attention.online_softmax import EXACT_N, LEAST, first_seen, segment_of, span_options
from baton.engine.kernels.attention.tiles import TILE_FIELDS
from baton.engine.kernels.launch import inputs_ready, launch_options, next_may_begin
from baton.engine.model_config import Span

# Measured on an H200.
PIECES_PER_SM = 4  # programs for each multiprocessor, if the requests alone give fewer
BLOCK_N = 32  # keys of a tile; pieces are cut at multiples of it
PARTITION_PIECES = 32  # pieces that one program of `_partition` assigns
COMBINED = 32  # results of pieces that a program of `_combine` takes at once, at most
TILE_HEADS, TILE_PIECES = 8, 2  # heads of a program of `_combine_tiles`, and the pieces that it takes at once
COMBINED_OF_WARP = 512  # numbers of such a result for each warp
MOST_HEAD = 256  # a program has more warps for larger heads
FIELDS = 3  # of the work of a piece
EXACT_FIELDS = tl.constexpr(6)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The work of each program in one decode step, the same for all layers with the same span."""

    work: Tensor  # [pieces, 3] int32: request, first position, last position + 1; request −1: no work
    first: Tensor
    """[requests + 1] int32: request i has the pieces [first[i], first[i + 1])."""
    finished: Tensor  # [requests, KV heads] int32: pieces that are finished; 0 between layers
    sharing: "Sharing | None" = None  # None: each request has pieces of its own
    single: bool = False  # the host knows that each request has one piece


class Sharing(NamedTuple):
    """Requests with successive places are queries of one request, and share the pieces of the first of them.
    These go up to the context of the last one. The others have none."""

    queries: int  # at most so many
    places: Tensor  # [requests] int32, as in `AttentionMetadata`
    contexts: Tensor  # [requests] int32


def most_pieces(requests: int, num_kv_heads: int, multiprocessors: int) -> int:
    return requests + -(-PIECES_PER_SM * multiprocessors // num_kv_heads)


def partition(
    contexts: Tensor,
    num_kv_heads: int,
    pieces: int,
    span: Span | None = None,
    *,
    block_n: int = BLOCK_N,
    exact: bool = False,
    segments: bool = False,
    sharing: Sharing | None = None,
) -> Pieces:
    """Cuts contexts [requests] int32 into up to so many pieces, at multiples of `block_n`, from the first
    position in the span on.

    `exact`: pieces are whole segments (`online_softmax`). Their work has three more fields: the number of
    pieces of the request, the positions of a segment, and the piece's first segment, counted from the first
    one of the request. `first` counts the segments of the requests that have several pieces.

    `segments`: each piece is one segment. There are SEGMENTS pieces or more for each request."""
    requests = len(contexts)
    new = contexts.new_empty
    fields = EXACT_FIELDS.value if exact else FIELDS
    work, first, finished = new(pieces, fields), new(requests + 1), new(requests, num_kv_heads)
    result = Pieces(work, first, finished, sharing)
    _partition[(triton.cdiv(pieces, PARTITION_PIECES),)](
        contexts,
        contexts if sharing is None else sharing.places,
        result.work,
        result.first,
        result.finished,
        requests,
        pieces,
        KV_HEADS=num_kv_heads,
        BLOCK_N=EXACT_N if exact or segments else block_n,
        FIELDS=fields,
        EXACT=exact or segments,
        QUERIES=1 if sharing is None else sharing.queries,
        REQUESTS=max(16, triton.next_power_of_2(requests)),
        PIECES=PARTITION_PIECES,
        **span_options(span),
        num_warps=4,
    )
    return result


def combine(
    partial: Tensor,
    lse: Tensor,
    pieces: Pieces,
    out: Tensor,
    *,
    early: bool = False,
    at_once: int = COMBINED,
) -> None:
    """Writes out [requests, heads, size], for requests of several pieces. partial [pieces, queries, heads,
    size] and lse [pieces, queries, heads] float32 have their results. `early`: as in `next_may_begin`.
    `at_once`: results that a program takes at once, a power of two. They decide the order of the sums."""
    if pieces.single:
        return
    requests, heads, size = out.shape
    sharing = pieces.sharing
    _combine[(requests, heads)](
        partial,
        lse,
        pieces.first,
        pieces.first if sharing is None else sharing.places,
        out,
        out.stride(0),
        QUERIES=1 if sharing is None else sharing.queries,
        HEADS=heads,
        HEAD_DIM=size,
        COMBINED=at_once,
        EARLY=early,
        num_warps=1 if size <= MOST_HEAD else 8,
        **launch_options(),
    )


def combine_tiles(partial: Tensor, lse: Tensor, work: Tensor, out: Tensor) -> None:
    """Writes to out [rows, heads, size], for tiles of several pieces. work: as `tile_work` gives it. partial
    [places, tokens, heads, size] and lse [places, tokens, heads] float32 have the results of the pieces."""
    places, tokens, heads, size = partial.shape
    tiles = min(len(work), places // 2)  # each of them has two places or more
    at_once = min(TILE_HEADS, triton.next_power_of_2(heads))
    _combine_tiles[(tiles, tokens, triton.cdiv(heads, at_once))](
        partial,
        lse,
        work,
        out,
        out.stride(0),
        TOKENS=tokens,
        HEADS=heads,
        HEAD_DIM=size,
        AT_ONCE=at_once,
        COMBINED=TILE_PIECES,
        FIELDS=TILE_FIELDS,
        num_warps=max(1, at_once * size // COMBINED_OF_WARP),
        **launch_options(),
    )


@triton.jit
def _combine_tiles(
    partial,
    lse,
    work,
    out,
    out_stride,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COMBINED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    tile, token = work + tl.program_id(0) * FIELDS + 10, tl.program_id(1)
    row, tokens, first, pieces = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    inputs_ready()
    if token < tokens:
        heads = tl.program_id(2) * AT_ONCE + tl.arange(0, AT_ONCE)
        to_row = out + (row + token).to(tl.int64) * out_stride
        of_query(
            partial,
            lse,
            to_row,
            first,
            pieces,
            token,
            heads,
            heads < HEADS,
            TOKENS,
            HEADS,
            HEAD_DIM,
            COMBINED,
        )


@triton.jit
def queries_from(places, row, rows, QUERIES: tl.constexpr):
    """How many requests from this one on share its pieces. 0: it shares those of one before it."""
    place = tl.load(places + row, mask=row < rows, other=0)
    count = (place % QUERIES == 0).to(tl.int32)
    for j in tl.static_range(1, QUERIES):
        other = tl.load(places + row + j, mask=row + j < rows, other=0)
        count += ((count > 0) & (other == place + j)).to(tl.int32)
    return count


@triton.jit(do_not_specialize=["requests", "pieces"])
def _partition(
    contexts,
    places,
    work,
    first,
    finished,
    requests,
    pieces,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
    EXACT: tl.constexpr,
    QUERIES: tl.constexpr,
    REQUESTS: tl.constexpr,
    PIECES: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    requests_of = tl.arange(0, REQUESTS)
    context = tl.load(contexts + requests_of, mask=requests_of < requests, other=0)
    shared = queries_from(places, requests_of, requests, QUERIES) if QUERIES > 1 else context * 0 + 1
    context += tl.maximum(shared - 1, 0)
    unit = segment_of(context) if EXACT else context * 0 + BLOCK_N
    units = tl.cdiv(context, unit) - first_seen(context - 1, SPAN, CHUNKED) // unit
    units = tl.where((requests_of < requests) & (shared > 0), tl.maximum(units, 1), 0)
    # Bisection for the shortest length, in tiles, that gives at most `pieces` pieces.
    low = 1
    high = tl.maximum(tl.max(units * (unit // BLOCK_N), axis=0), 1)
    while low < high:
        middle = (low + high) // 2
        if tl.sum(tl.cdiv(units, tl.cdiv(middle * BLOCK_N, unit)), axis=0) <= pieces:
            high = middle
        else:
            low = middle + 1
    count = tl.cdiv(units, tl.cdiv(high * BLOCK_N, unit))
    ends = tl.cumsum(count, axis=0)

    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    past = ends[None, :] <= piece[:, None]  # [pieces, requests]: all pieces of the request come before it
    request = tl.sum(past.to(tl.int32), axis=1)
    before = tl.sum(tl.where(past, count[None, :], 0), axis=1)
    taken = request < REQUESTS
    last = tl.load(contexts + request, mask=taken & (request < requests), other=0)
    if QUERIES > 1:
        last += tl.maximum(queries_from(places, request, requests, QUERIES) - 1, 0)
    seen = first_seen(last - 1, SPAN, CHUNKED)
    unit = segment_of(last) if EXACT else BLOCK_N
    length = tl.cdiv(high * BLOCK_N, unit) * unit
    start = seen // unit * unit + (piece - before) * length
    stop = tl.minimum(start + length, last)
    start = tl.minimum(tl.maximum(start, seen), last)
    inside = piece < pieces
    tl.store(work + piece * FIELDS, tl.where(taken, request, -1), mask=inside)
    tl.store(work + piece * FIELDS + 1, start, mask=inside)
    tl.store(work + piece * FIELDS + 2, stop, mask=inside)
    if FIELDS == EXACT_FIELDS:
        of_request = tl.maximum(tl.cdiv(tl.cdiv(last, unit) - seen // unit, length // unit), 1)
        tl.store(work + piece * FIELDS + 3, of_request, mask=inside)
        tl.store(work + piece * FIELDS + 4, unit, mask=inside)
        tl.store(work + piece * FIELDS + 5, (piece - before) * (length // unit), mask=inside)
        count = tl.where(count > 1, units, 0)
        ends = tl.cumsum(count, axis=0)
    if tl.program_id(0) == 0:
        tl.store(first + requests_of, ends - count, mask=requests_of < requests)
        tl.store(first + requests, tl.sum(count, axis=0))
        for head in tl.static_range(KV_HEADS):
            tl.store(finished + requests_of * KV_HEADS + head, 0, mask=requests_of < requests)


@triton.jit
def _combine(
    partial,
    lse,
    first,
    places,
    out,
    out_stride,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        next_may_begin()
    request = tl.program_id(0)
    query = tl.load(places + request) % QUERIES if QUERIES > 1 else 0
    begin = tl.load(first + request - query)
    pieces = tl.load(first + request - query + 1) - begin
    inputs_ready()
    if pieces > 1:
        head = tl.program_id(1) + tl.arange(0, 1)
        to_row = out + request.to(tl.int64) * out_stride
        of_query(
            partial, lse, to_row, begin, pieces, query, head, head < HEADS, QUERIES, HEADS, HEAD_DIM, COMBINED
        )


@triton.jit
def of_query(
    partial,
    lse,
    to_row,
    first,
    pieces,
    query,
    heads,
    used,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """As `add_up`, for a query of those that share pieces."""
    heads += query * HEADS  # of all queries, one after the other
    to_row -= query * HEADS * HEAD_DIM
    add_up(partial, lse, to_row, first, pieces, heads, used, QUERIES * HEADS, HEAD_DIM, COMBINED)


@triton.jit
def add_up(
    partial,
    lse,
    to_row,
    first,
    pieces,
    heads,
    used,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Writes the `heads` of a request that are `used`, from its pieces, COMBINED of them at a time."""
    dims = tl.arange(0, HEAD_DIM)
    m = tl.full(heads.shape, float("-inf"), tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    acc = tl.zeros([heads.shape[0], HEAD_DIM], tl.float32)
    for start in tl.range(first, first + pieces, COMBINED):
        piece = start + tl.arange(0, COMBINED)
        inside = (piece < first + pieces)[:, None] & used[None, :]
        at = piece.to(tl.int64)[:, None] * HEADS + heads[None, :]
        weight = tl.load(lse + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        of_heads = partial + at[:, :, None] * HEAD_DIM + dims[None, None, :]
        values = tl.load(of_heads, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        new_m = tl.maximum(tl.maximum(m, tl.max(weight, axis=0)), LEAST)
        weight = tl.exp2(weight - new_m[None, :])
        shrink = tl.exp2(m - new_m)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * values, axis=0)
        m = new_m
    to = to_row + heads[:, None] * HEAD_DIM + dims[None, :]
    result = acc / tl.maximum(total, 1e-30)[:, None]  # 0: a head that is not used
    tl.store(to, result.to(to_row.dtype.element_ty), mask=used[:, None])
