"""Layouts and caches of plain shapes, for tests that need no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.kv_names.cache_kinds import ATTENTION, CacheArray, CacheKind
from baton.kv_transfer.layout import KVLayout
from baton.kv_transfer.transport import PagedKV

if TYPE_CHECKING:  # to import it takes longer than what some processes of tests do
    import torch


def kv_layout(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    states: Sequence[CacheArray] = (),
    state_layers: Sequence[int] = (),
    kind: CacheKind = ATTENTION,
) -> KVLayout:
    """Layers keep `states`, or K and V."""
    kv = CacheArray(kind, "kv", 2 if kind == ATTENTION else 1, num_kv_heads, head_dim, dtype)
    return KVLayout.of([states if layer in state_layers else (kv,) for layer in range(num_layers)])


def other_arrays(
    layout: KVLayout, blocks: int, block_size: int, slots: int, fill: Callable[..., torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Of all arrays but the first one, each layer: [rows, blocks, block_size, heads, head_dim], or of
    requests [slots, rows, heads, head_dim]. `fill` makes tensors of a shape."""
    import torch

    found = []
    for array, layers in zip(layout.arrays[1:], layout.layers[1:], strict=True):
        shape = (slots, array.rows, array.heads, array.head_dim)
        if array.per_token:
            shape = (array.rows, blocks, block_size, array.heads, array.head_dim)
        found.append([fill(shape).to(getattr(torch, array.dtype)) for _ in layers])
    return found


def paged(
    layers: Sequence[torch.Tensor],
    block_size: int,
    layout: KVLayout,
    device: str,
    rank: int = 0,
    ranks: int = 1,
    layers_ready: Callable[[], int] = lambda: 0,
    scales: Sequence[torch.Tensor] = (),
    others: Sequence[Sequence[torch.Tensor]] = (),
) -> PagedKV:
    """`layers`: [2 (K, V), blocks, block_size, heads of this rank, head_dim], of each layer with KV.
    `scales`: [2, blocks, heads, block_size]. `others`: as `other_arrays`, with the heads of this rank."""
    kv = [layers, [x.transpose(2, 3).unsqueeze(4) for x in scales]]
    planes = [
        [[x if array.per_token else x.transpose(0, 1).unsqueeze(3) for x in of_layers]]
        for array, of_layers in zip(layout.arrays[1:], others, strict=True)
    ]
    return PagedKV([kv[: 1 + bool(scales)], *planes], block_size, layout, device, rank, ranks, layers_ready)
