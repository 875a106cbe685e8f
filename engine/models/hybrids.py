"""Models with state layers, which take the place of attention in most layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton.engine.layers.ranks import unsharded
from baton.engine.layers.state_mixers import GatedDeltaMixer, Mamba2Mixer
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig, StateConfig
from baton.engine.models.cache_spec import CacheSpec, StateCache
from baton.engine.models.llama import Attend, Llama, Qwen3Attention


class Bamba(Llama):
    """Llama with Mamba-2. A base beside another model gives the layers without states its attention."""

    state_mixer: ClassVar[Callable[[ModelConfig, StateConfig, Weights, str], Any]] = Mamba2Mixer
    state_name: ClassVar[str] = "mamba"

    @classmethod
    def cache_spec(
        cls, config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> tuple[CacheSpec, ...]:
        shape = config.state
        assert shape is not None, "the loader sets it for this architecture"
        attention = super().cache_spec(config, dtype, kv_dtype)
        state = StateCache(
            shape.conv_width - 1, shape.channels, shape.num_heads, shape.head_dim, shape.state_size, dtype,
            getattr(torch, shape.dtype),
        )  # fmt: skip
        return tuple(state if layer in shape.layers else cache for layer, cache in enumerate(attention))

    @classmethod
    def mixer(cls, config: ModelConfig, weights: Weights, layer: int) -> Any:
        state = config.state
        if state is None or layer not in state.layers:
            return super().mixer(config, weights, layer)
        return cls.state_mixer(config, state, weights, f"model.layers.{layer}.{cls.state_name}")


class GraniteMoeHybrid(Bamba):
    """Granite 4: Bamba with multipliers, and with a mixture of experts beside a shared one.

    Attention may have no positions (NoPE, Kazemnejad 2023). A layer adds its output times a factor to the
    residual stream. Here the stream is divided by this factor instead, so no layer multiplies. An RMSNorm has
    the same result for it, with its eps divided by the square of the factor."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        factors = config.multipliers
        assert factors is not None, "the loader sets it for this architecture"
        eps = config.rms_norm_eps / factors.residual**2
        super().__init__(replace(config, rms_norm_eps=eps), weights)
        self.logits_scale = 1 / factors.logits

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden * self.logits_scale)


class Qwen3NextAttention(Qwen3Attention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        columns = self.q_heads.of(self.head_dim)
        self.gate = weights.linear(
            [f"{name}.gate_proj"], [columns], unsharded(config.hidden_size), bias=config.attention_bias
        )

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        gate = self.gate(x).sigmoid_().unflatten(-1, (-1, self.head_dim))

        def attend_gated(*args: Any) -> Tensor:
            return attend(*args).mul_(gate)

        return super().__call__(layer, x, rotary, attend_gated)


class Qwen3Next(Bamba):
    """Qwen3-Next: Qwen3 with experts, and with the gated delta rule in place of attention in most layers. The
    other layers gate the output of attention (Qiu 2025)."""

    attention = Qwen3NextAttention
    state_mixer = GatedDeltaMixer
    state_name = "linear_attn"
    passes_norm = True
