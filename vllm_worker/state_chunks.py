"""Chunks of prompts of models with states, where vLLM's own handling fails.

*A first chunk of one token.* vLLM's graphs of decodes are chosen by the number of tokens alone. Layers of
Mamba take such a chunk for a prompt, and the graph reads slots of an earlier step (vLLM #57720). Gated delta
nets of 0.26 and linear attention take it for a decode, and read states that another request has left
(#51562). Newer gated delta nets take it for a prompt, which only model runner V1 has in such a graph. Where a
graph may hold it, it is a decode in all of them, and begins with states of zeros (`caches.clear_states`): the
same numbers.

*A chunk that ends within a block*, with states in a prefix cache. vLLM 0.26 schedules none, and no request
behind it: with a smaller bound prompts would wait until nothing decodes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from baton.vllm_worker.caches import keeps_states

_DELTA_NETS = "vllm.v1.attention.backends.gdn_attn", "vllm.models.kimi_k3.nvidia.kda_metadata"
"""Modules that count them, if a model has them."""


def compute_as_decodes(*, v2: bool) -> None:
    """First chunks of one token, in the process with the model, before its first step. May be repeated.
    `v2`: vLLM has model runner V2."""
    from vllm.v1.attention.backends import mamba_attn

    _count_by_length(mamba_attn)
    for name in () if v2 else _DELTA_NETS:
        if (module := sys.modules.get(name)) is not None:
            _count_by_length(module)


def _count_by_length(backend: Any) -> None:
    split = backend.split_decodes_and_prefills

    def by_length(*arguments: Any, **options: Any) -> tuple[int, int, int, int]:
        return split(*arguments, **options | {"treat_short_extends_as_decodes": True})

    backend.split_decodes_and_prefills = by_length


def least_chunk(groups: Sequence[Any], cache_mode: str) -> int:
    """Returns of how many tokens vLLM needs a chunk that is not the last one. 0: of any number.
    `groups`: vLLM's KVCacheGroupSpecs. `cache_mode`: its `mamba_cache_mode`."""
    sizes = [group.kv_cache_spec.block_size for group in groups if keeps_states(group.kv_cache_spec)]
    if not sizes or cache_mode != "align":
        return 0
    from vllm.v1.core.sched.scheduler import Scheduler

    # A version that reads its bound there cuts within blocks that are larger.
    cuts = "long_prefill_token_threshold" in Scheduler._mamba_block_aligned_split.__code__.co_names
    return 0 if cuts else max(sizes)
