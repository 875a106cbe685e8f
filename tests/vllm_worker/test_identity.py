"""Servers know by a fingerprint whether their KV means the same, whatever options vLLM has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.vllm_worker import options
from baton.vllm_worker.identity import fingerprint
from tests.vllm_worker.played import annotated, played

pytestmark = pytest.mark.all

LONG: dict[str, Any] = {"long_factor": [2.0], "original_max_position_embeddings": 64}
HARMLESS = {
    "of the rounding, the speed or the memory of the same products": """
        additional_config all2all_backend attention_backend attention_config compilation_config
        cp_kv_cache_interleave_size cpu_offload_gb cpu_offload_params cudagraph_capture_sizes dcp_comm_backend
        dcp_kv_cache_interleave_size dcp_q_replicate device_ids disable_cascade_attn disable_custom_all_reduce
        distributed_executor_backend enable_batch_sharded_sampling enable_cumem_allocator
        enable_ep_weight_filter enable_eplb enable_flashinfer_autotune enable_hc_sp
        enable_mamba_cache_stochastic_rounding enable_nccl_comm_suspend enable_shm_tensor_arena
        enforce_eager engram_config eplb_config
        expert_placement_strategy gdn_prefill_backend ir_op_priority kda_decode_backend kda_prefill_backend
        kernel_config kv_cache_memory_bytes kv_sharing_fast_prefill linear_backend mamba_backend
        mamba_cache_philox_rounds mamba_config mamba_ssu_algorithm max_cudagraph_capture_size
        mm_encoder_attn_backend mm_encoder_tp_mode moe_backend numa_bind numa_bind_cpus numa_bind_nodes
        offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step
        optimization_level performance_mode replayssm_buffer_len sparse_indexer_topk_backend""",
    "of blocks and steps": """
        async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager enable_chunked_prefill
        enable_mamba_shared_prefix_checkpoint long_prefill_token_threshold mamba_block_size mamba_cache_mode
        long_prefill_token_threshold_adaptive max_num_active_seqs max_num_queued_reqs max_num_queued_tokens
        max_num_scheduled_tokens prefill_schedule_interval prefix_cache_retention_interval
        prefix_caching_hash_algo prefix_match_unit scheduler_cls scheduler_reserve_full_isl scheduling_policy
        stream_interval swa_bounded_replay watermark""",
    "of what is sampled": """
        aux_output_config enable_return_routed_experts enable_trace_replay generation_config
        logits_processors logprobs_mode max_logprobs override_generation_config reasoning_config
        reasoning_parser reasoning_parser_plugin return_sampling_mask spec_method spec_model spec_tokens
        speculative_config structured_outputs_config use_fp64_gumbel watermark_config""",
    "of FP8, which is refused or in the layout": "allow_deprecated_quantization kv_cache_dtype_skip_layers",
    "of other ways in than a router has": """
        allowed_local_media_path allowed_media_domains default_mm_loras enable_mm_embeds enable_prompt_embeds
        interleave_mm_strings io_processor_plugin limit_mm_per_prompt media_io_kwargs mm_device_do_normalize
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_hasher_algorithm
        mm_ipc_gpu_memory_gb mm_processor_cache_type mm_processor_device mm_shm_cache_max_object_size_mb
        mm_tensor_ipc renderer_num_workers skip_mm_profiling skip_tokenizer_init tokenizer_mode
        tokenizer_revision tokens_only video_pruning_method video_pruning_rate""",
    "of the room for adapters": """
        enable_mixed_moe_lora_format enable_moe_shared_loras fully_sharded_loras max_lora_cls_labels
        specialize_active_lora""",
    "of how the same files are read": """
        download_dir hf_token max_parallel_loading_workers pt_load_map_location safetensors_load_strategy
        safetensors_prefetch_block_size safetensors_prefetch_num_threads trust_remote_code
        use_tqdm_on_load""",
    "of what is logged": """
        aggregate_engine_logging collect_detailed_traces cudagraph_metrics custom_histogram_buckets
        disable_log_stats enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics
        enable_mm_processor_stats jit_monitor_mode jit_monitor_verbose kv_cache_metrics
        kv_cache_metrics_sample log_config_file log_level logging_config otlp_traces_endpoint
        per_request_spec_decode_metrics profiler_config ray_workers_use_nsight
        show_hidden_metrics_for_version""",
    "of processes and failures": """
        cpu_distributed_timeout_seconds distributed_timeout_seconds dp_sync_interval ec_manager_config
        disable_nccl_for_dp_synchronization ec_transfer_config elastic_ep_max_dp_size enable_elastic_ep
        enable_fault_tolerance fail_on_environ_validation fault_tolerance_config master_addr master_port
        shutdown_timeout""",
    "of live weights, for which a worker has no call": """
        enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names
        weight_transfer_config""",
    "refused by `check_config`": """
        dbo_decode_token_threshold dbo_prefill_token_threshold decode_context_parallel_size enable_dbo nnodes
        node_rank pipeline_parallel_size prefill_context_parallel_size ubatch_size use_replayssm""",
    "of models that generate no text one token after the other": """
        convert diffusion_config mm_encoder_only pooler_config runner""",
    "code of the user": "worker_cls worker_extension_cls",
}


def test_each_option_of_vllm_is_in_the_fingerprint_or_refused_or_harmless() -> None:
    """A new version of vLLM has new ones: look what they change."""
    flags = (*options._OTHER_KV, *options._OFFLOADING, options._PROCESSED, options._LORA)
    named = {*options._SAME, *options._OWN, *options._RENAMED.values(), *options._CONNECTORS}
    named |= {flag.removeprefix("--").replace("-", "_") for flag in flags}
    harmless = " ".join(HARMLESS.values()).split()
    found = annotated("vllm/engine/arg_utils.py", "EngineArgs")
    unknown = found - named - {*harmless}
    assert not {name for name in unknown if not name.startswith(("data_parallel", "_api"))}
    assert len({*harmless}) == len(harmless)
    assert not {*harmless} & named
    assert {*harmless} <= found


def config(directory: Path, shape: dict[str, Any] | None = None, **changes: Any) -> Any:
    """vLLM's configuration of a model there. Names in `changes` begin with the part that they change."""

    def part(name: str, **fields: Any) -> Any:
        changed = {
            key.removeprefix(f"{name}_"): changes[key] for key in changes if key.startswith(f"{name}_")
        }
        return played(
            f"vllm/config/{name}.py", f"{CLASSES.get(name, name.title())}Config", **fields | changed
        )

    said = {"_name_or_path": "x", "hidden_size": 8, **(shape or {})}
    rope = said.get("rope_parameters", {})
    model = part(
        "model", model=str(directory), model_weights="", dtype=torch.bfloat16, quantization=None,
        revision=None, hf_config=SimpleNamespace(to_dict=lambda: said),
        hf_text_config=SimpleNamespace(rope_parameters=rope), max_model_len=32, multimodal_config=None,
        model_impl="auto", disable_sliding_window=False,
    )  # fmt: skip
    lora = [key for key in changes if key.startswith("lora_")]
    return played(
        "vllm/config/vllm.py", "VllmConfig", model_config=model,
        load_config=part("load", load_format="auto", ignore_patterns=["original/**/*"], download_dir=None),
        cache_config=part("cache", cache_dtype="auto", mamba_ssm_cache_dtype="auto"),
        lora_config=part("lora", lora_dtype=torch.bfloat16, target_modules=None) if lora else None,
    )  # fmt: skip


