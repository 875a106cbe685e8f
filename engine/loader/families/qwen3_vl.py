"""Qwen3-VL, dense and with experts: a text model as Qwen3, which also takes images.

The encoder of images is a part of the checkpoint, under `model.visual.`. `vision` runs it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from baton.engine.loader.experts_config import qwen3_experts
from baton.engine.loader.families.family import Family
from baton.engine.loader.rearranged import Piece, Rearranged
from baton.engine.loader.settings import Settings
from baton.engine.model_config import VisionConfig
from baton.engine.models.vision import Qwen3VL
from baton.vision.images import ImageSettings

SECTIONS = [24, 20, 20]


class Qwen3VLCheckpoint(Rearranged):
    renamed: ClassVar[Mapping[str, str]] = {"model.language_model.": "model."}
    encoder: ClassVar[Mapping[str, str]] = {"model.visual.": ""}


def vision_config(settings: Settings, rope: Settings, images: ImageSettings) -> VisionConfig:
    """Raises `ValueError` naming the setting that is wrong."""
    tower, source = settings.get("vision_config"), settings.source
    sections = Settings({"mrope_section": SECTIONS, **rope.values}, source).integers("mrope_section")
    if len(sections) != 3 or min(sections) < 0:
        raise ValueError(f"{source}: mrope_section must have 3 numbers from 0 on, not {sections}")
    if rope.get("mrope_interleaved", True) is not True:
        raise ValueError(f"{source}: mrope_interleaved {rope.get('mrope_interleaved')!r} is not supported")
    layers = Settings(tower, source).integers("deepstack_visual_indexes")
    if len(layers) > settings.integer("num_hidden_layers"):
        raise ValueError(f"{source}: deepstack_visual_indexes has more entries than the model has layers")
    return VisionConfig(
        images,
        json.dumps(tower, sort_keys=True),
        sections=(sections[0], sections[1], sections[2]),
        deepstack=len(layers),
    )


class Qwen3VLMoeCheckpoint(Qwen3VLCheckpoint):
    """The experts of a layer have one tensor: [experts, hidden_size, 2 · inner] and [experts, inner,
    hidden_size] as published, or with rows and columns exchanged as transformers 5 writes it."""

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        shape, experts = self._files.shape(stored), self.config.experts
        assert experts is not None, "the loader sets it for this architecture"
        rows = 2 * experts.intermediate_size if name.endswith("gate_up_proj") else self.config.hidden_size
        transposed = shape[-1:] == (rows,)
        yield from self._fused_experts(name, stored, transposed=transposed) or super()._split(name, stored)


def with_experts(settings: Settings) -> Mapping[str, Any]:
    """The weights of chosen experts have a sum of 1."""
    return {**settings.values, "norm_topk_prob": True}


DENSE = Family(model=Qwen3VL, checkpoint=Qwen3VLCheckpoint, vision=vision_config)
MOE = replace(DENSE, checkpoint=Qwen3VLMoeCheckpoint, settings=with_experts, experts=qwen3_experts)
