"""Bamba: Llama with Mamba-2 in place of attention in most layers."""

from typing import Any

import torch
from torch import Tensor

from baton.engine.layers.mamba2 import Mamba2Mixer, Mix
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.cache_spec import AttentionCache, CacheSpec, StateCache
from baton.engine.models.llama import Attend, Llama, LlamaAttention


class Bamba(Llama):
    @staticmethod
    def cache_spec(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        mamba = config.mamba
        assert mamba is not None, "the loader sets it for this architecture"
        attention = AttentionCache(config.num_kv_heads, config.head_dim, kv_dtype)
        state = StateCache(
            mamba.conv_width - 1, mamba.channels, mamba.num_heads, mamba.head_dim, mamba.state_size, dtype
        )
        return tuple(state if layer in mamba.layers else attention for layer in range(config.num_layers))

    @classmethod
    def mixer(cls, config: ModelConfig, weights: Weights, layer: int) -> Any:
        mamba = config.mamba
        if mamba is None or layer not in mamba.layers:
            return super().mixer(config, weights, layer)
        return Mamba2Mixer(config, mamba, weights, f"model.layers.{layer}.mamba")

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend, mix: Mix) -> Tensor:
        residual, delta = self.embed(token_ids)
        rotary = self.rotary.at(positions)
        for i, layer in enumerate(self.layers):
            caller = attend if isinstance(layer.mixer, LlamaAttention) else mix
            delta = layer(i, residual, delta, rotary, caller)
        return self.norm(residual, delta)
