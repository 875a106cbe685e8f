"""The KV cache and the states of an engine, or of another rank, as KV transfer sees them."""

from collections.abc import Callable

from baton.engine import Engine
from baton.engine.execution.rank import Follower
from baton.engine.kernels import parts
from baton.engine.models import attention_caches, cache_spec, state_caches
from baton.kv_transfer import KVLayout, PagedKV


def paged_kv(engine: Engine | Follower, layers_ready: Callable[[], int] = lambda: 0) -> PagedKV:
    """Returns the KV cache for a KV sender, a KV receiver or a `RankCopier`.

    A sender of several ranks needs `layers_ready`, as in `PagedKV`.
    """
    values, scales = zip(*map(parts, engine.kv_cache), strict=True)
    ranks, device = engine.ranks, str(values[0].device)
    caches = state_caches(engine.cache_spec)
    states = [cache.split(state) for cache, state in zip(caches, engine.states, strict=True)]
    return PagedKV(
        values,
        engine.block_size,
        kv_layout(engine),
        device,
        ranks.rank,
        ranks.size,
        layers_ready,
        [scale for scale in scales if scale is not None],
        list(zip(*states, strict=True)),
    )


def kv_layout(engine: Engine | Follower) -> KVLayout:
    """Returns the layout of the KV on the wire, with the KV heads of all ranks, and of the states.

    It requires that all layers with KV cache alike, and all state layers. Spans of attention may differ: all
    tokens are sent.
    """
    own = engine.cache_spec
    [kv_dtype] = {cache.dtype for cache in attention_caches(own)}
    [dtype] = {cache.dtype for cache in state_caches(own)} or {kv_dtype}
    caches = cache_spec(engine.model_config, dtype, kv_dtype)
    [[kv], *states] = sorted({cache.parts for cache in caches}, key=lambda parts: not parts[0].per_token)
    assert len(states) <= 1, "the wire has one layout for all layers"
    return KVLayout(
        len(caches),
        kv.heads,
        kv.head_dim,
        kv.dtype,
        *states,
        state_layers=tuple(i for i, cache in enumerate(caches) if cache.parts in states),
        kind=kv.kind,
    )
