"""The products of all experts in one launch: row p of the result is x[row of p] · W[expert of p]ᵀ.

    gather        x has a row for each token: the pairs of a token read the same row
    bias          each row of the result gets the bias of its expert
    weighted      each row of the result is multiplied by the weight of its pair
    gated         W has gate and up rows. A program computes the same rows of both, and stores silu(gate) * up
    four bits     W is `FourBits`: never gated, and always the large side

A program computes a tile: BLOCK_M pairs of one expert by BLOCK_N rows of that expert's W. It finds its expert
from the counts, which only the device knows. The grid has as many programs as any counts can need, so that a
CUDA graph can replay it; those without a tile end at once. No pair is padding.

With few pairs for each expert, the time goes into reading W. Then the rows of W are the large side of the
tensor core product (SWAPPED, yᵀ = W xᵀ), so few pairs waste little of it. With many pairs, programs that run
side by side share what they read: they compute a few tiles (GROUP), for all rows of W.

MetaShuffling (Meta 2025) adds the rows of a token in the epilogue, by atomic operations. Here
`engine.kernels.moe.combine` adds them, so that timing never changes a result.
"""

from bisect import bisect_right
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.engine.kernels import FP8, FP8_GROUP, FourBits, Fp8Experts, Quantized
from baton.engine.kernels.fp8 import group_scales, outer_scales, times_scales
from baton.engine.kernels.launch import inputs_ready, launch_options
from baton.engine.kernels.moe import grouped_wgmma
from baton.engine.kernels.moe.shuffle import Shuffled
from baton.engine.kernels.quantized.four_bits import add_block, of_planes, tiles
from baton.engine.kernels.silu import swiglu
from baton.engine.kernels.split_k import add_bias
from baton.engine.model_config import ClampedSwiGLU


class Tiling(NamedTuple):
    block_m: int  # pairs
    block_n: int  # rows of W
    block_k: int  # columns of W at a time
    warps: int
    stages: int  # loaded ahead
    swapped: bool
    group: int | None  # None: all tiles


# By the mean number of pairs of an expert. Measured on an H200 with the experts of Qwen3-30B-A3B.
LIMITS = (12, 64, 256)
FEW = Tiling(16, 128, 128, 4, 3, True, None)
SOME = Tiling(64, 128, 64, 4, 4, False, 8)
MANY = Tiling(128, 256, 64, 8, 4, False, 8)
MOST = MANY
# A gated program has two tiles of W at a time.
FEW_GATED = Tiling(16, 64, 128, 4, 3, True, None)
SOME_GATED = Tiling(64, 64, 64, 4, 4, False, 8)
MANY_GATED = Tiling(128, 128, 64, 8, 4, False, 8)
MOST_GATED = Tiling(128, 128, 64, 8, 3, False, 8)
FLOAT32 = Tiling(16, 64, 64, 4, 3, False, None)
# With so few programs that they end at different times, half as many rows each spread W more evenly.
FEW_PROGRAMS = 512
FEWEST = Tiling(16, 64, 128, 4, 4, True, None)
# FP8 with scales of rows: measured on an H200 with the experts of Qwen3-30B-A3B and Llama-4's sizes.
FEW_FP8 = Tiling(16, 128, 256, 4, 3, True, None)
SOME_FP8 = Tiling(32, 64, 128, 4, 3, True, None)
MANY_FP8 = Tiling(128, 256, 128, 8, 4, False, 8)
MOST_FP8 = Tiling(128, 128, 128, 4, 3, False, 8)
# FP8 with scales of groups of columns.
FEW_GROUPS = Tiling(16, 128, FP8_GROUP, 4, 3, True, None)
SOME_GROUPS = Tiling(32, 128, FP8_GROUP, 4, 3, True, None)
MANY_GROUPS = Tiling(64, 128, FP8_GROUP, 4, 4, False, 8)
# Four bits, with limits of their own: BLOCK_K is words. Measured with these experts, and with gpt-oss's.
LIMITS_BITS = (12, 32, 200)
FEW_BITS = Tiling(16, 128, 32, 4, 4, True, None)
SOME_BITS = Tiling(32, 128, 32, 4, 4, True, 8)
MANY_BITS = Tiling(64, 128, 32, 4, 3, True, 8)
MOST_BITS = Tiling(128, 128, 32, 8, 3, True, 8)


