"""The KV cache and the states of an engine, or of another rank, as KV transfer sees them."""

from collections.abc import Callable

from baton.engine import Engine
from baton.engine.execution.rank import Follower
from baton.engine.models import attention_caches, cache_spec, state_caches
from baton.kv_transfer import KVLayout, PagedKV


def paged_kv(engine: Engine | Follower, layers_ready: Callable[[], int] = lambda: 0) -> PagedKV:
    """Returns the KV cache for a KV sender, a KV receiver or a `RankCopier`.

    A sender of several ranks needs `layers_ready`, as in `PagedKV`.
    """
    caches, ranks = engine.cache_spec, engine.ranks
    kv = [cache.split(x) for cache, x in zip(attention_caches(caches), engine.kv_cache, strict=True)]
    states = [cache.split(x) for cache, x in zip(state_caches(caches), engine.states, strict=True)]
    values, *scales = zip(*kv, strict=True)
    return PagedKV(
        values,
        engine.block_size,
        kv_layout(engine),
        str(values[0].device),
        ranks.rank,
        ranks.size,
        layers_ready,
        scales[0] if scales else (),
        list(zip(*states, strict=True)),
    )


def kv_layout(engine: Engine | Follower) -> KVLayout:
    """Returns the layout of the KV on the wire, with the KV heads of all ranks, and of the states.

    It requires that all layers with KV cache alike, and all state layers. Spans of attention may differ: all
    tokens are sent.
    """
    own = engine.cache_spec
    [kv_dtype] = {cache.dtype for cache in own if cache.arrays[0].per_token}
    [dtype] = {cache.dtype for cache in own if not cache.arrays[0].per_token} or {kv_dtype}
    caches = cache_spec(engine.model_config, dtype, kv_dtype)
    [[kv], *states] = sorted({cache.arrays for cache in caches}, key=lambda parts: not parts[0].per_token)
    assert len(states) <= 1, "the wire has one layout for all layers"
    return KVLayout(
        len(own),
        kv.heads,
        kv.head_dim,
        kv.dtype,
        *states,
        state_layers=tuple(i for i, cache in enumerate(caches) if cache.arrays in states),
        kind=kv.kind,
    )
