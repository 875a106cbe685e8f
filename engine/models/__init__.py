"""The models, by the names that Hugging Face checkpoints have in `architectures`.

One file per architecture. Knows nothing of requests and of the formats of checkpoints.
"""

from collections.abc import Sequence

import torch

from engine.model_config import ModelConfig
from engine.models.cache_spec import AttentionCache
from engine.models.gpt_oss import GptOss
from engine.models.llama import Llama
from engine.models.llama4 import Llama4
from engine.models.qwen2 import Qwen2
from engine.models.qwen3 import Qwen3
from engine.models.qwen3_moe import Qwen3Moe

MODELS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Llama4ForCausalLM": Llama4,
    "Llama4ForConditionalGeneration": Llama4,  # its text model
    "GptOssForCausalLM": GptOss,
}


def model_class(architecture: str, source: str) -> type[Llama]:
    """The class for this architecture. Raises `ValueError` naming `source`, the checkpoint, if none fits."""
    if architecture not in MODELS:
        raise ValueError(f"{source}: architecture {architecture} is not supported ({', '.join(MODELS)} are)")
    return MODELS[architecture]


def cache_spec(config: ModelConfig, kv_dtype: torch.dtype) -> Sequence[AttentionCache]:
    """What each layer of this model caches."""
    return model_class(config.architecture, config.architecture).cache_spec(config, kv_dtype)


def cache_bytes_per_token(cache: Sequence[AttentionCache]) -> int:
    """Bytes that the cache of all layers needs for one token."""
    return sum(layer.bytes_per_token for layer in cache)
