"""The products of all experts in one launch: row p of the result is x[row of p] · W[expert of p]ᵀ.

    gather        x has a row for each token: the pairs of a token read the same row
    bias          each row of the result gets the bias of its expert
    weighted      each row of the result is multiplied by the weight of its pair
    scatter-add   the result has a row for each token: each pair adds its row

A program computes a tile: BLOCK_M pairs of one expert by BLOCK_N rows of that expert's W. It finds its expert
from the counts, which only the device knows. The grid has as many programs as any counts can need, so that a
CUDA graph can replay it; those without a tile end at once. No pair is padding.

In a scatter-add, up to `chosen` terms meet in one element. They are added in float32 by atomic operations, in
an order that depends on timing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import FP8, FP8_GROUP, Fp8Experts, Quantized, overlap
from engine.kernels.overlap import inputs_ready
from engine.kernels.shuffle import Shuffled


class Tiling(NamedTuple):
    block_m: int  # pairs
    block_n: int  # rows of W
    block_k: int  # columns of W at a time
    warps: int
    stages: int


# Not measured yet.
FEW = Tiling(16, 64, 128, 4, 4)
MANY = Tiling(64, 128, 64, 4, 3)
FLOAT32 = Tiling(16, 64, 64, 4, 3)
FEW_FP8 = Tiling(16, 64, FP8_GROUP, 4, 6)
MANY_FP8 = Tiling(64, 128, FP8_GROUP, 4, 4)
MANY_FROM = 32  # pairs of an expert, on average


def tiling(pairs: int, experts: int, dtype: torch.dtype) -> Tiling:
    if dtype is torch.float32:
        return FLOAT32
    many = pairs >= MANY_FROM * experts
    if dtype is FP8:
        return MANY_FP8 if many else FEW_FP8
    return MANY if many else FEW


def grouped_linear(
    x: Tensor | Quantized,
    weight: Tensor | Fp8Experts,
    shuffled: Shuffled,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    weighted: bool,
    scatter_add: bool = False,
    partial: bool = False,
) -> Tensor:
    """The products for weight [experts, out, in]. bias [experts, out] is added before the weights apply.

    x [tokens, in] or [pairs, in], quantised if the weight is in FP8. Returns [pairs, out] of `dtype`; with
    `scatter_add`, the sum of each token's rows, [tokens, out], in float32 if there are several. A pair in no
    list of `shuffled` adds nothing to the sum; its row is zero if `partial`, else undefined."""
    x, x_scales = x if isinstance(x, Quantized) else (x, None)
    weight, weight_scales = weight if isinstance(weight, Fp8Experts) else (weight, None)
    assert x.is_contiguous(), "the kernel assumes dense rows"
    assert weight.is_contiguous(), "the kernel assumes dense rows"
    (tokens, chosen), (experts, size, inner) = shuffled.weights.shape, weight.shape
    pairs = tokens * chosen
    shape = tiling(pairs, experts, x.dtype)
    scatter_add = scatter_add and chosen > 1  # else a pair is a token
    if scatter_add:
        out = torch.zeros(tokens, size, dtype=torch.float32, device=x.device)
    else:
        make = torch.zeros if partial else torch.empty
        out = make(pairs, size, dtype=dtype, device=x.device)
    # Each expert may have a tile that is partly empty.
    most_tiles = pairs // shape.block_m + min(pairs, experts)
    _grouped_linear[(most_tiles, triton.cdiv(size, shape.block_n))](
        x,
        x_scales,
        weight,
        weight_scales,
        bias,
        *shuffled,
        out,
        tokens,
        experts,
        size,
        inner,
        GROUPED=weight_scales is not None and weight_scales.shape[1] > 1,
        CHOSEN=chosen,
        GATHER=len(x) == tokens,
        WEIGHTED=weighted,
        SCATTER_ADD=scatter_add,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **overlap.options(),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _grouped_linear(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    pair_weights,
    counts,
    pairs,
    out,
    tokens,
    experts,
    size,
    inner,
    GROUPED: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCATTER_ADD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    inputs_ready(OVERLAP)
    tile = tl.program_id(0)
    of_expert = tl.arange(0, EXPERTS)
    tiles = (tl.load(counts + of_expert, mask=of_expert < experts, other=0) + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles, axis=0) <= tile  # experts with all their tiles before this one
    expert = tl.sum(before.to(tl.int32), axis=0)
    if expert < experts:
        first = (tile - tl.sum(tl.where(before, tiles, 0), axis=0)) * BLOCK_M
        place = first + tl.arange(0, BLOCK_M)
        real = place < tl.load(counts + expert)
        index = expert.to(tl.int64)
        pair = tl.load(pairs + index * tokens + place, mask=real, other=0).to(tl.int64)
        row = pair // CHOSEN if GATHER else pair
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        used = column < size
        k = tl.arange(0, BLOCK_K)
        x_at = x + row[:, None] * inner + k[None, :]
        w_at = weight + (index * size + column)[None, :] * inner + k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, inner, BLOCK_K):
            inside = k < inner - start
            a = tl.load(x_at + start, mask=real[:, None] & inside[None, :], other=0.0)
            b = tl.load(w_at + start, mask=used[None, :] & inside[:, None], other=0.0)
            if GROUPED:
                group, groups = start // BLOCK_K, tl.cdiv(inner, BLOCK_K)
                of_x = tl.load(x_scales + row * groups + group, mask=real, other=0.0)
                of_w = tl.load(weight_scales + (index * groups + group) * size + column, mask=used, other=0.0)
                acc += tl.dot(a, b) * (of_x[:, None] * of_w[None, :])
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee")
        if weight_scales is not None and not GROUPED:
            of_x = tl.load(x_scales + row, mask=real, other=0.0)
            of_w = tl.load(weight_scales + index * size + column, mask=used, other=0.0)
            acc *= of_x[:, None] * of_w[None, :]
        mask = real[:, None] & used[None, :]
        if bias is not None:
            acc += tl.load(bias + index * size + column, mask=used, other=0.0).to(tl.float32)[None, :]
        if WEIGHTED:
            acc *= tl.load(pair_weights + pair, mask=real, other=0.0)[:, None]
        if SCATTER_ADD:
            to = out + (pair // CHOSEN)[:, None] * size + column[None, :]
            tl.atomic_add(to, acc, mask=mask, sem="relaxed")
        else:
            to = out + pair[:, None] * size + column[None, :]
            tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
