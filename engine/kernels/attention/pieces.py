"""Cuts contexts into pieces for the programs of a step, and puts the results of the pieces together.

`_partition` cuts the contexts of a batch into at most `pieces` pieces of equal length. It takes the shortest
length that allows this. The result of a piece is attention over its keys alone, and the logarithm to base 2
of its softmax sum, lse(i). Those of a request give, in their order:

    out = Σ 2^(lse(i) − max) · out(i) / Σ 2^(lse(i) − max)

Requests of a group begin with the same blocks (`Prefixes`). Their common positions have pieces of their own,
which read them once for several requests (Hydragen, Juravsky 2024; ChunkAttention, Ye 2024; the cascades of
FlashInfer and vLLM). A request then puts together its own pieces and those of its group.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.attention.online_softmax import EXACT_N, LEAST, first_seen, segment_of, span_options
from baton.engine.kernels.launch import inputs_ready, launch_options, next_may_begin
from baton.engine.model_config import Span

# Measured on an H200.
PIECES_PER_SM = 4  # programs for each multiprocessor, if the requests alone give fewer
BLOCK_N = 32  # keys of a tile; pieces are cut at multiples of it
PARTITION_PIECES = 32  # pieces that one program of `_partition` assigns
COMBINED = 32  # results of pieces that a program of `_combine` takes at once, at most
MOST_HEAD = 256  # a program has more warps for larger heads
FIELDS = 3  # of the work of a piece
EXACT_FIELDS = tl.constexpr(6)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The work of each program in one decode step, the same for all layers with the same span."""

    work: Tensor  # [pieces, 3] int32: request, first position, last position + 1; request −1: no work
    first: Tensor
    """[requests + 1] int32: request i has the pieces [first[i], first[i + 1]). With `prefixes` it has
    [2 · requests + 1], and the pieces of the positions that request i reads for its group are those of
    request requests + i, also in `work`."""
    finished: Tensor  # [requests, KV heads] int32: pieces that are finished; 0 between layers
    sharing: "Sharing | None" = None  # None: each request has pieces of its own
    prefixes: "Prefixes | None" = None  # None: no positions are read for several requests
    single: bool = False  # the host knows that each request has one piece


class Sharing(NamedTuple):
    """Requests with successive places are queries of one request, and share the pieces of the first of them.
    These go up to the context of the last one. The others have none."""

    queries: int  # at most so many
    places: Tensor  # [requests] int32, as in `AttentionMetadata`
    contexts: Tensor  # [requests] int32


class Prefixes(NamedTuple):
    """Groups of requests that begin with the same blocks. The requests of a group follow each other, and up
    to `members` of them read the common positions together. The first of these has the pieces. A request
    that would read them alone reads all of its context in pieces of its own."""

    members: int
    """A power of two, at least 2."""
    places: Tensor
    """[requests] int32: 0 for the first request of a group, and 1, 2, … for those after it. 0: it is in no
    group."""
    stops: Tensor
    """[requests] int32: the common positions, for all requests of a group the same: whole blocks, and at most
    the context of each."""


