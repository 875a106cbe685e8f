"""Rotary position embedding and the write into the paged cache, in one pass over the QKV product.

A head x of position p is two halves (a, b); with the angles θ = p · frequencies (Su 2021, in the half-split
order of Hugging Face checkpoints) it becomes

    (a · cos θ − b · sin θ,  b · cos θ + a · sin θ)

for query and key heads, after RMSNorm over the head where the model has one (Qwen3). Values stay. Queries and
keys are rotated in place, keys and values also go to the cache. One program per (token, KV head): the query
heads that share the KV head, its key and its value. In float32, rounded once.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import HeadNorm, overlap
from engine.kernels.overlap import inputs_ready


def rope_and_write(qkv: Tensor, rotary: Tensor, norm: HeadNorm | None, kv: Tensor, slots: Tensor) -> None:
    tokens, heads, head_dim = qkv.shape
    num_kv_heads = kv.shape[3]
    group = heads // num_kv_heads - 2
    assert qkv.is_contiguous(), "it is written in place"
    assert kv.is_contiguous(), "a slot is one row of each half"
    _rope_and_write[(tokens, num_kv_heads)](
        qkv,
        rotary,
        qkv if norm is None else norm.scale,
        kv,
        slots,
        kv.stride(0),
        0.0 if norm is None else norm.eps,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=triton.next_power_of_2(group + 1),
        HEAD_DIM=head_dim,
        NORM=norm is not None,
        num_warps=1,
        **overlap.options(),
    )


@triton.jit
def _rope_and_write(
    qkv,
    rotary,
    scale,
    kv,
    slots,
    value_offset,
    eps,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    inputs_ready(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, half)
    rows = tl.arange(0, ROWS)  # the group's query heads, then its key head
    head = tl.where(rows < GROUP, kv_head * GROUP + rows, KV_HEADS * GROUP + kv_head)
    used = (rows <= GROUP)[:, None]

    in_head = head[:, None] * HEAD_DIM + dims[None, :]
    at = qkv + token * ((GROUP + 2) * KV_HEADS * HEAD_DIM) + in_head
    a = tl.load(at, mask=used, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=used, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
        a = a * factor * tl.load(scale + in_head, mask=used, other=0.0).to(tl.float32)
        b = b * factor * tl.load(scale + in_head + half, mask=used, other=0.0).to(tl.float32)
    # The table's rows are cos θ twice, then −sin θ and sin θ.
    angles = rotary + token * 2 * HEAD_DIM + dims
    cos = tl.load(angles)[None, :]
    sin = tl.load(angles + HEAD_DIM + half)[None, :]
    element: tl.constexpr = qkv.dtype.element_ty
    turned_a = (a * cos - b * sin).to(element)
    turned_b = (b * cos + a * sin).to(element)
    tl.store(at, turned_a, mask=used)
    tl.store(at + half, turned_b, mask=used)

    slot = tl.load(slots + token)
    if slot >= 0:
        to = kv + (slot * KV_HEADS + kv_head) * HEAD_DIM
        key = to + dims[None, :] + rows[:, None] * 0
        tl.store(key, turned_a, mask=(rows == GROUP)[:, None])
        tl.store(key + half, turned_b, mask=(rows == GROUP)[:, None])
        whole = tl.arange(0, HEAD_DIM)
        value_head = (GROUP + 1) * KV_HEADS + kv_head
        value = tl.load(qkv + token * ((GROUP + 2) * KV_HEADS * HEAD_DIM) + value_head * HEAD_DIM + whole)
        tl.store(to + value_offset + whole, value)
