"""The families of models, by the names that Hugging Face checkpoints have in `architectures`.

A family is one entry here, and what no other family has stands in a file of its own beside this one.
"""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from baton.engine.loader.experts_config import (
    gpt_oss_experts,
    granite_experts,
    llama4_experts,
    qwen3_experts,
    qwen3_next_experts,
)
from baton.engine.loader.families import (
    gemma3,
    gemma4,
    kimi_linear,
    lfm2,
    mimo_v2_flash,
    minimax_m2,
    nemotron_h,
    qwen3_5,
    qwen3_vl,
    sparse_latents,
    step3p7,
)
from baton.engine.loader.families.family import Family
from baton.engine.loader.families.rearrangements import (
    Glm4Checkpoint,
    HybridCheckpoint,
    Llama4Checkpoint,
    Phi3Checkpoint,
    Qwen3NextCheckpoint,
)
from baton.engine.loader.gpt_oss import GptOssCheckpoint
from baton.engine.loader.hybrid_config import gated_delta_config, mamba2_config
from baton.engine.loader.latent_config import latent_config, latent_experts, not_supported
from baton.engine.model_config import ModelConfig
from baton.engine.models.cache_spec import CacheSpec
from baton.engine.models.deepseek import DeepSeek
from baton.engine.models.hybrids import Bamba, GraniteMoeHybrid, Qwen3Next
from baton.engine.models.llama import Glm4, GptOss, Llama, Llama4, Olmo2, Qwen2, Qwen3

LLAMA = Family(model=Llama)
LLAMA4 = Family(model=Llama4, checkpoint=Llama4Checkpoint, experts=llama4_experts)
LATENT = partial(Family, model=DeepSeek, latent=latent_config)
DEEPSEEK_V2 = LATENT(
    experts=partial(latent_experts, first_dense=0, v2=True), not_supported=partial(not_supported, v2=True)
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Phi3ForCausalLM": Family(model=Llama, checkpoint=Phi3Checkpoint, rotated=1.0),
    "Glm4ForCausalLM": Family(model=Glm4, checkpoint=Glm4Checkpoint, rotated=0.5),
    "Glm4MoeLiteForCausalLM": LATENT(
        experts=partial(latent_experts, first_dense=1), not_supported=not_supported
    ),
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": LATENT(
        experts=partial(latent_experts, first_dense=3), not_supported=not_supported
    ),
    "DeepseekV32ForCausalLM": sparse_latents.DEEPSEEK_V32,
    "GlmMoeDsaForCausalLM": sparse_latents.GLM_DSA,
    "Olmo2ForCausalLM": Family(model=Olmo2),
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma3ForConditionalGeneration": gemma3.FAMILY,
    "Gemma4ForCausalLM": gemma4.FAMILY,
    "Gemma4ForConditionalGeneration": gemma4.FAMILY,
    "Qwen2ForCausalLM": Family(model=Qwen2),
    "Qwen3ForCausalLM": Family(model=Qwen3),
    "Qwen3MoeForCausalLM": Family(model=Qwen3, experts=qwen3_experts),
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,  # its text model
    "GptOssForCausalLM": Family(model=GptOss, checkpoint=GptOssCheckpoint, experts=gpt_oss_experts),
    "BambaForCausalLM": Family(model=Bamba, checkpoint=HybridCheckpoint, rotated=0.5, state=mamba2_config),
    "GraniteMoeHybridForCausalLM": Family(
        model=GraniteMoeHybrid,
        checkpoint=HybridCheckpoint,
        experts=granite_experts,
        state=mamba2_config,
        without_positions=lambda settings: settings.get("position_embedding_type") != "rope",
    ),
    "Qwen3NextForCausalLM": Family(
        model=Qwen3Next,
        checkpoint=Qwen3NextCheckpoint,
        rotated=0.25,
        experts=qwen3_next_experts,
        state=gated_delta_config,
    ),
    "Qwen3_5ForCausalLM": qwen3_5.DENSE,
    "Qwen3_5ForConditionalGeneration": qwen3_5.DENSE,
    "Qwen3_5MoeForCausalLM": qwen3_5.MOE,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5.MOE,
    "Qwen3VLForConditionalGeneration": qwen3_vl.DENSE,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl.MOE,
    "KimiLinearForCausalLM": kimi_linear.FAMILY,
    "Lfm2ForCausalLM": lfm2.DENSE,
    "Lfm2MoeForCausalLM": lfm2.MOE,
    "MiMoV2FlashForCausalLM": mimo_v2_flash.FAMILY,
    "MiniMaxM2ForCausalLM": minimax_m2.FAMILY,
    "NemotronHForCausalLM": nemotron_h.FAMILY,
    "Step3p7ForConditionalGeneration": step3p7.FAMILY,  # its text model
}


def family_of(architecture: str, source: str) -> Family:
    """Raises `ValueError` naming `source`, the checkpoint, if Baton does not know this architecture."""
    if architecture not in FAMILIES:
        raise ValueError(
            f"{source}: architecture {architecture} is not supported ({', '.join(FAMILIES)} are)"
            f"{what_serves(architecture)}"
        )
    return FAMILIES[architecture]


def what_serves(architecture: str) -> str:
    """For an error message: whether vLLM serves this architecture, as far as this environment shows it."""
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return "; vLLM may serve it: --engine vllm"
    registry = Path(vllm.submodule_search_locations[0], "model_executor", "models", "registry.py")
    listed = registry.is_file() and f'"{architecture}"' in registry.read_text()
    return "; vLLM serves it: --engine vllm" if listed else "; nor does the installed vLLM list it"


def model_class(config: ModelConfig, source: str) -> type[Any]:
    """The class that computes this model. Raises as `family_of`."""
    if config.modules is not None:
        from baton.engine.models.transformers.model import ModulesModel  # late: others need no transformers

        return ModulesModel
    return family_of(config.architecture, source).model


def cache_spec(
    config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> Sequence[CacheSpec]:
    """What each layer of this model caches, if it computes in `dtype`. `kv_dtype` None: KV has this type,
    too."""
    return model_class(config, config.architecture).cache_spec(config, dtype, kv_dtype or dtype)
