"""Kimi-Linear: DeepSeek-V3's latent attention without positions in some layers, and KDA in the others."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.state_mixers import KimiDeltaMixer
from baton.engine.loader.families.family import Family
from baton.engine.loader.hybrid_config import state_layers
from baton.engine.loader.latent_config import latent_config, latent_experts
from baton.engine.loader.rearranged import FP8_FORMS, Piece, Rearranged
from baton.engine.loader.settings import Settings
from baton.engine.model_config import StateConfig
from baton.engine.models.deepseek import DeepSeek
from baton.engine.models.hybrids import Bamba

NAMES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
"""Settings by the names that published checkpoints have, and those of DeepSeek."""
LINEAR = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Settings in `linear_attn_config` of published checkpoints, and their names in transformers."""


class KimiLinear(Bamba, DeepSeek):
    state_mixer = KimiDeltaMixer
    state_name = "self_attn"


class KimiLinearCheckpoint(Rearranged):
    """An expert has w1, w3 and w2. Rates have more dimensions than heads."""

    quantized: ClassVar[Collection[str]] = FP8_FORMS
    renamed: ClassVar[Mapping[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    }

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        shape = self._files.shape(stored)
        if not name.endswith(".A_log"):
            yield name, Piece(stored, shape, lambda parts: self._files.read(stored, parts))
            return

        def read(parts: Sequence[Shard]) -> Tensor:
            return self._files.read(stored, [unsharded(size) for size in shape]).flatten()[parts[0].indices]

        yield name, Piece(stored, (max(shape, default=0),), read)


def in_words_of_deepseek(settings: Settings) -> Mapping[str, Any]:
    config = {
        **settings.values,
        **{ours: settings.get(name) for name, ours in NAMES.items() if settings.get(name) is not None},
    }
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):
        config |= {ours: linear[name] for name, ours in LINEAR.items() if name in linear}
        full = linear.get("full_attn_layers")
        if config.get("layer_types") is None and isinstance(full, list):  # the first layer is 1
            kinds, count = ("linear_attention", "full_attention"), settings.integer("num_hidden_layers")
            config["layer_types"] = [kinds[layer in full] for layer in range(1, count + 1)]
    return config


def kda_config(settings: Settings, norm_eps: float) -> StateConfig:
    heads, size = settings.integer("linear_num_heads", 32), settings.integer("linear_head_dim", 128)
    return StateConfig(
        state_layers(settings, settings.integer("num_hidden_layers")),
        num_heads=heads,
        head_dim=size,
        state_size=size,
        groups=heads,
        conv_width=settings.integer("linear_conv_kernel_dim", 4),
        conv_bias=False,
        proj_bias=False,
        dt_limits=(0.0, float("inf")),
        norm_eps=norm_eps,
        low_rank=size,
    )


def not_supported(settings: Settings) -> Iterator[str]:
    supported = {
        "attention_bias": (False,),
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
    }
    yield from settings.unlike(supported)


FAMILY = Family(
    model=KimiLinear,
    checkpoint=KimiLinearCheckpoint,
    settings=in_words_of_deepseek,
    without_positions=lambda settings: True,
    experts=partial(latent_experts, first_dense=1),
    state=kda_config,
    latent=latent_config,
    not_supported=not_supported,
)
