"""Reads the mixtures of experts from `config.json`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.engine.loader.settings import Settings
from baton.engine.model_config import ClampedSwiGLU, ExpertsConfig, Scoring


def qwen3_experts(settings: Settings) -> ExpertsConfig:
    # transformers 5 writes another name for the number of experts than older versions.
    count = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    dense = settings.integers("mlp_only_layers")
    step = settings.integer("decoder_sparse_step", 1)
    layers = [i for i in range(step - 1, settings.integer("num_hidden_layers"), step) if i not in dense]
    scoring = Scoring.NORMALIZED_SOFTMAX if settings.get("norm_topk_prob") else Scoring.SOFTMAX
    return experts_config(settings, layers, scoring, count=count, size="moe_intermediate_size")


def qwen3_next_experts(settings: Settings) -> ExpertsConfig:
    size = settings.integer("shared_expert_intermediate_size")
    experts = qwen3_experts(settings)
    return replace(experts, shared_intermediate_size=size, shared_gate=True)


def llama4_experts(settings: Settings) -> ExpertsConfig:
    step = settings.integer("interleave_moe_layer_step", 1)
    layers: Sequence[int] = range(step - 1, settings.integer("num_hidden_layers"), step)
    if settings.get("moe_layers") is not None:
        layers = settings.integers("moe_layers")
    shared = settings.integer("intermediate_size")
    return experts_config(settings, layers, Scoring.SIGMOID_ON_INPUT, shared_intermediate_size=shared)


def gpt_oss_experts(settings: Settings) -> ExpertsConfig:
    activation = ClampedSwiGLU(settings.number("swiglu_alpha", 1.702), settings.number("swiglu_limit", 7.0))
    return experts_config(
        settings, range(settings.integer("num_hidden_layers")), activation=activation, bias=True
    )


def granite_experts(settings: Settings) -> ExpertsConfig | None:
    if settings.get("num_local_experts") == 0:
        return None
    shared = settings.integer("shared_intermediate_size")
    return experts_config(
        settings, range(settings.integer("num_hidden_layers")), shared_intermediate_size=shared
    )


def experts_config(
    settings: Settings, layers: Sequence[int], scoring: Scoring = Scoring.NORMALIZED_SOFTMAX,
    *, count: str = "num_local_experts", size: str = "intermediate_size", **more: Any,
) -> ExpertsConfig:  # fmt: skip
    """`count` and `size`: the names of these settings."""
    num_experts, num_chosen = settings.integer(count), settings.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise ValueError(f"{settings.source}: num_experts_per_tok {num_chosen} of {num_experts} experts")
    return ExpertsConfig(num_experts, num_chosen, settings.integer(size), scoring, tuple(layers), **more)
