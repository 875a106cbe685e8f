"""Groups of layers as vLLM's `KVCacheConfig` has them."""

from types import SimpleNamespace
from typing import Any

from tests.vllm_worker.played import played

MODULE = "vllm/v1/kv_cache_interface.py"


def group(kind: str, *names: str, **fields: Any) -> Any:
    """A group with these layers. `kind`: the class of its spec."""
    spec = type(kind, (SimpleNamespace,), {})(**vars(played(MODULE, kind, **fields)))
    return played(MODULE, "KVCacheGroupSpec", layer_names=list(names), kv_cache_spec=spec)


def attention(
    *names: str, block: int, heads: int, dim: int, kind: str = "FullAttentionSpec", **more: Any
) -> Any:
    return group(kind, *names, block_size=block, num_kv_heads=heads, head_size=dim, **more)
