"""Rotary position embedding and the write into the paged cache, in one pass over the QKV product.

A head x of position p is two halves (a, b); with the angles θ = p · frequencies (Su 2021, in the half-split
order of Hugging Face checkpoints) it becomes

    (a · cos θ − b · sin θ,  b · cos θ + a · sin θ)

for query and key heads, after RMSNorm over the head if the model has one (Qwen3). Values are not rotated.
Queries and keys are rotated in place; keys and values also go to the cache. A program handles one KV head of
some tokens: the query heads that share it, its key and its value. Computed in float32 and rounded once. A
cache in FP8 gets the rounded keys and values, quantized.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels import KV, HeadNorm, parts
from baton.engine.kernels.fp8 import scale_of
from baton.engine.kernels.launch import inputs_ready, launch_options

MANY = 1024  # tokens; from this number on, a program handles TOKENS of them
TOKENS = 4
OF_WARP = 2048  # numbers of all heads of a token in a program; with more, it has more warps
QUERY_HEADS = 4  # at most, of a program that rotates queries alone


def rope_and_write(qkv: Tensor, rotary: Tensor, norm: HeadNorm | None, kv: KV, slots: Tensor) -> None:
    tokens, heads, head_dim = qkv.shape
    cache, scales = parts(kv)
    block_size, num_kv_heads = cache.shape[2:4]
    group = heads // num_kv_heads - 2
    assert qkv.is_contiguous(), "the kernel writes it in place"
    assert cache.is_contiguous(), "the kernel assumes that a slot is one row of each half"
    tokens_each, rows = TOKENS if tokens >= MANY else 1, triton.next_power_of_2(group + 1)
    _rope_and_write[(triton.cdiv(tokens, tokens_each), num_kv_heads)](
        qkv,
        rotary,
        qkv if norm is None else norm.scale,
        cache,
        cache if scales is None else scales,
        slots,
        tokens,
        cache.stride(0),
        0.0 if norm is None else norm.eps,
        BLOCK_SIZE=block_size,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=head_dim,
        NORM=norm is not None,
        FP8=scales is not None,
        TOKENS=tokens_each,
        num_warps=tokens_each * max(1, rows * head_dim // OF_WARP),
        **launch_options(),
    )


def rotate(q: Tensor, rotary: Tensor, norm: HeadNorm | None) -> None:
    """As `rope_and_write`, of queries [tokens, num_heads, head_dim] alone."""
    tokens, heads, head_dim = q.shape
    assert q.is_contiguous(), "the kernel writes it in place"
    tokens_each, group = TOKENS if tokens >= MANY else 1, math.gcd(heads, QUERY_HEADS)
    _rotate[(triton.cdiv(tokens, tokens_each), heads // group)](
        q,
        rotary,
        q if norm is None else norm.scale,
        tokens,
        0.0 if norm is None else norm.eps,
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        NORM=norm is not None,
        TOKENS=tokens_each,
        num_warps=tokens_each * max(1, group * head_dim // OF_WARP),
        **launch_options(),
    )


@triton.jit(do_not_specialize=["tokens"])
def _rope_and_write(
    qkv,
    rotary,
    scale,
    kv,
    kv_scales,
    slots,
    tokens,
    value_offset,
    eps,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    TOKENS: tl.constexpr,
):
    inputs_ready()
    kv_head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    token_size: tl.constexpr = (GROUP + 2) * KV_HEADS * HEAD_DIM
    dims = tl.arange(0, half)[None, :]
    rows = tl.arange(0, TOKENS * ROWS)  # of each token: the group's query heads, then its key head
    token = (tl.program_id(0) * TOKENS + rows // ROWS).to(tl.int64)
    row = rows % ROWS
    head = tl.where(row < GROUP, kv_head * GROUP + row, KV_HEADS * GROUP + kv_head)
    used = (row <= GROUP) & (token < tokens)

    turned_a, turned_b = _turn(qkv, rotary, scale, token, head, used, eps, token_size, HEAD_DIM, NORM)

    slot = tl.load(slots + token, mask=used, other=-1)
    key = kv + ((slot * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims
    written = (row == GROUP) & (slot >= 0)
    if FP8:
        key_scale = tl.maximum(_scale(turned_a), _scale(turned_b))
        turned_a = _quantized(turned_a, key_scale, kv)
        turned_b = _quantized(turned_b, key_scale, kv)
        tl.store(kv_scales + _place(slot, kv_head, BLOCK_SIZE, KV_HEADS), key_scale, mask=written)
    tl.store(key, turned_a, mask=written[:, None])
    tl.store(key + half, turned_b, mask=written[:, None])

    dims = tl.arange(0, HEAD_DIM)[None, :]
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    has_slot = slot >= 0
    value_head = (GROUP + 1) * KV_HEADS + kv_head
    value = tl.load(qkv + token[:, None] * token_size + value_head * HEAD_DIM + dims, mask=has_slot[:, None])
    if FP8:
        value_scale = _scale(value)
        value = _quantized(value, value_scale, kv)
        at = value_offset // HEAD_DIM + _place(slot, kv_head, BLOCK_SIZE, KV_HEADS)
        tl.store(kv_scales + at, value_scale, mask=has_slot)
    to = kv + value_offset + ((slot * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims
    tl.store(to, value, mask=has_slot[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    q,
    rotary,
    scale,
    tokens,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    inputs_ready()
    rows = tl.arange(0, TOKENS * GROUP)
    token = (tl.program_id(0) * TOKENS + rows // GROUP).to(tl.int64)
    head = tl.program_id(1) * GROUP + rows % GROUP
    _turn(q, rotary, scale, token, head, token < tokens, eps, HEADS * HEAD_DIM, HEAD_DIM, NORM)


@triton.jit
def _turn(
    heads,
    rotary,
    scale,
    token,
    head,
    used,
    eps,
    token_size: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotates these heads [rows] of tokens [rows] where they are, if they are `used`. Returns both halves of
    each [rows, HEAD_DIM / 2]."""
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, half)[None, :]
    in_head = head[:, None] * HEAD_DIM + dims
    at = heads + token[:, None] * token_size + in_head
    a = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=used[:, None], other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
        a = a * factor * tl.load(scale + in_head, mask=used[:, None], other=0.0).to(tl.float32)
        b = b * factor * tl.load(scale + in_head + half, mask=used[:, None], other=0.0).to(tl.float32)
    # The table's rows are cos θ twice, then −sin θ and sin θ.
    angles = rotary + token[:, None] * (2 * HEAD_DIM) + dims
    cos = tl.load(angles, mask=used[:, None], other=0.0)
    sin = tl.load(angles + HEAD_DIM + half, mask=used[:, None], other=0.0)
    turned_a = (a * cos - b * sin).to(heads.dtype.element_ty)
    turned_b = (b * cos + a * sin).to(heads.dtype.element_ty)
    tl.store(at, turned_a, mask=used[:, None])
    tl.store(at + half, turned_b, mask=used[:, None])
    return turned_a, turned_b


@triton.jit
def _scale(rows):
    return scale_of(tl.max(tl.abs(rows.to(tl.float32)), axis=1))


@triton.jit
def _quantized(rows, scale, kv):
    return (rows.to(tl.float32) / scale[:, None]).to(kv.dtype.element_ty)


@triton.jit
def _place(slot, kv_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr):
    """The place of a key's scale in `Fp8KV.scales`."""
    return (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