def most_pieces(requests: int, num_kv_heads: int, multiprocessors: int, *, prefixes: bool = False) -> int:
    """`prefixes`: also for what groups read together. That is one more piece for two requests, at least."""
    more = -(-PIECES_PER_SM * multiprocessors // num_kv_heads)
    return requests + (max(more, requests // 2) if prefixes else more)


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
    prefixes: Prefixes | None = None,
) -> Pieces:
    """Cuts contexts [requests] int32 into up to so many pieces, at multiples of `block_n`, from the first
    position in the span on.

    `exact`: pieces are whole segments (`online_softmax`). Their work has three more fields: the number of
    pieces of the request, the positions of a segment, and the piece's first segment, counted from the first
    one of the request. `first` counts the segments of the requests that have several pieces.

    `segments`: each piece is one segment. There are SEGMENTS pieces or more for each request.

    `prefixes`: without a span, and neither `exact` nor `segments` nor `sharing`."""
    assert prefixes is None or not (span or exact or segments or sharing), "groups read plain contexts"
    requests = len(contexts)
    ranges = requests if prefixes is None else 2 * requests
    new = contexts.new_empty
    fields = EXACT_FIELDS.value if exact else FIELDS
    work, first, finished = new(pieces, fields), new(ranges + 1), new(requests, num_kv_heads)
    result = Pieces(work, first, finished, sharing, prefixes)
    grouped = sharing or prefixes
    _partition[(triton.cdiv(pieces, PARTITION_PIECES),)](
        contexts,
        contexts if grouped is None else grouped.places,
        contexts if prefixes is None else prefixes.stops,
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
        MEMBERS=1 if prefixes is None else prefixes.members,
        RANGES=max(16, triton.next_power_of_2(ranges)),
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
    """Writes out [requests, heads, size], for requests of several pieces. partial [pieces, results, heads,
    size] and lse [pieces, results, heads] float32 have their results, one for each query that a piece may
    have. `early`: as in `next_may_begin`.
    `at_once`: results that a program takes at once, a power of two. They decide the order of the sums."""
    if pieces.single:
        return
    requests, heads, size = out.shape
    grouped = pieces.sharing or pieces.prefixes
    _combine[(requests, heads)](
        partial,
        lse,
        pieces.first,
        pieces.first if grouped is None else grouped.places,
        out,
        out.stride(0),
        requests,
        QUERIES=1 if pieces.sharing is None else pieces.sharing.queries,
        MEMBERS=1 if pieces.prefixes is None else pieces.prefixes.members,
        HEADS=heads,
        HEAD_DIM=size,
        COMBINED=at_once,
        EARLY=early,
        num_warps=1 if size <= MOST_HEAD else 8,
        **launch_options(),
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


@triton.jit
def _common(places, stops, row, rows, MEMBERS: tl.constexpr):
    """How many positions a request reads together with others. 0: none."""
    place = tl.load(places + row, mask=row < rows, other=0)
    after = tl.load(places + row + 1, mask=row + 1 < rows, other=0)
    stop = tl.load(stops + row, mask=row < rows, other=0)
    return tl.where((place % MEMBERS > 0) | (after == place + 1), stop, 0), place


@triton.jit
def _range(
    contexts,
    places,
    stops,
    number,
    requests,
    QUERIES: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """The range of positions with this number, of which `Pieces.first` has the pieces: the first position,
    the last one + 1, and whether there is the range."""
    request = number
    if MEMBERS > 1:
        request = tl.where(number < requests, number, number - requests)
    there = request < requests
    last = tl.load(contexts + request, mask=there, other=0)
    if MEMBERS > 1:
        common, place = _common(places, stops, request, requests, MEMBERS)
        first = tl.where(number < requests, common, 0)
        last = tl.where(number < requests, last, common)
        there &= (number < requests) | ((common > 0) & (place % MEMBERS == 0))
    else:
        if QUERIES > 1:
            shared = queries_from(places, request, requests, QUERIES)
            last += tl.maximum(shared - 1, 0)
            there &= shared > 0
        first = first_seen(last - 1, SPAN, CHUNKED)
    return first, last, there


@triton.jit(do_not_specialize=["requests", "pieces"])
def _partition(
    contexts,
    places,
    stops,
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
    MEMBERS: tl.constexpr,
    RANGES: tl.constexpr,
    PIECES: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    ranges = requests if MEMBERS == 1 else 2 * requests
    numbers = tl.arange(0, RANGES)
    seen, last, there = _range(contexts, places, stops, numbers, requests, QUERIES, MEMBERS, SPAN, CHUNKED)
    unit = segment_of(last) if EXACT else last * 0 + BLOCK_N
    units = tl.where(there, tl.maximum(tl.cdiv(last, unit) - seen // unit, 1), 0)
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

    own = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    past = ends[None, :] <= own[:, None]  # [pieces, ranges]: all pieces of the range come before this one
    number = tl.sum(past.to(tl.int32), axis=1)
    before = tl.sum(tl.where(past, count[None, :], 0), axis=1)
    taken = number < RANGES
    seen, last, there = _range(contexts, places, stops, number, requests, QUERIES, MEMBERS, SPAN, CHUNKED)
    unit = segment_of(last) if EXACT else BLOCK_N
    length = tl.cdiv(high * BLOCK_N, unit) * unit
    start = seen // unit * unit + (own - before) * length
    stop = tl.minimum(start + length, last)
    start = tl.minimum(tl.maximum(start, seen), last)
    inside = own < pieces
    tl.store(work + own * FIELDS, tl.where(taken, number, -1), mask=inside)
    tl.store(work + own * FIELDS + 1, start, mask=inside)
    tl.store(work + own * FIELDS + 2, stop, mask=inside)
    if FIELDS == EXACT_FIELDS:
        of_request = tl.maximum(tl.cdiv(tl.cdiv(last, unit) - seen // unit, length // unit), 1)
        tl.store(work + own * FIELDS + 3, of_request, mask=inside)
        tl.store(work + own * FIELDS + 4, unit, mask=inside)
        tl.store(work + own * FIELDS + 5, (own - before) * (length // unit), mask=inside)
        count = tl.where(count > 1, units, 0)
        ends = tl.cumsum(count, axis=0)
    if tl.program_id(0) == 0:
        tl.store(first + numbers, ends - count, mask=numbers < ranges)
        tl.store(first + ranges, tl.sum(count, axis=0))
        for head in tl.static_range(KV_HEADS):
            tl.store(finished + numbers * KV_HEADS + head, 0, mask=numbers < requests)


@triton.jit
def pieces_of(first, places, request, requests, QUERIES: tl.constexpr, MEMBERS: tl.constexpr):
    """The pieces that have results of a request: the first one of its own, how many there are, and its query
    in them; and the same of those that it shares with its group."""
    query, own = 0, request
    begin, count, member = 0, 0, 0
    if MEMBERS > 1:
        member = tl.load(places + request) % MEMBERS
        leads = requests + request - member
        begin = tl.load(first + leads)
        count = tl.load(first + leads + 1) - begin
    elif QUERIES > 1:
        query = tl.load(places + request) % QUERIES
        own = request - query
    own_begin = tl.load(first + own)
    return own_begin, tl.load(first + own + 1) - own_begin, query, begin, count, member


@triton.jit(do_not_specialize=["requests"])
def _combine(
    partial,
    lse,
    first,
    places,
    out,
    out_stride,
    requests,
    QUERIES: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        next_may_begin()
    request = tl.program_id(0)
    of_request = pieces_of(first, places, request, requests, QUERIES, MEMBERS)
    inputs_ready()
    if of_request[1] + of_request[4] > 1:
        head = tl.program_id(1) + tl.arange(0, 1)
        to_row = out + request.to(tl.int64) * out_stride
        RESULTS: tl.constexpr = MEMBERS if MEMBERS > 1 else QUERIES
        add_up(
            partial,
            lse,
            to_row,
            of_request,
            head,
            head < HEADS,
            RESULTS,
            MEMBERS > 1,
            HEADS,
            HEAD_DIM,
            COMBINED,
        )


@triton.jit
def add_up(
    partial,
    lse,
    to_row,
    of_request,
    heads,
    used,
    RESULTS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Writes the `heads` of a request that are `used`, from its pieces, COMBINED of them at a time.
    `of_request`: as `pieces_of` returns it. A piece has so many RESULTS. GROUPS: whether there are some."""
    own_begin, own_count, query, begin, count, member = of_request
    pieces = own_count + count if GROUPS else own_count
    dims = tl.arange(0, HEAD_DIM)
    m = tl.full(heads.shape, float("-inf"), tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    acc = tl.zeros([heads.shape[0], HEAD_DIM], tl.float32)
    for start in tl.range(0, pieces, COMBINED):
        own = start + tl.arange(0, COMBINED)
        there = (own < pieces)[:, None] & used[None, :]
        result = (own_begin + own).to(tl.int64) * RESULTS + query
        if GROUPS:
            of_group = (begin + own - own_count).to(tl.int64) * RESULTS + member
            result = tl.where(own < own_count, result, of_group)
        at = result[:, None] * HEADS + heads[None, :]
        weight = tl.load(lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        of_heads = partial + at[:, :, None] * HEAD_DIM + dims[None, None, :]
        values = tl.load(of_heads, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_m = tl.maximum(tl.maximum(m, tl.max(weight, axis=0)), LEAST)
        weight = tl.exp2(weight - new_m[None, :])
        shrink = tl.exp2(m - new_m)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * values, axis=0)
        m = new_m
    to = to_row + heads[:, None] * HEAD_DIM + dims[None, :]
    result = acc / tl.maximum(total, 1e-30)[:, None]  # 0: a head that is not used
    tl.store(to, result.to(to_row.dtype.element_ty), mask=used[:, None])
