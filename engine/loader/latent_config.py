"""Reads multi-head latent attention, and the experts of its models, from `config.json`."""

import math
from collections.abc import Iterator
from dataclasses import replace

from baton.engine.loader.settings import Settings
from baton.engine.model_config import ExpertsConfig, IndexConfig, LatentConfig, Scoring

KINDS = ("dense", "sparse")
"""Of layers, in the words of transformers."""
INDEX_TYPES = {"full": True, "F": True, "shared": False, "S": False}
"""Whether a layer has an index of its own."""


def latent_config(settings: Settings, rope: Settings) -> LatentConfig:
    """Raises `ValueError` naming the key that is wrong or not supported."""
    integer = settings.integer
    query_rank = integer("q_lora_rank") if settings.get("q_lora_rank") else None
    nope, rotated, value = (integer(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
    if rotated % 2 or value > nope + rotated:
        raise ValueError(
            f"{settings.source}: query heads of {nope} + {rotated} dimensions with values of {value} are not "
            "supported"
        )
    scale, factor = (nope + rotated) ** -0.5, rope.number("factor", 1.0)
    if rope.get("mscale_all_dim") and factor > 1:  # the attention factor of YaRN covers `rotated` alone
        scale *= (0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1) ** 2
    return LatentConfig(query_rank, integer("kv_lora_rank"), nope, rotated, value, scale)


def indexed_latent_config(settings: Settings, rope: Settings, *, interleaved: bool) -> LatentConfig:
    """As `latent_config`, with an index. `interleaved`: where the configuration does not say."""
    shape, integer = latent_config(settings, rope), settings.integer
    size = integer("index_head_dim", 128)
    if shape.query_rank is None or size.bit_count() > 1 or size < shape.rope_dim:
        raise ValueError(
            f"{settings.source}: an index of {size} dimensions, {shape.rope_dim} of them rotated, with "
            f"q_lora_rank {shape.query_rank} is not supported"
        )
    index = IndexConfig(
        integer("index_n_heads", 64),
        size,
        integer("index_topk", 2048),
        bool(settings.get("indexer_rope_interleave", interleaved)),
        _without_index(settings),
    )
    return replace(shape, index=index)


def _without_index(settings: Settings) -> tuple[int, ...]:
    """The layers that take the choice of an earlier one."""
    count = settings.integer("num_hidden_layers")
    types = settings.get("indexer_types") or settings.get("index_topk_pattern")
    if not types:
        every = max(1, settings.integer("index_topk_freq", 1))
        first = settings.integer("index_skip_topk_offset", 2)
        types = ["F" if max(i - first + 1, 0) % every == 0 else "S" for i in range(count)]
    has_index = [INDEX_TYPES.get(str(kind)) for kind in types] if isinstance(types, str | list) else []
    if len(has_index) != count or None in has_index or not has_index[0]:
        raise ValueError(
            f"{settings.source}: indexer_types or index_topk_pattern must say which of the {count} layers "
            f"have an index, the first one among them, not {types!r}"
        )
    return tuple(i for i, indexed in enumerate(has_index) if not indexed)


def latent_experts(settings: Settings, first_dense: int, *, v2: bool = False) -> ExpertsConfig:
    """As `latent_config`. `first_dense`: how many layers come before those with experts, where the
    configuration does not say. `v2`: of DeepSeek-V2."""
    integer, size = settings.integer, settings.integer("moe_intermediate_size")
    count, chosen = integer("n_routed_experts"), integer("num_experts_per_tok")
    groups, groups_chosen = integer("n_group", 1), integer("topk_group", 1)
    scoring = Scoring.NORMALIZED_SIGMOID if settings.get("norm_topk_prob", True) else Scoring.SIGMOID
    if v2:
        scoring = Scoring.SOFTMAX
        if settings.get("topk_method", "greedy") == "greedy":
            groups = groups_chosen = 1
    in_group = 2 if scoring.is_biased and groups > 1 else 1
    if (
        count % groups or count // groups < in_group
        or not groups_chosen <= groups or chosen > count // groups * groups_chosen
    ):  # fmt: skip
        raise ValueError(
            f"{settings.source}: num_experts_per_tok {chosen} of {count} experts, in {groups_chosen} of "
            f"{groups} groups, is not supported"
        )
    return ExpertsConfig(
        count,
        chosen,
        size,
        scoring,
        layers_with_experts(settings, first_dense),
        shared_intermediate_size=size * integer("n_shared_experts", 1),
        groups=groups,
        groups_chosen=groups_chosen,
        scale=settings.number("routed_scaling_factor", 1.0),
    )


def layers_with_experts(settings: Settings, first_dense: int) -> tuple[int, ...]:
    """Raises `ValueError` naming the key that is wrong."""
    count, kinds = settings.integer("num_hidden_layers"), settings.get("mlp_layer_types")
    if not kinds:
        dense = settings.get("first_k_dense_replace")
        dense = first_dense if dense is None else dense
        kinds = [KINDS[i >= dense] for i in range(count)] if type(dense) is int else dense
    if not isinstance(kinds, list) or len(kinds) != count or any(x not in KINDS for x in kinds):
        raise ValueError(
            f"{settings.source}: mlp_layer_types or first_k_dense_replace must say which of the {count} "
            f"layers are dense, not {kinds!r}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "sparse")


def not_supported(settings: Settings, *, v2: bool = False) -> Iterator[str]:
    """What a model with latents has, and no model class can do. `v2`: of DeepSeek-V2."""
    methods = ("greedy", "group_limited_greedy") if v2 else ("noaux_tc",)
    supported = {
        "attention_bias": (False,),
        "attention_chunk_size": (0, []),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,) if v2 else (True, False),
        "rope_interleave": (True,),
        "scoring_func": ("softmax",) if v2 else ("sigmoid",),
        "sliding_window": (0, []),
        "topk_method": methods,
    }
    yield from settings.unlike(supported)
