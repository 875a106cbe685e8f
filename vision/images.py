"""What a model's processor makes of an image: its size in pixels, its grid of tokens, and its name.

A router decodes and resizes an image, and a worker encodes it. Both read these settings from the files of the
model. The arithmetic is that of transformers' processors (`Sizing`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

from baton.kv_names import IMAGE_NAME_BYTES, ImageSpan

Pixels = TypeVar("Pixels", bytes, memoryview)

MOST_RATIO = 200
"""Of the sides of an image."""
MOST_PIXELS = 1 << 24
"""Of the images of a request, when they are resized."""
PIXELS_PART = 1 << 20
"""Bytes of pixels in one message, at most."""
LOW_PIXELS = 512 * 512
"""Most of an image of low detail, as in OpenAI's API."""
CHANNELS = 3
"""Bytes of a pixel: red, green, blue."""
MEAN = [0.48145466, 0.4578275, 0.40821073]
STD = [0.26862954, 0.26130258, 0.27577711]
"""As in transformers, where the files of a model do not say it."""
BILINEAR, BICUBIC = 2, 3
"""Filters of Pillow, by which images are resized."""
GEMMA3, GEMMA4 = "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"
ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration": (151655, 14),
    "Qwen2_5_VLForConditionalGeneration": (151655, 14),
    "Qwen3VLForConditionalGeneration": (151655, 16),
    "Qwen3VLMoeForConditionalGeneration": (151655, 16),
    "Qwen3_5ForConditionalGeneration": (248056, 16),
    "Qwen3_5MoeForConditionalGeneration": (248056, 16),
    GEMMA3: (262144, 16),
    GEMMA4: (258880, 16),
}
"""The models of which Baton's engine takes images, by the names that checkpoints have in `architectures`: the
token of images, and pixels of a side of a patch, where the files of the model do not say them."""
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""The most tokens of an image that Gemma 4 may be given."""


class Image(NamedTuple, Generic[Pixels]):
    """An image in a prompt. A grid of tokens stands for it, row by row."""

    name: bytes
    """`IMAGE_NAME_BYTES` bytes: of its file, and of the settings that made its pixels."""
    start: int
    """The position of its first token."""
    rows: int
    columns: int
    pixels: Pixels
    """Red, green and blue of each pixel, row by row. Empty: its KV comes from another worker."""

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(self.start, self.stop, self.name)


class Sizing(StrEnum):
    """To which size an image is resized."""

    ROUNDED = "rounded"
    """Its own, rounded to whole tokens, between `min_pixels` and `max_pixels` (`smart_resize` of Qwen2-VL and
    later)."""
    SQUARE = "square"
    """A square of `max_pixels`, whatever the sides of the image are (Gemma 3)."""
    LARGEST = "largest"
    """The largest with its ratio of sides that has at most `max_pixels` (Gemma 4)."""


class Around(NamedTuple):
    """What the processor of a model writes around an image: a text, a token, the image, a token, the text."""

    written: int
    """The token that the chat template writes for an image."""
    begin: int
    end: int
    text: str


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
    sizing: Sizing = Sizing.ROUNDED
    resample: int = BICUBIC
    """The filter of Pillow."""
    around: Around | None = None
    """What the processor writes around an image. None: the chat template does that."""

    @property
    def side(self) -> int:
        """Pixels of a side of a token."""
        return self.patch_size * self.merge_size

    @property
    def of_low_detail(self) -> "ImageSettings":
        """Those for an image that a client wants to have few tokens."""
        if self.sizing is Sizing.SQUARE:
            return self
        if self.sizing is Sizing.LARGEST:
            fitting = (each * self.side**2 for each in SOFT_TOKENS)
            low = max((each for each in fitting if each <= LOW_PIXELS), default=LOW_PIXELS)
            return replace(self, max_pixels=min(self.max_pixels, low))
        most = max(self.min_pixels, min(self.max_pixels, LOW_PIXELS))
        return self if most == self.max_pixels else replace(self, max_pixels=most)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The size in pixels to which an image is resized: multiples of `side`. Raises `ValueError` for an
        image that is too narrow."""
        if self.sizing is Sizing.SQUARE:
            return math.isqrt(self.max_pixels), math.isqrt(self.max_pixels)
        if self.sizing is Sizing.LARGEST:
            return self._largest(height, width)
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

    def _largest(self, height: int, width: int) -> tuple[int, int]:
        side, factor = self.side, math.sqrt(self.max_pixels / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not rows and not columns:
            raise ValueError(f"an image of {width} × {height} pixels has no token")
        if not rows:
            rows, columns = 1, min(width // height, self.most_tokens)
        elif not columns:
            rows, columns = min(height // width, self.most_tokens), 1
        return rows * side, columns * side

    def takes(self, rows: int, columns: int) -> bool:
        """Whether an image may have this grid."""
        if self.sizing is Sizing.SQUARE:
            return rows == columns == math.isqrt(self.max_pixels) // self.side
        return self.sizing is Sizing.ROUNDED or rows * columns <= self.most_tokens

    @property
    def most_tokens(self) -> int:
        """Of an image."""
        return self.max_pixels // self.side**2

    def grid_within(self, pixels: int) -> tuple[int, int]:
        """A grid of about so many pixels, or the one that all images have."""
        pixels = self.max_pixels if self.sizing is Sizing.SQUARE else min(pixels, self.max_pixels)
        rows = max(1, math.isqrt(pixels) // self.side)
        return rows, max(1, pixels // self.side**2 // rows)

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


def processor_settings(files: Callable[[str], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The settings of the processor of images. `files` reads a file of the model by its name; a file that is
    missing is empty. Processors that transformers 5 saves have them in a file with all others."""
    settings = files(PREPROCESSOR) or files(PROCESSOR).get("image_processor")
    return settings if isinstance(settings, Mapping) else {}


def image_settings(
    config: Mapping[str, Any], processor: Mapping[str, Any], source: str
) -> ImageSettings | None:
    """Reads `config.json` and the settings of the processor of a model. None: Baton gives it no images.
    Raises `ValueError` naming `source` and the key that is wrong."""
    named = config.get("architectures")
    vision = config.get("vision_config")
    architectures = [name for name in named if name in ARCHITECTURES] if isinstance(named, list) else []
    if not architectures or not isinstance(vision, Mapping):
        return None
    reader = _Reader(config, vision, processor, source)
    read = {GEMMA3: reader.gemma3, GEMMA4: reader.gemma4}.get(architectures[0], reader.qwen)
    return read(*ARCHITECTURES[architectures[0]])


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the settings of one model. Raises as `image_settings`."""

    config: Mapping[str, Any]
    vision: Mapping[str, Any]
    processor: Mapping[str, Any]
    source: str

    def qwen(self, token: int, patch: int) -> ImageSettings:
        size, processor, vision = self._size, self.processor, self.vision
        return ImageSettings(
            self._token("image_token_id", token),
            self._number("patch_size", processor.get("patch_size"), vision.get("patch_size"), patch),
            self._number("merge_size", processor.get("merge_size"), vision.get("spatial_merge_size"), 2),
            self._number("temporal_patch_size", vision.get("temporal_patch_size"), 2),
            self._number("min_pixels", size.get("shortest_edge"), processor.get("min_pixels"), 56 * 56),
            self._number("max_pixels", size.get("longest_edge"), processor.get("max_pixels"), 28 * 28 * 1280),
            self._channels("image_mean", MEAN),
            self._channels("image_std", STD),
        )

    def gemma3(self, token: int, patch: int) -> ImageSettings:
        """Patches of a square are averaged, and make as many tokens in each row as there are rows."""
        side = self._number("image_size", self.vision.get("image_size"), 224)
        patch = self._number("patch_size", self.vision.get("patch_size"), patch)
        tokens = self._number("mm_tokens_per_image", self.config.get("mm_tokens_per_image"), 256)
        rows = math.isqrt(tokens)
        merge = side // (patch * rows)
        if rows**2 != tokens or merge * patch * rows != side:
            raise ValueError(
                f"{self.source}: mm_tokens_per_image {tokens} is not supported with image_size {side} and "
                f"patch_size {patch}"
            )
        if (sizes := {*self._size.values()}) not in (set(), {side}):
            raise ValueError(f"{self.source}: size {sorted(sizes)} of the processor is not image_size {side}")
        if self.processor.get("do_pan_and_scan"):
            raise ValueError(f"{self.source}: do_pan_and_scan is not supported: make it false")
        return ImageSettings(
            self._token("image_token_index", token),
            patch,
            merge,
            1,
            side**2,
            side**2,
            self._channels("image_mean", [0.5] * CHANNELS),
            self._channels("image_std", [0.5] * CHANNELS),
            Sizing.SQUARE,
            self._resample(BILINEAR),
            self._around("boi_token_index", "eoi_token_index", 256000, "\n\n"),
        )

    def gemma4(self, token: int, patch: int) -> ImageSettings:
        patch = self._number("patch_size", self.vision.get("patch_size"), patch)
        merge = self._number("pooling_kernel_size", self.vision.get("pooling_kernel_size"), 3)
        tokens = self._number("max_soft_tokens", self.processor.get("max_soft_tokens"), 280)
        pixels = tokens * (patch * merge) ** 2
        mean, std = [0.0] * CHANNELS, [1.0] * CHANNELS
        normalizes = bool(self.processor.get("do_normalize", False))
        token = self._token("image_token_id", token)
        around = self._around("boi_token_id", "eoi_token_id", 258882, "")
        return ImageSettings(
            token,
            patch,
            merge,
            1,
            pixels,
            pixels,
            self._channels("image_mean", mean) if normalizes else tuple(mean),
            self._channels("image_std", std) if normalizes else tuple(std),
            Sizing.LARGEST,
            self._resample(BICUBIC),
            around._replace(written=token),
        )

    @property
    def _size(self) -> Mapping[str, Any]:
        size = self.processor.get("size")
        return size if isinstance(size, Mapping) else {}

    def _number(self, key: str, *values: Any) -> int:
        value = next((x for x in values if x is not None), None)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.source}: {key} must be a positive integer, not {value!r}")
        return value

    def _token(self, key: str, default: int) -> int:
        other = key.replace("_id", "_index") if key.endswith("_id") else key.replace("_index", "_id")
        return self._number(key, self.config.get(key), self.config.get(other), default)

    def _around(self, begin: str, end: str, default_end: int, text: str) -> Around:
        first = self._token(begin, 255999)
        return Around(first, first, self._token(end, default_end), text)

    def _resample(self, default: int) -> int:
        value = self.processor.get("resample", default)
        if type(value) is not int or value not in range(6):
            raise ValueError(f"{self.source}: resample must be a filter of Pillow from 0 to 5, not {value!r}")
        return value

    def _channels(self, key: str, default: list[float]) -> tuple[float, ...]:
        values = self.processor.get(key, default)
        if (
            not isinstance(values, list)
            or len(values) != CHANNELS
            or not all(type(x) in (int, float) and 0 <= x < math.inf for x in values)
            or (key == "image_std" and not all(values))
        ):
            raise ValueError(f"{self.source}: {key} must be {CHANNELS} numbers above 0, not {values!r}")
        return tuple(map(float, values))
