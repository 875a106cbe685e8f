"""Sum over ranks, residual add and RMSNorm in one kernel, which writes to the memory of the other ranks.

    residual ← residual + the sum of delta over all ranks
    out      = residual / sqrt(mean(residual²) + eps) · weight

One program per row. Programs of the same row meet, and no others:

    write the row of delta to an inbox on every other rank ─▶ count there, after the write
    ─▶ wait until every other rank has counted here ─▶ sum in the order of the ranks, add, norm

The all-reduce alone would read and write the row once more, and take two meetings and a launch more. Writing
to a peer needs no round trip; reading from it would. The idea of one exchange with few bytes is that of
TensorRT-LLM's one-shot all-reduce, which is fused with the norm as well.

A row has two inboxes for each source, used in turn. So a rank writes to an inbox again two calls later. In
the call between, it has met all other ranks, and these have read the inbox before. So no row is overwritten
before it is read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.peer_copy import PeerMemory

MAX_ROWS = 8192
"""Rows of one launch."""
MAX_WARPS = 8
ELEMENTS_PER_WARP = 512  # 16 per thread: two or four 16-byte stores


class SumNorm(PeerMemory):
    """The end of one rank. Its calls need the same shapes, in the same order, on all ranks."""

    counted = MAX_ROWS

    def __call__(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual` [rows, size] is equal on all ranks, and so is the result. `delta` is only read."""
        size = residual.shape[1]
        assert residual.is_contiguous(), "the kernel assumes dense rows"
        assert delta.shape == residual.shape, "the kernel adds element by element"
        assert delta.is_contiguous(), "the kernel assumes dense rows"
        capacity = min(MAX_ROWS, self._inboxes_bytes // (2 * (self._ranks - 1) * size * delta.element_size()))
        assert capacity, "the memory of a rank is smaller than a row"
        out = torch.empty_like(residual)
        block = triton.next_power_of_2(size)
        for rows in range(0, len(residual), capacity):
            part = slice(rows, rows + capacity)
            _sum_norm[(len(residual[part]),)](
                self._addresses,
                delta[part],
                residual[part],
                weight,
                out[part],
                capacity,
                size,
                eps,
                self._counts_bytes,
                RANK=self._rank,
                RANKS=self._ranks,
                BLOCK=block,
                num_warps=min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP)),
                **launch_options(),
            )
        return out


@triton.jit
def _sum_norm(
    addresses,
    delta,
    residual,
    weight,
    out,
    capacity,  # rows of an inbox
    size,
    eps,
    counts_bytes,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inputs_ready()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = row * size + columns
    rank_delta = tl.load(delta + at, mask=inside, other=0.0)
    memory = tl.load(addresses + RANK)
    counts = memory.to(tl.pointer_type(tl.int64)) + row * RANKS
    call = tl.load(counts + RANK)  # number of this row's calls before
    turn = (call & 1) * (RANKS - 1)
    for step in tl.static_range(1, RANKS):
        peer = tl.load(addresses + (RANK + step) % RANKS)
        # Inbox i of a rank is for the rank i + 1 after it.
        inbox = (peer + counts_bytes).to(tl.pointer_type(delta.dtype.element_ty))
        number = turn + RANKS - 1 - step
        tl.store(inbox + (number * capacity + row) * size + columns, rank_delta, mask=inside)
    tl.debug_barrier()  # all threads have written before one of them counts
    for step in tl.static_range(1, RANKS):
        peer = tl.load(addresses + (RANK + step) % RANKS).to(tl.pointer_type(tl.int64))
        tl.atomic_add(peer + row * RANKS + RANK, 1, sem="release", scope="sys")
    x = tl.load(residual + at, mask=inside, other=0.0)
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    for step in tl.static_range(1, RANKS):
        count = counts + (RANK + step) % RANKS
        while tl.atomic_add(count, 0, sem="acquire", scope="sys") <= call:
            pass
    tl.debug_barrier()  # one thread has seen the counts before all of them read
    tl.store(counts + RANK, call + 1)
    inboxes = (memory + counts_bytes).to(tl.pointer_type(delta.dtype.element_ty))
    total = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += rank_delta.to(tl.float32)
        else:
            number = turn + (source - RANK - 1 + RANKS) % RANKS
            term = tl.load(inboxes + (number * capacity + row) * size + columns, mask=inside, other=0.0)
            total += term.to(tl.float32)
    x = (x.to(tl.float32) + total).to(x.dtype)
    tl.store(residual + at, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(out + at, (x * scale * scales).to(out.dtype.element_ty), mask=inside)
