"""What BatonConnector refuses at the start, with the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform

from baton.vllm_worker.caches import keeps_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


def check_config(config: VllmConfig) -> None:
    """Raises ValueError for options that are not supported."""
    parallel = config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size:
        raise ValueError("BatonConnector supports tensor parallelism alone: start vLLM with one stage")
    refused = {
        "microbatches": parallel.use_ubatching,  # a layer would be saved in parts
        # Ranks would share out the tokens of a block, too.
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "ranks on several machines": getattr(parallel, "nnodes_within_dp", 1) > 1,
        # Each server would find scales of its own.
        "--calculate-kv-scales": getattr(config.cache_config, "calculate_kv_scales", False),
        # The last inputs of a state would not travel with it.
        "--use-replayssm": getattr(config.cache_config, "use_replayssm", False),
    }
    for name, setting in refused.items():
        if setting:
            raise ValueError(f"BatonConnector does not support {name}: start vLLM without it")


def check_groups(config: VllmConfig, groups: Sequence[KVCacheGroupSpec], *, attached: bool) -> None:
    """Raises ValueError for caches that are not supported. `attached`: in a worker of Baton."""
    if any(keeps_states(group.kv_cache_spec) for group in groups) and config.speculative_config is not None:
        raise ValueError(
            "BatonConnector does not support speculative decoding of a model with states, which in vLLM "
            "itself gives other tokens (vLLM #39273, #56531): start vLLM without it"
        )
    within = any(getattr(group.kv_cache_spec, "num_prefill_checkpoint_blocks", 0) for group in groups)
    if within and current_platform.is_cpu() and config.cache_config.mamba_cache_mode == "align":
        raise ValueError(
            "vLLM for CPUs cannot cache prefixes of a model with Mamba-2: add --no-enable-prefix-caching"
        )
    if not attached and len(groups) > 1 and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
        raise ValueError(
            f"this vLLM cannot be told that KV of {len(groups)} groups of layers is lost: use vLLM 0.30, "
            "`baton serve --engine vllm`, or, for a model with windows, --disable-hybrid-kv-cache-manager"
        )
