"""Gemma 3: a text model, which takes images where the checkpoint has an encoder.

An image has as many tokens whatever its size: the encoder reads a square of pixels.
"""

import json
from collections.abc import Mapping
from typing import ClassVar

from baton.engine.loader.families.family import Family
from baton.engine.loader.rearranged import Rearranged
from baton.engine.loader.rope_config import local_rope
from baton.engine.loader.settings import Settings
from baton.engine.model_config import GeLU, VisionConfig
from baton.engine.models.vision import Gemma3WithImages
from baton.vision.images import ImageSettings

DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Of settings that published checkpoints leave out."""


class Gemma3Checkpoint(Rearranged):
    adds_one = True
    encoder: ClassVar[Mapping[str, str]] = {
        "vision_tower.vision_model.": "vision_tower.",  # in published checkpoints
        "vision_tower.": "vision_tower.",
        "multi_modal_projector.": "multi_modal_projector.",
    }


def vision_config(settings: Settings, _: Settings, images: ImageSettings) -> VisionConfig:
    """A token of an image sees all of it in all layers."""
    layers, tokens = settings.integer("num_hidden_layers"), settings.integer("mm_tokens_per_image", 256)
    tower = tower_of(settings, "gemma3", mm_tokens_per_image=tokens)
    return VisionConfig(images, tower, whole_layers=tuple(range(layers)))


def tower_of(settings: Settings, kind: str, **others: int) -> str:
    """As `VisionConfig.tower`. The encoder ends with embeddings of the size that the text model has."""
    text = {"hidden_size": settings.integer("hidden_size")}
    vision = settings.get("vision_config")
    fields = {"model_type": kind, "vision_config": vision, "text_config": text, **others}
    return json.dumps(fields, sort_keys=True)


FAMILY = Family(
    activation=GeLU(),
    model=Gemma3WithImages,
    checkpoint=Gemma3Checkpoint,
    settings=lambda settings: {**DEFAULTS, **settings.values},
    other_attention=local_rope,
    vision=vision_config,
    needs_vision=False,
)
