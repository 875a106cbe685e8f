"""The KV cache of an engine, or of another rank, as KV transfer sees it."""

from collections.abc import Callable
from dataclasses import replace

from engine import Engine
from engine.execution.rank import Follower
from engine.kernels import parts
from engine.models import attention_caches
from kv_transfer import KVLayout, PagedKV


def paged_kv(engine: Engine | Follower, layers_ready: Callable[[], int] = lambda: 0) -> PagedKV:
    """Returns the KV cache for a KV sender, a KV receiver or a `RankCopier`.

    A sender of several ranks needs `layers_ready`, as in `PagedKV`.
    """
    values, scales = zip(*map(parts, engine.kv_cache), strict=True)
    ranks, device = engine.ranks, str(values[0].device)
    return PagedKV(
        values,
        engine.block_size,
        kv_layout(engine),
        device,
        ranks.rank,
        ranks.size,
        layers_ready,
        [scale for scale in scales if scale is not None],
    )


def kv_layout(engine: Engine | Follower) -> KVLayout:
    """Returns the layout of the KV on the wire, with the KV heads of all ranks.

    It requires that all attention layers cache alike. Their spans may differ: all tokens are sent.
    """
    layer, *others = (replace(layer, span=None) for layer in attention_caches(engine.cache_spec))
    assert all(other == layer for other in others), "the wire has one layout for all layers"
    dtype = str(layer.dtype).removeprefix("torch.")
    return KVLayout(len(engine.kv_cache), engine.model_config.num_kv_heads, layer.head_dim, dtype)
