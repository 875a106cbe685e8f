"""vLLM options that Baton does not have: name -> (whether the option takes a value, what to do instead).

Baton refuses them by name, because a user that copies a vLLM command line must learn which options have no
effect.
"""

from __future__ import annotations

_LORA = "Merge the adapter into the weights and pass the merged model with --model."
_PARALLEL = "Scale with --prefill and --decode instead."

REFUSED: dict[str, tuple[bool, str]] = {
    "enable_lora": (False, _LORA),
    "lora_modules": (True, _LORA),
    "max_loras": (True, _LORA),
    "max_lora_rank": (True, _LORA),
    "trust_remote_code": (False, "Baton never runs code from a model repository; use a supported model."),
    "pipeline_parallel_size": (True, _PARALLEL),
    "data_parallel_size": (True, _PARALLEL),
    "api_server_count": (True, "Set the number of router processes with --router-processes."),
    "speculative_config": (True, "Speculative decoding is not supported."),
    "kv_transfer_config": (True, "KV transfer is always on; see --kv-port and --kv-lanes."),
    "swap_space": (
        True,
        "A request without free blocks waits or moves; for cached KV in host memory use --host-cache-size.",
    ),
    "cpu_offload_gb": (True, "Weights are never offloaded; use a smaller model or more memory."),
    "enforce_eager": (False, "CUDA graphs cannot be switched off; CPUs use none."),
    "enable_auto_tool_choice": (False, "Tool calls are always parsed; see --tool-call-parser."),
}
