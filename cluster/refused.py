"""vLLM's options that Baton does not have: name -> (whether it takes a value, what to do instead).

They are refused by name, so that nobody believes a flag of a copied command line took effect.
"""

from __future__ import annotations

_LORA = "Merge the adapter into the weights and pass the merged model with --model."
_WEIGHTS = "Weights are served as they are stored; pass a model in bfloat16, float16 or GGUF with --model."
_PARALLEL = "Scale with --prefill and --decode instead."

REFUSED: dict[str, tuple[bool, str]] = {
    "enable_lora": (False, _LORA),
    "lora_modules": (True, _LORA),
    "max_loras": (True, _LORA),
    "max_lora_rank": (True, _LORA),
    "quantization": (True, _WEIGHTS),
    "kv_cache_dtype": (True, "KV is kept in the model's own type; choose it with --dtype."),
    "trust_remote_code": (False, "It never runs code from a model repository; use a supported architecture."),
    "pipeline_parallel_size": (True, _PARALLEL),
    "data_parallel_size": (True, _PARALLEL),
    "api_server_count": (True, "Processes of the router are --router-processes."),
    "enable_expert_parallel": (False, "Mixture-of-experts models are not supported."),
    "speculative_config": (True, "There is no speculative decoding."),
    "kv_transfer_config": (True, "KV transfer is always on; see --kv-port and --kv-lanes."),
    "swap_space": (True, "KV is never swapped to host memory; a request without room waits or moves."),
    "cpu_offload_gb": (True, "Weights are never offloaded; use a smaller model or more memory."),
    "enforce_eager": (False, "Prefill always runs eagerly; there is nothing to switch off."),
    "tokenizer": (True, "The tokenizer comes with the model; put it into the directory given to --model."),
    "enable_auto_tool_choice": (
        False,
        "Tool calls are always parsed; see --tool-call-parser.",
    ),
}
