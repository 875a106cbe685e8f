"""Images of requests, as vLLM's engine takes them: processed, at the places that their router has chosen.

vLLM's own processor makes of pixels what its encoder reads. A router has resized these already, so it changes
no size. A worker that fetches the KV of the images gets no pixels, and its encoder has nothing to do: it only
needs the grids, for the positions of the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.v1.engine.async_llm import AsyncLLM

from baton.engine import Image
from baton.engine.loader.hf_config import reader_of
from baton.kv_names import IMAGE_NAME_BYTES
from baton.vision.images import ImageSettings, Sizing, image_settings, processor_settings
from baton.vllm_worker.cached_blocks import identifier


def settings_of(llm: AsyncLLM, checkpoint: Path) -> ImageSettings | None:
    """How a vLLM worker takes images. None: it takes none. Raises ValueError for a checkpoint with settings
    that are not supported.

    Gemma takes none: the tokens of its images attend to each other. Behind a hit inside an image vLLM's
    scheduler may cut the rest, a bound of steps below an image holds it back, and vLLM's attention on CPUs
    does not know such images (docs/compatibility.md)."""
    multimodal = llm.model_config.multimodal_config
    if multimodal is None or not multimodal.get_limit_per_prompt("image") or checkpoint.is_file():
        return None
    read = reader_of(checkpoint)
    settings = image_settings(read("config.json"), processor_settings(read), str(checkpoint / "config.json"))
    return settings if settings is not None and settings.sizing is Sizing.ROUNDED else None


class Images:
    """Of one engine."""

    def __init__(self, llm: AsyncLLM, settings: ImageSettings) -> None:
        self.settings = settings
        self._llm = llm

    async def check(self) -> None:
        """Raises ValueError if vLLM makes other tokens of an image than routers do."""
        rows, columns = self.settings.grid(*self.settings.size(512, 512))
        pixels = bytes(self.settings.pixel_bytes(rows, columns))
        await self._processed([Image(bytes(IMAGE_NAME_BYTES), 0, rows, columns, pixels)])

    async def prompt(self, token_ids: list[int], images: Sequence[Image[bytes]]) -> dict[str, Any]:
        """Returns the input of vLLM's engine: these tokens with these images. Raises ValueError for images of
        which vLLM makes other tokens."""
        shown = all(image.pixels for image in images)
        items = await self._processed(images) if shown else [self._grid(image) for image in images]
        return {
            "type": "multimodal",
            "prompt_token_ids": token_ids,
            "mm_kwargs": MultiModalKwargsItems({"image": items}),
            "mm_hashes": {"image": [identifier(image.span) for image in images]},
            "mm_placeholders": {"image": [PlaceholderRange(image.start, image.tokens) for image in images]},
        }

    async def _processed(self, images: Sequence[Image[bytes]]) -> list[Any]:
        """What vLLM's encoder reads of each image."""
        pictures = await asyncio.to_thread(lambda: [self._picture(image) for image in images])
        given = {
            "prompt_token_ids": [self.settings.token_id] * len(images),
            "multi_modal_data": {"image": pictures},
            "multi_modal_uuids": {"image": [identifier(image.span) for image in images]},
        }
        made: Any = await self._llm.renderer.process_for_engine_async(given, arrival_time=0.0)
        counts = [place.get_num_embeds() for place in made["mm_placeholders"]["image"]]
        expected = [image.tokens for image in images]
        if counts != expected:
            raise ValueError(
                f"vLLM's processor makes {counts} tokens of images that have {expected}: leave out "
                "--mm-processor-kwargs of --vllm-args, or add --language-model-only"
            )
        return list(made["mm_kwargs"]["image"])

    def _picture(self, image: Image[bytes]) -> PIL.Image.Image:
        side = self.settings.side
        return PIL.Image.frombytes("RGB", (image.columns * side, image.rows * side), image.pixels)

    def _grid(self, image: Image[bytes]) -> MultiModalKwargsItem:
        merge = self.settings.merge_size
        grid = torch.tensor([1, image.rows * merge, image.columns * merge])
        field = MultiModalBatchedField(keep_on_cpu=True)  # else vLLM drops it, since no encoder needs it
        return MultiModalKwargsItem({"image_grid_thw": MultiModalFieldElem(grid, field)})
