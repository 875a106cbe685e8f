"""Models that take images: embeddings of an encoder stand in place of tokens. In some models, positions for
rotation have three parts."""

import torch
from torch import Tensor

from baton.engine.kernels import Kernels
from baton.engine.layers.current_step import current_step
from baton.engine.layers.rotary import Rotary
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.gemma4 import Gemma4
from baton.engine.models.hybrids import Qwen3Next
from baton.engine.models.llama import Attend, Gemma3, Llama, Qwen3

TOWER = "visual."
"""The prefix of the weights of the encoder."""


class ImageRotary(Rotary):
    """Rotary positions of a step with images (interleaved M-RoPE, Qwen3-VL).

    Each frequency turns by one of three positions. Text has three equal ones, so it needs no more than a
    shift."""

    def __init__(self, rotary: Rotary, sections: tuple[int, int, int], kernels: Kernels) -> None:
        self.kernels = kernels
        self.has_positions, self.table = rotary.has_positions, rotary.table
        half = rotary.table.shape[-1] // 2
        axes = torch.zeros(half, dtype=torch.int64)
        for i in (1, 2):
            axes[i : 3 * sections[i] : 3] = i
        self._axes = axes.repeat(2).to(rotary.table.device)  # [head_dim]

    def at(self, positions: Tensor) -> Tensor:
        step = current_step()
        if step.rotary_shift is not None:
            positions = positions + step.rotary_shift
        rotary = super().at(positions)
        if (images := step.images) is not None:
            self.kernels.turn_images(rotary, images.index, images.positions, self.table, self._axes)
        return rotary


class TakesImages(Llama):
    """A base beside a model, which gives it the embeddings and the positions of images."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.kernels = weights.kernels
        self.tower: dict[str, Tensor] = {}
        """The weights of the encoder. The engine takes them."""
        if (vision := config.vision) is not None:
            if vision.sections is not None:
                self.rotary = ImageRotary(self.rotary, vision.sections, weights.kernels)
            self.tower = weights.below(TOWER)

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        residual, delta = super().embed(token_ids)
        if (images := current_step().images) is not None:
            self.kernels.place_images(residual, images.index, images.features, 0)
            if delta is not None:  # a term of the embedding of a token
                delta.masked_fill_((images.index >= 0)[:, None], 0)
        return residual, delta


class Qwen3VL(TakesImages, Qwen3):
    """Qwen3-VL: Qwen3 with images. Features of an image are added behind the first layers."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.deepstack = 0 if config.vision is None else config.vision.deepstack

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        images = current_step().images
        residual, delta = self.embed(token_ids)
        rotary = self.rotary.at(positions)
        for i, layer in enumerate(self.layers):
            delta = layer(i, residual, delta, rotary, attend)
            if images is not None and i < self.deepstack:
                self.kernels.place_images(residual, images.index, images.features, i + 1, added=True)
        return self.norm(residual, delta)


class Qwen3_5(TakesImages, Qwen3Next):
    """Qwen3.5: Qwen3-Next, which takes images where the checkpoint has an encoder."""


class Gemma3WithImages(TakesImages, Gemma3):
    """Gemma 3, which takes images where the checkpoint has an encoder."""


class Gemma4WithImages(TakesImages, Gemma4):
    """Gemma 4, which takes images where the checkpoint has an encoder."""

    def layer_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """At the positions of an image, the table gives that of padding."""
        if (images := current_step().images) is not None:
            token_ids = token_ids.masked_fill(images.index >= 0, self.pad_id)
        return super().layer_inputs(token_ids, embedded)