def tiling(mean: float, dtype: torch.dtype, *, gated: bool, grouped: bool, bits: bool) -> Tiling:
    """The tiling for `mean` pairs of an expert. grouped: W has scales of groups of columns. bits: it has four
    bits."""
    if bits:
        return (FEW_BITS, SOME_BITS, MANY_BITS, MOST_BITS)[bisect_right(LIMITS_BITS, mean)]
    if dtype is torch.float32:
        return FLOAT32
    if grouped:
        tilings = (FEW_GROUPS, SOME_GROUPS, MANY_GROUPS, MANY_GROUPS)
    elif dtype is FP8:
        tilings = (FEW_FP8, SOME_FP8, MANY_FP8, MOST_FP8)
    elif gated:
        tilings = (FEW_GATED, SOME_GATED, MANY_GATED, MOST_GATED)
    else:
        tilings = (FEW, SOME, MANY, MOST)
    return tilings[bisect_right(LIMITS, mean)]


def grouped_linear(
    x: Tensor | Quantized,
    weight: Tensor | Fp8Experts | FourBits,
    shuffled: Shuffled,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    weighted: bool,
    gated: bool = False,
    clamped: ClampedSwiGLU | None = None,
    routed: bool = False,
) -> Tensor:
    """The products for weight [experts, out, in]. bias [experts, out] is added before the weights apply.

    x [tokens, in] or [pairs, in], quantized if the weight is in FP8. Returns [pairs, out] of `dtype`; if
    `gated`, which `FourBits` are not, `activate` of that, [pairs, out / 2]. The row of a pair in no list of
    `shuffled` is undefined. `routed`: a kernel that read `shuffled` was launched since."""
    x, x_scales = x if isinstance(x, Quantized) else (x, None)
    bits = weight if isinstance(weight, FourBits) else None
    weight, weight_scales = weight[:2] if isinstance(weight, Fp8Experts | FourBits) else (weight, None)
    assert not gated or weight_scales is None, "the kernels multiply only gate by scales"
    assert x.is_contiguous(), "the kernel assumes dense rows"
    assert weight.is_contiguous(), "the kernel assumes dense rows"
    (tokens, chosen), (experts, size, inner) = shuffled.weights.shape, weight.shape
    inner = bits.inner if bits else inner
    pairs = tokens * chosen
    grouped = blocks = False
    if bits is None and weight_scales is not None:
        grouped, blocks = weight_scales.shape[1] > 1, weight_scales.shape[2] < size
    shape = tiling(pairs / shuffled.among, x.dtype, gated=gated, grouped=grouped, bits=bits is not None)
    if bits:
        shape = shape._replace(block_k=min(shape.block_k, bits.block))
    columns = size // 2 if gated else size
    out = torch.empty(pairs, columns, dtype=dtype, device=x.device)
    if (
        (bits, bias, clamped, grouped, weighted) == (None, None, None, False, False)
        and pairs >= LIMITS[1] * shuffled.among  # as of MANY, so these have no kernel for one number of pairs
        and grouped_wgmma.suits(x.dtype, inner)
    ):
        grouped_wgmma.multiply(x, x_scales, weight, weight_scales, shuffled, out, gated=gated)
        return out
    # Each expert may have a tile that is partly empty.
    most_tiles = pairs // shape.block_m + min(pairs, experts)
    if shape is FEW and most_tiles * columns <= FEW_PROGRAMS * shape.block_n:
        shape = FEWEST
    group = shape.group or most_tiles
    zeros = None
    # The copy engine needs rows of a multiple of 16 bytes.
    copied = bits is not None or inner * weight.itemsize % 16 == 0
    if bits:
        weight, weight_scales, zeros = tiles(bits, shape.block_n, shape.block_k)
    elif copied:
        weight = TensorDescriptor.from_tensor(weight.view(-1, inner), [shape.block_n, shape.block_k])
    _grouped_linear[(triton.cdiv(most_tiles, group) * group * triton.cdiv(columns, shape.block_n),)](
        x,
        x_scales,
        weight,
        weight_scales,
        zeros,
        bias,
        shuffled.weights,
        shuffled.counts,
        shuffled.pairs,
        out,
        tokens,
        group,
        experts,
        columns,
        inner,
        ROUTED=routed,
        GATED=gated,
        ALPHA=clamped.alpha if clamped else None,
        LIMIT=clamped.limit if clamped else None,
        GROUPED=grouped,
        BLOCKS=blocks,
        CHOSEN=chosen,
        GATHER=len(x) == tokens,
        WEIGHTED=weighted,
        COPIED=copied,
        BITS=bits.group if bits else None,
        FLOATS=bits is not None and bits.floats,
        WORDS=bits.block if bits else None,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        SWAPPED=shape.swapped,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["tokens", "group"])
