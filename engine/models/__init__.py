"""The models, and what each of their layers caches.

Knows nothing of requests and of the formats of checkpoints.
"""

from collections.abc import Iterable, Sequence

from baton.engine.models.cache_spec import AttentionCache, CacheSpec
from baton.kv_names.cache_kinds import CacheArray, Window


def attention_caches(cache: Sequence[CacheSpec]) -> list[AttentionCache]:
    return [layer for layer in cache if isinstance(layer, AttentionCache)]


def cache_bytes_per_token(cache: Sequence[CacheSpec], *, windowed: bool = False) -> int:
    """Bytes that the cache of all layers needs for one token. `windowed`: in arrays with windows alone."""
    arrays = (array for layer in cache for array in layer.arrays if array.per_token)
    return sum(array.bytes for array in arrays if array.window is not None or not windowed)


def windows_of(layers: Iterable[Iterable[CacheArray]]) -> set[Window]:
    """Those of all arrays that layers keep."""
    return {array.window for arrays in layers for array in arrays if array.window is not None}


def state_bytes_per_request(cache: Sequence[CacheSpec]) -> int:
    """Bytes that the arrays of one request need in all layers. 0: no layer has states."""
    return sum(array.bytes for layer in cache for array in layer.arrays if not array.per_token)
