"""MiMo-V2-Flash: windows of 128 tokens with sinks in most layers, which have other KV heads and rotate with
other frequencies than the rest. Values have fewer numbers than keys."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.ranks import unsharded
from baton.engine.layers.rotary import Rotary
from baton.engine.layers.weights import Weights
from baton.engine.loader.families.family import Family
from baton.engine.loader.latent_config import latent_experts
from baton.engine.loader.rearranged import FP8_FORMS, Piece, Rearranged, in_heads
from baton.engine.loader.rope_config import local_rope, ropes
from baton.engine.loader.settings import Settings
from baton.engine.model_config import MiMoConfig, ModelConfig, OtherAttention
from baton.engine.models.cache_spec import CacheSpec
from baton.engine.models.llama import Attend, Llama, LlamaAttention

KINDS = ("full_attention", "sliding_attention")
ROTATED = 0.334
DEFAULTS = {"head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "attention_value_scale": 0.707}


class MiMoAttention(LlamaAttention):
    """Keys and values have the size that kernels take: behind their numbers there are zeros."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str, *, sinks: bool) -> None:
        self.value_dim, self.factor = mimo_of(config).value_dim, mimo_of(config).value_scale
        self.head_dim, self.padded = config.head_dim, config.kernel_head_dim
        self.q_heads = weights.ranks.shard(config.num_heads)
        self.kv_heads = weights.ranks.shard_with_copies(config.num_kv_heads)
        q, k = self.q_heads.of(self.head_dim), self.kv_heads.of(self.head_dim)
        rows, hidden = [q, k, self.kv_heads.of(self.value_dim)], unsharded(config.hidden_size)
        names = [f"{name}.{part}_proj" for part in "qkv"]
        self.input = weights.linear(names, rows, hidden, bias=config.attention_bias)
        self.out = weights.linear([f"{name}.o_proj"], [hidden], self.q_heads.of(self.value_dim))
        self.head_norm, self.scale = None, self.head_dim**-0.5
        self.sinks = weights.stack([f"{name}.sinks"], [[self.q_heads]]) if sinks else None

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        values = self.kv_heads.length * self.value_dim
        projected = self.input(x)
        halves = projected[:, :-values].unflatten(1, (-1, 2, self.head_dim // 2))
        v = projected[:, -values:].unflatten(1, (-1, self.value_dim)) * self.factor
        qk = F.pad(halves, (0, (self.padded - self.head_dim) // 2)).flatten(2)
        qkv = torch.cat((qk, F.pad(v, (0, self.padded - self.value_dim))), dim=1)
        out = attend(layer, qkv, rotary, None, self.sinks, self.scale)
        return self.out(out[..., : self.value_dim].flatten(1))


class MiMo(Llama):
    @staticmethod
    def cache_spec(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        return Llama.cache_spec(replace(config, head_dim=config.kernel_head_dim), dtype, kv_dtype)

    @classmethod
    def mixer(cls, config: ModelConfig, weights: Weights, layer: int) -> MiMoAttention:
        shape, name = config.of_layer(layer), f"model.layers.{layer}.self_attn"
        return MiMoAttention(shape, weights, name, sinks=shape is not config)

    @staticmethod
    def rotation(config: ModelConfig, weights: Weights) -> Rotary:
        return Rotary(replace(config, head_dim=config.kernel_head_dim), weights)


class MiMoCheckpoint(Rearranged):
    quantized: ClassVar[Collection[str]] = FP8_FORMS
    renamed: ClassVar[Mapping[str, str]] = {".attention_sink_bias": ".sinks"}
    left_out = "model.mtp."

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        words = name.split(".")
        if words[-2:-1] == ["k_proj"] and words[2].isdecimal():
            shape = self.config.of_layer(int(words[2]))
            rows = torch.arange(shape.num_kv_heads * shape.head_dim)
            yield from self._by_rows(stored, {name: in_heads(rows, self._order)})
        else:
            yield from super()._split(name, stored)


def mimo_of(config: ModelConfig) -> MiMoConfig:
    assert config.mimo is not None, "the loader sets it for this architecture"
    return config.mimo


def in_words_of_others(settings: Settings) -> Mapping[str, Any]:
    """Published checkpoints have other words than transformers."""
    fields = {**DEFAULTS, **settings.values}
    count = settings.integer("num_hidden_layers")
    if settings.get("sliding_window_size") is not None:
        fields["sliding_window"] = settings.integer("sliding_window_size") + 1  # and the token itself
    if settings.get("layer_types") is None:
        default = [int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(count)]
        pattern = settings.integers("hybrid_layer_pattern") or default
        fields["layer_types"] = [KINDS[each == 1] for each in pattern]
    if settings.get("mlp_layer_types") is None:
        sparse = settings.integers("moe_layer_freq") or [int(layer > 0) for layer in range(count)]
        fields["mlp_layer_types"] = ["sparse" if each else "dense" for each in sparse]
    if not settings.get("rope_parameters"):
        part = {"partial_rotary_factor": settings.get("partial_rotary_factor", ROTATED)}
        thetas = settings.number("rope_theta", 5e6), settings.number("swa_rope_theta", 1e4)
        rotations = [{**part, "rope_theta": theta} for theta in thetas]
        fields["rope_parameters"] = dict(zip(KINDS, rotations, strict=True))
    return fields


def local_attention(settings: Settings, types: Sequence[str]) -> OtherAttention:
    """Raises as `mimo_config`."""
    kv_heads = settings.integer("swa_num_key_value_heads", 2 * settings.integer("num_key_value_heads"))
    return replace(local_rope(settings, types), num_kv_heads=kv_heads)


def mimo_config(settings: Settings) -> MiMoConfig:
    """Raises `ValueError` naming the key that is wrong or not supported."""
    integer, source = settings.integer, settings.source
    heads, size, values = integer("num_attention_heads"), integer("head_dim"), integer("v_head_dim")
    local = integer("swa_num_key_value_heads", 2 * integer("num_key_value_heads"))
    rope, of_local = ropes(settings)
    if rope.get("partial_rotary_factor", ROTATED) != of_local.get("partial_rotary_factor", ROTATED):
        raise ValueError(f"{source}: partial_rotary_factor must be the same in all layers")
    if heads % local or values > size or size % 2:
        raise ValueError(f"{source}: {heads} heads of {size} with values of {values} on {local} is no shape")
    return MiMoConfig(values, settings.number("attention_value_scale", 1.0))


def not_supported(settings: Settings) -> Iterator[str]:
    names = "head_dim", "v_head_dim", "num_attention_heads"
    same = {f"swa_{name}": (settings.get(name),) for name in names}
    sinks = {"add_swa_attention_sink_bias": (True,), "add_full_attention_sink_bias": (False,)}
    methods = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "n_shared_experts": (0,)}
    yield from settings.unlike(same | sinks | methods)


FAMILY = Family(
    model=MiMo,
    checkpoint=MiMoCheckpoint,
    settings=in_words_of_others,
    rotated=ROTATED,
    experts=lambda settings: replace(latent_experts(settings, first_dense=1), shared_intermediate_size=0),
    mimo=mimo_config,
    other_attention=local_attention,
    not_supported=not_supported,
)
