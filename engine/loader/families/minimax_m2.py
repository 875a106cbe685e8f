"""MiniMax-M2: a norm of all query and of all key heads, rotary positions on a part of each head, and experts
in each layer."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton.engine.loader.experts_config import experts_config
from baton.engine.loader.families.family import Family
from baton.engine.loader.rearranged import FP8_FORMS, Rearranged, in_heads
from baton.engine.loader.settings import Settings
from baton.engine.model_config import ExpertsConfig, Scoring
from baton.engine.models.llama import Llama, Olmo2Attention


class MiniMaxM2(Llama):
    attention = Olmo2Attention


class MiniMaxM2Checkpoint(Rearranged):
    quantized: ClassVar[Collection[str]] = FP8_FORMS
    renamed: ClassVar[Mapping[str, str]] = {
        ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    }

    def _rows(self, kind: str) -> Mapping[str, Tensor]:
        heads = {"q_norm": self.config.num_heads, "k_norm": self.config.num_kv_heads}
        if kind not in heads:
            return super()._rows(kind)
        return {kind: in_heads(torch.arange(heads[kind] * self.config.head_dim), self._order)}


def in_words_of_others(settings: Settings) -> Mapping[str, Any]:
    fields = {"head_dim": 128, "rope_theta": 5e6, **settings.values}
    if settings.get("rotary_dim"):
        fields["partial_rotary_factor"] = settings.integer("rotary_dim") / settings.integer("head_dim", 128)
    return fields


def experts(settings: Settings) -> ExpertsConfig:
    return experts_config(settings, range(settings.integer("num_hidden_layers")), Scoring.NORMALIZED_SIGMOID)


def not_supported(settings: Settings) -> Iterator[str]:
    kinds = settings.get("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and all(each == 1 for each in kinds)):
        yield f"attn_type_list {kinds!r} of {settings.architecture}"
    supported = {
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    }
    yield from settings.unlike(supported)


FAMILY = Family(
    model=MiniMaxM2,
    checkpoint=MiniMaxM2Checkpoint,
    settings=in_words_of_others,
    rotated=1.0,
    experts=experts,
    not_supported=not_supported,
)
