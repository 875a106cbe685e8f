"""What a model's processor makes of an image: its size in pixels, its grid of tokens, and its name.

A router decodes and resizes an image, and a worker encodes it. Both read these settings from the files of the
model. The arithmetic is that of transformers' `smart_resize` (Qwen2-VL and later).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from baton.content import IMAGE_NAME_BYTES

MOST_RATIO = 200
"""Of the sides of an image."""
MOST_PIXELS = 1 << 24
"""Of the images of a request, when they are resized."""
PIXELS_PART = 1 << 20
"""Bytes of pixels that routers and workers send in one message."""
LOW_PIXELS = 512 * 512
"""Most of an image of low detail, as in OpenAI's API."""
CHANNELS = 3
"""Bytes of a pixel: red, green, blue."""
MEAN = [0.48145466, 0.4578275, 0.40821073]
STD = [0.26862954, 0.26130258, 0.27577711]
"""As in transformers, where the files of a model do not say it."""
ARCHITECTURES = {
    "Qwen3VLForConditionalGeneration": 151655,
    "Qwen3VLMoeForConditionalGeneration": 151655,
    "Qwen3_5ForConditionalGeneration": 248056,
    "Qwen3_5MoeForConditionalGeneration": 248056,
}
"""The models of which Baton's engine takes images, by the names that checkpoints have in `architectures`: the
token of images, where the files of the model do not say it."""


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """The settings of one model's processor of images."""

    token_id: int
    """The token that stands at each position of an image."""
    patch_size: int
    """Pixels of a side of a patch."""
    merge_size: int
    """Patches of a side of the square that becomes a token."""
    temporal_patch_size: int
    """Frames of a patch. A still image repeats its one frame."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    """Of each channel: (value / 255 − mean) / std is what the encoder reads."""
    std: tuple[float, ...]

    @property
    def side(self) -> int:
        """Pixels of a side of a token."""
        return self.patch_size * self.merge_size

    @property
    def of_low_detail(self) -> "ImageSettings":
        """Those for an image that a client wants to have few tokens."""
        most = max(self.min_pixels, min(self.max_pixels, LOW_PIXELS))
        return self if most == self.max_pixels else replace(self, max_pixels=most)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The size in pixels to which an image is resized: multiples of `side`. Raises `ValueError` for an
        image that is too narrow."""
        if max(height, width) > MOST_RATIO * min(height, width):
            raise ValueError(f"an image of {width} × {height} pixels is too narrow: at most {MOST_RATIO}:1")
        side = self.side
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / factor / side))
            columns = max(1, math.floor(width / factor / side))
        elif rows * columns * side * side < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * factor / side), math.ceil(width * factor / side)
        return rows * side, columns * side

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """The rows and columns of tokens of an image that has this size already."""
        return height // self.side, width // self.side

    def pixel_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the pixels of an image with this grid."""
        return rows * columns * self.side**2 * CHANNELS

    def name(self, file: bytes) -> bytes:
        """The name of an image: of the bytes of its file, and of all that makes tokens of them."""
        key = blake2b(repr(self).encode(), digest_size=32).digest()
        return blake2b(file, key=key, digest_size=IMAGE_NAME_BYTES).digest()


def image_settings(
    config: Mapping[str, Any], processor: Mapping[str, Any], source: str
) -> ImageSettings | None:
    """Reads `config.json` and `preprocessor_config.json` of a model. None: Baton gives it no images. Raises
    `ValueError` naming `source` and the key that is wrong."""
    named = config.get("architectures")
    vision = config.get("vision_config")
    known = [name for name in named if name in ARCHITECTURES] if isinstance(named, list) else []
    if not known or not isinstance(vision, Mapping):
        return None
    size = processor.get("size")
    size = size if isinstance(size, Mapping) else {}

    def number(key: str, *found: Any) -> int:
        value = next((x for x in found if x is not None), None)
        if type(value) is not int or value < 1:
            raise ValueError(f"{source}: {key} must be a positive integer, not {value!r}")
        return value

    def channels(key: str, default: list[float]) -> tuple[float, ...]:
        values = processor.get(key, default)
        if (
            not isinstance(values, list)
            or len(values) != CHANNELS
            or not all(type(x) in (int, float) and 0 < x < math.inf for x in values)
        ):
            raise ValueError(f"{source}: {key} must be {CHANNELS} numbers above 0, not {values!r}")
        return tuple(map(float, values))

    return ImageSettings(
        number("image_token_id", config.get("image_token_id"), ARCHITECTURES[known[0]]),
        number("patch_size", processor.get("patch_size"), vision.get("patch_size"), 16),
        number("merge_size", processor.get("merge_size"), vision.get("spatial_merge_size"), 2),
        number("temporal_patch_size", vision.get("temporal_patch_size"), 2),
        number("min_pixels", size.get("shortest_edge"), processor.get("min_pixels"), 56 * 56),
        number("max_pixels", size.get("longest_edge"), processor.get("max_pixels"), 28 * 28 * 1280),
        channels("image_mean", MEAN),
        channels("image_std", STD),
    )
