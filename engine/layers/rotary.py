"""Rotary position embedding."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.weights import Weights
from baton.engine.model_config import LongRopeScaling, ModelConfig, YarnScaling


class Rotary:
    """Rotary position embedding (Su 2021), in the half-split order of Hugging Face checkpoints.

    If only a part of a head is rotated, the pairs of dimensions that are not come last. Without positions the
    table has one row for all of them."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        head_dim = config.latent.rope_dim if config.latent else config.head_dim
        size = head_dim if config.rotary_dim is None else config.rotary_dim
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / max(1, size)
        frequencies = 1.0 / config.rope_theta**exponents
        frequencies = self._scaled(frequencies, config, weights)
        frequencies = F.pad(frequencies, (0, (head_dim - size) // 2))
        self.has_positions = size > 0
        count = config.max_model_len if self.has_positions else 1
        angles = torch.arange(count, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if isinstance(config.rope_scaling, YarnScaling | LongRopeScaling):
            cos *= config.rope_scaling.attention_factor
            sin *= config.rope_scaling.attention_factor
        # The sign of "rotate half" sits in the table.
        table = torch.stack((cos.repeat(1, 2), torch.cat((-sin, sin), dim=1)), dim=1)
        # The kernels of a CPU compute in the model's dtype, those of a GPU in float32.
        dtype = weights.dtype if weights.device.type == "cpu" else torch.float32
        self.table = table.to(weights.device, dtype)  # [positions or 1, 2, head_dim]

    @staticmethod
    def _scaled(frequencies: Tensor, config: ModelConfig, weights: Weights) -> Tensor:
        scaling = config.rope_scaling
        if scaling is None:
            return frequencies
        if isinstance(scaling, YarnScaling):
            return _yarn(frequencies, config, scaling)
        if isinstance(scaling, LongRopeScaling):
            return frequencies / torch.tensor(scaling.factors(config.max_model_len))
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        if scaling.kind == "tensor":
            return frequencies / weights.take("rope_freqs.weight", frequencies.shape).to(frequencies)
        turns = scaling.original_context * frequencies / (2 * math.pi)  # over the original context
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / scaling.factor

    def at(self, positions: Tensor) -> Tensor:
        """[tokens, 2, head_dim] for positions [tokens]: (cos θ, cos θ), then (−sin θ, sin θ). So x
        rotated by θ is x · first + (x with its halves exchanged) · second."""
        if not self.has_positions:
            positions = torch.zeros_like(positions)
        return self.table.index_select(0, positions)


def _yarn(frequencies: Tensor, config: ModelConfig, yarn: YarnScaling) -> Tensor:
    def index(turns: float) -> float:
        """Where the frequency with so many turns over the original context lies among the frequencies."""
        ratio = math.log(yarn.original_context / (turns * 2 * math.pi)) / math.log(config.rope_theta)
        return ratio * len(frequencies)

    first, last = index(yarn.beta_fast), index(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
    last += 0.001 * (first == last)
    divided = ((torch.arange(len(frequencies)) - first) / (last - first)).clamp(0, 1)
    return frequencies * (1 - divided) + frequencies / yarn.factor * divided