CLASSES = {"lora": "LoRA"}


def save(directory: Path, name: str, seed: int) -> Path:
    directory.mkdir(exist_ok=True)
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    save_file({"a": tensor}, directory / name)
    return directory


def test_options_that_change_kv_are_in_the_fingerprint(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", 1)
    long = {"rope_parameters": LONG}
    changed: list[tuple[dict[str, Any] | None, dict[str, Any]]] = [
        (None, {}),
        ({"hidden_size": 16}, {}),  # of --hf-overrides
        (None, {"load_load_format": "dummy"}),
        (None, {"load_ignore_patterns": ["*.safetensors"]}),
        (None, {"model_model_impl": "transformers"}),
        (None, {"model_disable_sliding_window": True}),
        (None, {"model_quantization": "fp8"}),
        (None, {"model_multimodal_config": SimpleNamespace(mm_processor_kwargs={"do_normalize": False})}),
        (None, {"cache_cache_dtype": "fp8_e5m2"}),
        (None, {"cache_cache_dtype": "fp8_e4m3"}),
        (None, {"cache_mamba_ssm_cache_dtype": "float16"}),
        (None, {"lora_target_modules": ["q_proj"]}),
        (None, {"lora_lora_dtype": torch.float16}),
        (long, {}),
        (long, {"model_max_model_len": 65}),
    ]
    found = [fingerprint(config(tmp_path, shape, **changes)) for shape, changes in changed]
    assert len({*found}) == len(found)
    same: list[dict[str, Any]] = [
        {"lora_lora_dtype": torch.bfloat16},
        {"model_max_model_len": 65},
        {"load_load_format": "safetensors"},
        {"cache_cache_dtype": "bfloat16"},
    ]
    assert {fingerprint(config(tmp_path, **changes)) for changes in same} == {found[0]}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
def test_weights_are_in_the_fingerprint(tmp_path: Path, name: str) -> None:
    first, again, other = (save(tmp_path / str(i), name, seed) for i, seed in enumerate((1, 1, 2)))
    assert fingerprint(config(first)) == fingerprint(config(again)) != fingerprint(config(other))
    file = fingerprint(config(first / name))
    assert file != fingerprint(config(other / name))


def test_models_of_the_hub_of_one_shape_are_not_one_model(tmp_path: Path) -> None:
    """vLLM knows such a model by its name, which is no path."""
    local = save(snapshot(tmp_path, "some--one"), "a.safetensors", 1)
    save(snapshot(tmp_path, "some--two"), "a.safetensors", 2)
    one, two = (
        fingerprint(config(Path(f"some/{name}"), load_download_dir=str(tmp_path))) for name in ("one", "two")
    )
    assert one == fingerprint(config(local)) != two
    elsewhere = [fingerprint(config(Path(f"bucket/{name}"))) for name in ("one", "two")]
    assert len({one, two, *elsewhere}) == 4


def snapshot(cache: Path, name: str) -> Path:
    """The directory of a model in a cache of the hub."""
    root = cache / f"models--{name}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    (there := root / "snapshots" / ("0" * 40)).mkdir(parents=True)
    return there
