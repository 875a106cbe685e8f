"""Models that `baton plan` knows by name: the fields of their config.json."""

from __future__ import annotations

from typing import Any

_LLAMA_4: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "vocab_size": 202048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": [200001, 200007, 200008],
    "torch_dtype": "bfloat16",
}

_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "eos_token_id": [200002, 199999, 200012],
    "torch_dtype": "bfloat16",
}

MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "llama-4-scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {
            **_LLAMA_4,
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "max_position_embeddings": 10485760,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
    },
    "llama-4-maverick": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {
            **_LLAMA_4,
            "num_local_experts": 128,
            "interleave_moe_layer_step": 2,
            "max_position_embeddings": 1048576,
            "use_qk_norm": False,
        },
    },
    "gpt-oss-20b": {
        **_GPT_OSS,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gpt-oss-120b": {
        **_GPT_OSS,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
}