def _grouped_linear(
    x,
    x_scales,
    weight,
    weight_scales,
    weight_zeros,
    bias,
    pair_weights,
    counts,
    pairs,
    out,
    tokens,
    group,
    experts,
    columns,
    inner,
    ROUTED: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COPIED: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    WORDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """BITS: columns of a group of four bits. BLOCK_K then is words at a time, of a block of WORDS."""
    if not ROUTED:
        inputs_ready()
    of_group = group * tl.cdiv(columns, BLOCK_N)  # programs
    in_group = tl.program_id(0) % of_group
    tile = tl.program_id(0) // of_group * group + in_group % group
    expert, of_its = _find(tile, counts, experts, EXPERTS, BLOCK_M)
    if expert < experts:
        place, index = of_its * BLOCK_M + tl.arange(0, BLOCK_M), expert.to(tl.int64)
        real = place < tl.load(counts + expert)
        pair = tl.load(pairs + index * tokens + place, mask=real, other=0).to(tl.int64)
        row = pair // CHOSEN if GATHER else pair
        if ROUTED:
            inputs_ready()
        first_column, k = in_group // group * BLOCK_N, tl.arange(0, BLOCK_K)
        column = first_column + tl.arange(0, BLOCK_N)
        used = column < columns
        x_at = x + row[:, None] * inner + k[None, :]
        # Rows of W: this expert's begin at `base`. If gated, those of up follow those of gate.
        base = index * columns * 2 if GATED else index * columns
        acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
        of_up = acc
        if BITS is not None:
            acc = _add_four_bits(
                acc, x_at, real, k, inner, weight, weight_scales, weight_zeros,
                base + first_column, index, first_column, BITS, FLOATS, WORDS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            acc, of_up = _add_columns(
                acc, x_at, x_scales, row, real, k, inner, weight, weight_scales, base, index, first_column,
                column, used, columns, GATED, GROUPED, BLOCKS, COPIED, BLOCK_K, SWAPPED,
            )  # fmt: skip
        weights = tl.load(pair_weights + pair, mask=real, other=0.0) if WEIGHTED else None
        y = tl.trans(acc) if SWAPPED else acc
        if x_scales is not None and not GROUPED:
            y = times_scales(y, x_scales + row, weight_scales + base + column, real, used, False)
        y = _biased(y, bias, base + column, used, weights)
        if GATED:
            up = tl.trans(of_up) if SWAPPED else of_up
            y = swiglu(y, _biased(up, bias, base + columns + column, used, weights), ALPHA, LIMIT)
        to = out + pair[:, None] * columns + column[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask=real[:, None] & used[None, :])
    elif ROUTED:
        inputs_ready()


@triton.jit
def _add_columns(
    acc, x_at, x_scales, row, real, k, inner, weight, weight_scales, base, index, first_column, column, used,
    columns, GATED: tl.constexpr, GROUPED: tl.constexpr, BLOCKS: tl.constexpr, COPIED: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """acc + the product of all columns of x and W; and if GATED, that of the rows of up."""
    of_up, x_at_group, w_at_group, of_x, of_w = acc, 0, 0, 0, 0
    of_group_w = columns // BLOCK_K if BLOCKS else columns  # scales
    if GROUPED:
        x_at_group = x_scales + row * tl.cdiv(inner, BLOCK_K)
        w_at_group = (
            weight_scales
            + index * tl.cdiv(inner, BLOCK_K) * of_group_w
            + (first_column // BLOCK_K if BLOCKS else column)
        )
        of_x, of_w = group_scales(x_at_group, w_at_group, True, real, used, BLOCKS)
    for start in tl.range(0, inner, BLOCK_K):
        # W comes first, since its address is known before those of x.
        w = _rows(weight, base, first_column, column, used, start, k, inner, COPIED)
        a = _columns(x_at, start, real, k, inner)
        if GROUPED:
            scales = outer_scales(of_x, of_w, SWAPPED, BLOCKS)
            x_at_group, w_at_group = x_at_group + 1, w_at_group + of_group_w
            is_next = start + BLOCK_K < inner
            of_x, of_w = group_scales(x_at_group, w_at_group, is_next, real, used, BLOCKS)
            acc += _product(a, w, tl.zeros_like(acc), SWAPPED) * scales
        else:
            acc = _product(a, w, acc, SWAPPED)
        if GATED:
            w = _rows(weight, base + columns, first_column, column, used, start, k, inner, COPIED)
            of_up = _product(a, w, of_up, SWAPPED)
    return acc, of_up


@triton.jit
def _add_four_bits(
    acc, x_at, real, k, inner, words, scales, zeros, first_row, expert, first_n,
    GROUP: tl.constexpr, FLOATS: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + W xᵀ for rows of W from `first_row` on, which are those of an expert from `first_n` on."""
    first_group = expert * tl.cdiv(inner, GROUP)
    for step in tl.range(tl.cdiv(inner, 4 * WORDS) * (WORDS // BLOCK_K)):
        block = BLOCK_K * step // WORDS
        column = BLOCK_K * step + 3 * WORDS * block
        group = (first_group + 4 * WORDS * block // GROUP).to(tl.int32)
        codes = words.load([first_row.to(tl.int32), BLOCK_K * step])
        of_scales = of_planes(scales, group, first_n, None, GROUP, BLOCK_N, WORDS)
        of_zeros = of_planes(zeros, group, first_n, None, GROUP, BLOCK_N, WORDS)
        x0 = _columns(x_at, column, real, k, inner)
        x1 = _columns(x_at, column + WORDS, real, k, inner)
        x2 = _columns(x_at, column + 2 * WORDS, real, k, inner)
        x3 = _columns(x_at, column + 3 * WORDS, real, k, inner)
        acc = add_block(acc, codes, of_scales, of_zeros, x0, x1, x2, x3, FLOATS)
    return acc


@triton.jit
def _columns(x_at, start, real, k, inner):
    """Columns `start + k` of rows of x. Columns past the end are zeros."""
    return tl.load(x_at + start, mask=real[:, None] & (k < inner - start)[None, :], other=0.0)


@triton.jit
def _rows(weight, base, first_column, column, used, start, k, inner, COPIED: tl.constexpr):
    """A tile of W: rows `base + column`, columns `start + k`. Columns past the end are zeros."""
    if COPIED:
        w = weight.load([(base + first_column).to(tl.int32), start])
    else:
        at = weight + (base + column)[:, None] * inner + start + k[None, :]
        w = tl.load(at, mask=used[:, None] & (k < inner - start)[None, :], other=0.0)
    return w


@triton.jit
def _product(a, w, acc, SWAPPED: tl.constexpr):
    """acc + a wᵀ, or its transpose."""
    if SWAPPED:
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _biased(y, bias, at, used, weights):
    """(y + bias) · weights."""
    y = add_bias(y, bias, at, used, 0)
    if weights is not None:
        y *= weights[:, None]
    return y


@triton.jit
def _find(tile, counts, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, and which of the expert's tiles it is. Past all tiles: `experts`."""
    index = tl.arange(0, EXPERTS)
    tiles = (tl.load(counts + index, mask=index < experts, other=0) + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles, axis=0) <= tile  # experts with all their tiles before this one
    return tl.sum(before.to(tl.int32), axis=0), tile - tl.sum(tl.where(before, tiles, 0), axis=0)
