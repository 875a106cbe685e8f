"""Model shapes for `--load-format dummy`: directories that hold only a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from baton.bench.load.target.tokenization import WORDS
from baton.cluster.tools.sizing.models import MODELS

DENSE, MOE = "llama-3.1-8b", "qwen3-30b-a3b"
"""What benches of one GPU measure by default, and what they measure of mixtures of experts."""

BAMBA, GRANITE = "bamba-9b", "granite-4.0-h-tiny"
LATENT = "glm-4.7-flash"

HYBRIDS = BAMBA, GRANITE
"""Models with state layers."""

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Llama4ForConditionalGeneration": "llama4",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "BambaForCausalLM": "bamba",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
}
"""Other engines find the class of a model by this field of config.json."""

_MAMBA = {
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = MODELS | {
    "llama-3.1-70b": MODELS["llama-3.1-8b"]
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama-3.1-8b-two-layers": MODELS["llama-3.1-8b"] | {"num_hidden_layers": 2},
    BAMBA: {
        **_MAMBA,
        "architectures": ["BambaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "eos_token_id": 128001,
    },
    GRANITE: {
        **_MAMBA,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "mamba_n_heads": 48,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 6,
        "vocab_size": 100352,
        "tie_word_embeddings": True,
        "eos_token_id": 100257,
    },
    "small-random": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "eos_token_id": 0,
        "initializer_range": 0.1,
    },
    "one-small-layer": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 50_000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "eos_token_id": 0,
    },
}


def write_shape(name: str, directory: Path, *, tokenizer: bool = False) -> Path:
    """Writes `directory`/`name`, which `--model` accepts with `--load-format dummy`. Returns its path.

    With `tokenizer` a router can serve the model: every token id is a word. The words of load tests are among
    them, since unknown words are one and the same token, and prompts of it would share their KV.
    """
    where = directory / name
    where.mkdir(parents=True, exist_ok=True)
    [architecture] = SHAPES[name]["architectures"]
    config = SHAPES[name] | {"model_type": _MODEL_TYPES[architecture]}
    (where / "config.json").write_text(json.dumps(config, indent=1))
    if tokenizer:
        count = SHAPES[name]["vocab_size"]
        words = dict.fromkeys(("w0", *WORDS, *(f"w{i}" for i in range(1, count))))
        made = Tokenizer(WordLevel(dict(zip(words, range(count), strict=False)), unk_token="w0"))
        made.pre_tokenizer = WhitespaceSplit()  # pyrefly: ignore[read-only]
        made.decoder = ByteLevel()  # pyrefly: ignore[read-only]
        made.save(str(where / "tokenizer.json"))
    return where
