"""Layouts and caches of plain shapes, for tests that need no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.content.cache_kinds import ATTENTION, CacheArray, CacheKind
from baton.kv_transfer.layout import KVLayout
from baton.kv_transfer.transport import PagedKV

if TYPE_CHECKING:
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


def paged(
    layers: Sequence[torch.Tensor],
    block_size: int,
    layout: KVLayout,
    device: str,
    rank: int = 0,
    ranks: int = 1,
    layers_ready: Callable[[], int] = lambda: 0,
    scales: Sequence[torch.Tensor] = (),
    states: Sequence[Sequence[torch.Tensor]] = (),
) -> PagedKV:
    """`layers`: [2 (K, V), blocks, block_size, heads of this rank, head_dim], of each layer with KV.
    `scales`: [2, blocks, heads, block_size]. `states`: of each state and layer, [slots, rows, heads,
    head_dim]."""
    kv = [layers, [x.transpose(2, 3).unsqueeze(4) for x in scales]]
    planes = [[[x.transpose(0, 1).unsqueeze(3) for x in of_layers]] for of_layers in states]
    return PagedKV([kv[: 1 + bool(scales)], *planes], block_size, layout, device, rank, ranks, layers_ready)
