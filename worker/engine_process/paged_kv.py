"""The cache of an engine, or of another rank, as KV transfer sees it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.engine import Engine
from baton.engine.execution.rank import Follower
from baton.kv_transfer import KVLayout, PagedKV

if TYPE_CHECKING:
    from torch import Tensor


def paged_kv(engine: Engine | Follower, layers_ready: Callable[[], int] = lambda: 0) -> PagedKV:
    """Returns the cache for a KV sender, a KV receiver or a `RankCopier`.

    A sender of several ranks needs `layers_ready`, as in `PagedKV`.
    """
    layout, specs, ranks = kv_layout(engine), engine.cache_spec, engine.ranks
    of_layers = [spec.planes(cache) for spec, cache in zip(specs, engine.caches, strict=True)]
    planes: list[list[tuple[Tensor, ...]]] = []
    for array, layers in zip(layout.arrays, layout.layers, strict=True):
        of_array = [of_layers[i][engine.cache_arrays[i].index(array)] for i in layers]
        planes.append(list(zip(*of_array, strict=True)))
    device = str(planes[0][0][0].device)
    window_blocks = engine.window_blocks if isinstance(engine, Engine) else None
    return PagedKV(
        planes, engine.block_size, layout, device, ranks.rank, ranks.size, layers_ready, window_blocks
    )


def kv_layout(engine: Engine | Follower) -> KVLayout:
    """Returns what all layers keep, with the heads of all ranks."""
    return KVLayout.of(engine.cache_arrays)
