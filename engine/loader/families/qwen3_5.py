"""Qwen3.5, dense and with experts.

It is Qwen3-Next with the projections of the gated delta rule in tensors of their own. It takes images as
Qwen3-VL does, if the checkpoint has an encoder.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton.engine.loader.experts_config import qwen3_next_experts
from baton.engine.loader.families.family import Family
from baton.engine.loader.families.qwen3_vl import Qwen3VLCheckpoint, vision_config
from baton.engine.loader.families.rearrangements import Qwen3NextCheckpoint
from baton.engine.loader.hybrid_config import gated_delta_config
from baton.engine.loader.rearranged import Piece
from baton.engine.loader.settings import Settings
from baton.engine.models.vision import Qwen3_5


class Qwen3_5Checkpoint(Qwen3NextCheckpoint):
    """`in_proj_qkv` has queries, keys and values of all heads. The experts of a layer may have tensors of
    their own, as in other families, or one: [experts, 2 · inner, hidden_size] and [experts, hidden_size,
    inner]."""

    renamed: ClassVar[Mapping[str, str]] = Qwen3VLCheckpoint.renamed
    encoder: ClassVar[Mapping[str, str]] = Qwen3VLCheckpoint.encoder

    def _rows(self, kind: str) -> Mapping[str, Tensor]:
        state = self.config.state
        assert state is not None, "the loader sets it for this architecture"
        if kind != "in_proj_qkv":
            return super()._rows(kind)
        keys = state.groups * state.state_size
        queries, of_keys, values = torch.arange(state.channels).split((keys, keys, state.inner_size))
        return {"in_proj_q": queries, "in_proj_k": of_keys, "in_proj_v": values}

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        yield from self._fused_experts(name, stored) or super()._split(name, stored)


def with_experts(settings: Settings) -> Mapping[str, Any]:
    """Every layer has experts, whose weights have a sum of 1."""
    size = settings.get("moe_intermediate_size")
    return {**settings.values, "intermediate_size": size, "norm_topk_prob": True}


def not_supported(settings: Settings) -> Iterator[str]:
    if settings.get("attn_output_gate", True) is not True:
        yield f"attn_output_gate {settings.get('attn_output_gate')!r} of {settings.architecture}"


DENSE = Family(
    model=Qwen3_5,
    checkpoint=Qwen3_5Checkpoint,
    rotated=0.25,
    state=gated_delta_config,
    further="mtp_num_hidden_layers",
    vision=vision_config,
    needs_vision=False,
    not_supported=not_supported,
)
MOE = replace(DENSE, settings=with_experts, experts=qwen3_next_experts)
