"""The KV cache of an engine with several ranks. The ranks from 1 on copy in threads here, not processes."""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from baton.kv_transfer.arena import Arena, ArenaEnd, channel_pair
from baton.kv_transfer.endpoint.other_ranks import OtherRanks
from baton.kv_transfer.endpoint.rank_copier import RankCopier
from baton.kv_transfer.layout import KVLayout, Range
from tests.layouts import paged


class Ranks:
    """Owns the caches of all ranks. `sending` and `receiving` are the ends of rank 0."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        block_size: int,
        layout: KVLayout,
        size: int,
        sending: ArenaEnd,
        receiving: ArenaEnd,
        others: Sequence[Sequence[torch.Tensor]] = (),
        *,
        exports: bool = False,
        adopts: bool = False,
    ) -> None:
        """`layers`: the cache with all heads, [2, blocks, block_size, heads, head_dim] each. `scales`: in FP8
        of each layer [2, blocks, heads, block_size]. `others`: of one rank, as in `paged`."""
        device = str(layers[0].device)
        self._layers_ready = 0
        self.heads: list[Range] = [layout.arrays[0].heads_of(rank, size) for rank in range(size)]
        self.caches = [[x[..., first:last, :].contiguous() for x in layers] for first, last in self.heads]
        self.scales = [[x[:, :, first:last].contiguous() for x in scales] for first, last in self.heads]
        if device.startswith("cuda"):
            torch.cuda.synchronize()  # copies run on streams of their own
        kv = [
            paged(cache, block_size, layout, device, rank, size, lambda: self._layers_ready, scales, others)
            for rank, (cache, scales) in enumerate(zip(self.caches, self.scales, strict=True))
        ]
        self.kv = kv[0]
        self.sending, self.receiving = sending, receiving
        pairs = [channel_pair() for _ in kv[1:]]
        self.others = [theirs for _, theirs in pairs]  # the ends of the ranks from 1 on
        self.channels = OtherRanks([ours for ours, _ in pairs])
        self.copiers = [
            RankCopier(
                cache, sock, mapped(sending).arena, mapped(receiving).arena, exports=exports, adopts=adopts
            )
            for cache, sock in zip(kv[1:], self.others, strict=True)
        ]

    def layer_done(self, layer: int) -> None:
        """All ranks have written a layer. Rank 0 is first."""
        self.layer_done_on_rank_0()
        for copier in self.copiers:
            copier.layer_done(layer)

    def layer_done_on_rank_0(self) -> None:
        self._layers_ready += 1

    def close(self) -> None:
        """Ends the threads of the ranks."""
        self.channels.close()
        for end in (self.sending, self.receiving):
            end.channel.close()

    def rows(self, layer: int, rows: Sequence[int]) -> torch.Tensor:
        """As the function `rows_of`."""
        return rows_of([cache[layer] for cache in self.caches], self.heads, rows)

    def exact_rows(self, layer: int, rows: Sequence[int]) -> torch.Tensor:
        """As `rows`, but the numbers that FP8 stands for, float32."""
        values = rows_of([cache[layer].float() for cache in self.caches], self.heads, rows)
        if not self.scales[0]:
            return values
        scales = [scales[layer].transpose(2, 3)[..., None] for scales in self.scales]
        return values * rows_of(scales, self.heads, rows)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All layers of all ranks."""
        return [layer for cache in self.caches for layer in cache]


def mapped(end: ArenaEnd) -> ArenaEnd:
    """With a mapping of its own, as in another process: a GPU pins each once."""
    arena = end.arena
    return replace(end, arena=Arena(os.dup(arena.fd), arena.num_slots, arena.slot_bytes))


def rows_of(layers: Sequence[torch.Tensor], heads: Sequence[Range], rows: Sequence[int]) -> torch.Tensor:
    """[2, rows, heads, head_dim] of a layer, on the CPU. `layers`: of each rank, with its `heads`.

    Asserts that ranks with the same heads hold the same bytes.
    """
    parts: dict[Range, torch.Tensor] = {}
    for held, layer in zip(heads, layers, strict=True):
        part = layer.flatten(1, 2)[:, rows].cpu()
        same = torch.equal(as_bytes(parts.setdefault(held, part)), as_bytes(part))
        assert same, f"two ranks hold different bytes of heads {held}"
    return torch.cat([parts[held] for held in sorted(parts)], dim=2)


def positions(blocks: Sequence[int], block_size: int, start: int, stop: int) -> list[int]:
    """The rows of a cache where positions [start, stop) lie."""
    return [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Bytes, because a NaN is not equal to itself."""
    return x.contiguous().view(torch.uint8)


ORDERS = {
    "2, blocks, block, heads, dim": (0, 1, 2, 3, 4),
    "blocks, 2, block, heads, dim": (1, 0, 2, 3, 4),
    "blocks, heads, block, 2 × dim": (1, 3, 2, 0, 4),
    "2, blocks, heads, block, dim": (0, 1, 3, 2, 4),
}
"""Of the dimensions of a cache in memory. The first three are vLLM's, and the first is also the engine's. The
last is that of the engine's scales."""


def in_memory(order: str, values: torch.Tensor) -> torch.Tensor:
    """A copy of values [2 (K, V), blocks, block size, heads, head_dim], with its dimensions in this order in
    memory."""
    dims = ORDERS[order]
    return values.permute(dims).contiguous().permute([dims.index(i) for i in range(5)])
