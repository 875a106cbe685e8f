"""DeepSeek-V3.2 and GLM-5 (`glm_moe_dsa`): DeepSeek-V3 with an index, by which queries choose what they
attend to. In GLM-5 neighbours of the index are a pair that is rotated, and layers may share a choice."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from baton.engine.loader.families.family import Family
from baton.engine.loader.latent_config import indexed_latent_config, latent_experts, not_supported
from baton.engine.loader.settings import Settings
from baton.engine.models.deepseek import DeepSeek

INDEXED = {"indexed_attention"}, {"deepseek_sparse_attention"}
"""The attention that all layers have, as transformers calls it, and as its older versions do."""


def without_types(settings: Settings) -> Mapping[str, Any]:
    """Newer checkpoints name the attention of each layer."""
    types = settings.get("layer_types")
    all_indexed = isinstance(types, list) and {*map(str, types)} in INDEXED
    return {**settings.values, "layer_types": None} if all_indexed else settings.values


FAMILY = partial(
    Family,
    model=DeepSeek,
    settings=without_types,
    experts=partial(latent_experts, first_dense=3),
    not_supported=not_supported,
)
DEEPSEEK_V32 = FAMILY(latent=partial(indexed_latent_config, interleaved=False))
GLM_DSA = FAMILY(latent=partial(indexed_latent_config, interleaved=True))
