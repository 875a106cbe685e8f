"""Checkpoints of Step-3.7, and their settings: of the text model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from baton.engine.loader.experts_config import experts_config
from baton.engine.loader.families.family import Family
from baton.engine.loader.latent_config import layers_with_experts
from baton.engine.loader.rearranged import Piece, Rearranged, in_heads, rotated_first
from baton.engine.loader.rope_config import local_rope, ropes, rotary_dim
from baton.engine.loader.settings import Settings
from baton.engine.model_config import ExpertsConfig, OtherAttention, Scoring
from baton.engine.models.step import Step

WORDS = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
}
"""By the words of transformers, those of published checkpoints."""
LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")
"""Of all layers. Published checkpoints have layers behind them there that predict further tokens."""


class StepCheckpoint(Rearranged):
    renamed: ClassVar[Mapping[str, str]] = {
        ".moe.router_bias": ".mlp.gate.e_score_correction_bias",
        ".moe.gate.": ".mlp.gate.",
        ".moe.": ".mlp.experts.",
        ".share_expert.": ".mlp.shared_expert.",
    }
    left_out = ("vision_model.", "vit_large_projector.")
    adds_one = True

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        words = name.split(".")
        layer = int(words[2]) if words[:2] == ["model", "layers"] else 0
        if layer >= self.config.num_layers:
            return
        config, part = self.config.of_layer(layer), words[-2] if len(words) > 1 else ""
        if part.endswith("_proj") and words[-3] == "experts":
            before = ".".join(words[:-2])
            one = [f"{before}.{{}}.{part}.weight"]
            yield from self._by_expert(stored, self._files.shape(stored), one, self._read_expert)
            return
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        if part in ("q_proj", "k_proj", "q_norm", "k_norm"):
            assert config.rotary_dim is not None, "the loader sets it for this architecture"
            rows = torch.arange(config.head_dim * (heads[part[0]] if part.endswith("proj") else 1))
            order = rotated_first(config.head_dim, config.rotary_dim)
            yield from self._by_rows(stored, {name: in_heads(rows, order)})
        else:
            shape = self._files.shape(stored)
            yield name, Piece(stored, shape, lambda parts: self._files.read(stored, parts))


def in_words_of_others(settings: Settings) -> Mapping[str, Any]:
    fields: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, **settings.values}
    count = settings.integer("num_hidden_layers")
    fields |= {ours: fields[theirs] for ours, theirs in WORDS.items() if theirs in fields}
    fields |= {name: fields[name][:count] for name in LISTS if isinstance(fields.get(name), list)}
    other, kinds = fields.get("attention_other_setting"), fields.get("layer_types")
    if isinstance(other, Mapping) and fields.get("num_sliding_attention_heads") is None:
        fields["num_sliding_attention_heads"] = other.get("num_attention_heads")
    if kinds is None:
        kinds = fields["layer_types"] = ["full_attention"] * count
    sparse = fields.get("moe_layers_enum")
    if fields.get("mlp_layer_types") is None and sparse is not None:
        words = sparse.split(",") if isinstance(sparse, str) else settings.integers("moe_layers_enum")
        numbers = {int(word) for word in map(str, words) if word.strip().isdecimal()}
        fields["mlp_layer_types"] = ["sparse" if layer in numbers else "dense" for layer in range(count)]
    thetas, parts = fields.get("rope_theta"), fields.get("partial_rotary_factors")
    if isinstance(thetas, list) and isinstance(parts, list) and {*map(type, kinds)} == {str}:
        rope = {
            kind: {"rope_theta": theta, "partial_rotary_factor": part}
            for kind, theta, part in zip(kinds, thetas, parts, strict=False)
        }
        if isinstance(scaling := fields.get("rope_scaling"), Mapping) and "full_attention" in rope:
            rope["full_attention"].update(scaling)
        fields |= {"rope_parameters": rope, "rope_theta": None, "rope_scaling": None}
    return fields


def local_attention(settings: Settings, types: Sequence[str]) -> OtherAttention:
    """Raises `ValueError` naming the key that is wrong or not supported."""
    heads = settings.integer("num_attention_heads")
    local_heads = settings.integer("num_sliding_attention_heads", heads)
    if local_heads % settings.integer("num_key_value_heads"):
        raise ValueError(
            f"{settings.source}: num_sliding_attention_heads {local_heads} do not share KV heads"
        )
    rope, local = local_rope(settings, types), Settings(ropes(settings)[1], settings.source)
    turned = rotary_dim(Settings({}, ""), local, 1.0, settings.integer("head_dim"))
    return replace(rope, num_heads=local_heads, rotary_dim=turned)


def experts(settings: Settings) -> ExpertsConfig:
    """Raises as `local_attention`."""
    layers = layers_with_experts(settings, first_dense=3)
    of_experts, of_shared = (_limits(settings, name, layers) for name in LISTS[2:])
    return experts_config(
        settings,
        layers,
        Scoring.NORMALIZED_SIGMOID,
        count="n_routed_experts",
        size="moe_intermediate_size",
        shared_intermediate_size=settings.integer("share_expert_dim"),
        scale=settings.number("moe_router_scaling_factor", 1.0),
        limits=tuple(zip(of_experts, of_shared, strict=True)),
    )


def _limits(settings: Settings, name: str, layers: Sequence[int]) -> list[float]:
    """Of the layers with experts. No other layer may have one."""
    count = settings.integer("num_hidden_layers")
    limits = settings.get(name) or [0] * count
    numbers = isinstance(limits, list) and all(type(each) in (int, float, type(None)) for each in limits)
    if not numbers or len(limits) != count or any(limits[i] for i in range(count) if i not in layers):
        raise ValueError(f"{settings.source}: {name} must bound layers with experts alone, not {limits!r}")
    return [float(limits[layer] or 0) for layer in layers]


def not_supported(settings: Settings) -> Iterator[str]:
    scale = {"query_pre_attn_scalar": (settings.get("head_dim"),)}
    yield from settings.unlike({"attention_bias": (False,)} | scale)


FAMILY = Family(
    model=Step,
    checkpoint=StepCheckpoint,
    settings=in_words_of_others,
    rotated=1.0,
    experts=experts,
    other_attention=local_attention,
    head_gates=True,
    reads_layers=True,
    further="",
    not_supported=not_supported,
)
