"""LFM2, dense and with experts: short convolutions in most layers, and Qwen3's attention in the others."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from baton.engine.layers.state_mixers import ShortConvMixer
from baton.engine.loader.experts_config import experts_config
from baton.engine.loader.families.family import Family
from baton.engine.loader.hybrid_config import state_layers
from baton.engine.loader.rearranged import Piece, Rearranged
from baton.engine.loader.settings import Settings
from baton.engine.model_config import ExpertsConfig, Scoring, StateConfig
from baton.engine.models.hybrids import Bamba
from baton.engine.models.llama import Norms, Qwen3Attention


class Lfm2(Bamba):
    attention = Qwen3Attention
    state_mixer = ShortConvMixer
    state_name = "conv"
    norms = Norms(before_mixer="operator_norm", before_mlp="ffn_norm")


class Lfm2Checkpoint(Rearranged):
    renamed: ClassVar[Mapping[str, str]] = {
        "model.embedding_norm.": "model.norm.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        "_layernorm.": "_norm.",
        ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".feed_forward.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    }

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        yield from self._fused_experts(name, stored) or super()._split(name, stored)


def in_words_of_others(settings: Settings) -> Mapping[str, Any]:
    """Older checkpoints have other words than newer ones, too."""
    fields = {
        "tie_word_embeddings": settings.get("tie_embedding", True),
        "rope_theta": 1e6,
        **settings.values,
    }
    fields["rms_norm_eps"] = settings.get("norm_eps", 1e-5)
    attention, kinds = settings.get("full_attn_idxs"), ("conv", "full_attention")
    if settings.get("layer_types") is None and isinstance(attention, list):
        count = settings.integer("num_hidden_layers")
        fields["layer_types"] = [kinds[layer in attention] for layer in range(count)]
    size = settings.integer("block_ff_dim" if "block_ff_dim" in settings.values else "intermediate_size")
    if settings.get("block_auto_adjust_ff_dim", True):
        multiple = settings.integer("block_multiple_of", 256)
        adjusted = int(settings.number("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        size = -(-adjusted // multiple) * multiple
    return fields | {"intermediate_size": size}


def short_conv_config(settings: Settings, norm_eps: float) -> StateConfig:
    heads, bias = settings.integer("num_attention_heads"), bool(settings.get("conv_bias", False))
    return StateConfig(
        state_layers(settings, settings.integer("num_hidden_layers")),
        num_heads=heads,
        head_dim=settings.integer("hidden_size") // heads,
        state_size=0,
        groups=1,
        conv_width=settings.integer("conv_L_cache", 3),
        conv_bias=bias,
        proj_bias=bias,
        dt_limits=(0.0, float("inf")),
        norm_eps=norm_eps,
    )


def with_experts(settings: Settings) -> Mapping[str, Any]:
    return in_words_of_others(
        Settings({**settings.values, "block_auto_adjust_ff_dim": False}, settings.source)
    )


def lfm2_experts(settings: Settings) -> ExpertsConfig:
    dense = 0 if settings.get("num_dense_layers") == 0 else settings.integer("num_dense_layers", 2)
    layers = range(dense, settings.integer("num_hidden_layers"))
    scoring = Scoring.NORMALIZED_SIGMOID if settings.get("norm_topk_prob", True) else Scoring.SIGMOID
    count = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    scale = settings.number("routed_scaling_factor", 1.0)
    return experts_config(settings, layers, scoring, count=count, size="moe_intermediate_size", scale=scale)


def not_supported(settings: Settings) -> Iterator[str]:
    if settings.get("use_expert_bias", True) is not True:
        yield f"use_expert_bias {settings.get('use_expert_bias')!r} of {settings.architecture}"


DENSE = Family(model=Lfm2, checkpoint=Lfm2Checkpoint, settings=in_words_of_others, state=short_conv_config)
MOE = replace(DENSE, settings=with_experts, experts=lfm2_experts, not_supported=not_supported)
