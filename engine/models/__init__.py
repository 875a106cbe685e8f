"""The models, by the names that Hugging Face checkpoints have in `architectures`.

Knows nothing of requests and of the formats of checkpoints.
"""

from collections.abc import Sequence

import torch

from baton.engine.model_config import ModelConfig
from baton.engine.models.cache_spec import AttentionCache, CacheSpec
from baton.engine.models.deepseek import DeepSeek
from baton.engine.models.hybrids import Bamba, GraniteMoeHybrid, Qwen3Next
from baton.engine.models.llama import Gemma3, Glm4, GptOss, Llama, Llama4, Olmo2, Qwen2, Qwen3

MODELS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Phi3ForCausalLM": Llama,
    "Glm4ForCausalLM": Glm4,
    "Glm4MoeLiteForCausalLM": DeepSeek,
    "DeepseekV2ForCausalLM": DeepSeek,
    "DeepseekV3ForCausalLM": DeepSeek,
    "Olmo2ForCausalLM": Olmo2,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3,  # its text model
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3,
    "Llama4ForCausalLM": Llama4,
    "Llama4ForConditionalGeneration": Llama4,  # its text model
    "GptOssForCausalLM": GptOss,
    "BambaForCausalLM": Bamba,
    "GraniteMoeHybridForCausalLM": GraniteMoeHybrid,
    "Qwen3NextForCausalLM": Qwen3Next,
}


def model_class(architecture: str, source: str) -> type[Llama]:
    """The class for this architecture. Raises `ValueError` naming `source`, the checkpoint, if none fits."""
    if architecture not in MODELS:
        raise ValueError(f"{source}: architecture {architecture} is not supported ({', '.join(MODELS)} are)")
    return MODELS[architecture]


def cache_spec(
    config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> Sequence[CacheSpec]:
    """What each layer of this model caches, if it computes in `dtype`. `kv_dtype` None: KV has this type,
    too."""
    model = model_class(config.architecture, config.architecture)
    return model.cache_spec(config, dtype, kv_dtype or dtype)


def attention_caches(cache: Sequence[CacheSpec]) -> list[AttentionCache]:
    return [layer for layer in cache if isinstance(layer, AttentionCache)]


def cache_bytes_per_token(cache: Sequence[CacheSpec]) -> int:
    """Bytes that the cache of all layers needs for one token."""
    return sum(array.bytes for layer in cache for array in layer.arrays if array.per_token)


def state_bytes_per_request(cache: Sequence[CacheSpec]) -> int:
    """Bytes that the arrays of one request need in all layers. 0: no layer has states."""
    return sum(array.bytes for layer in cache for array in layer.arrays if not array.per_token)
