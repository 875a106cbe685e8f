"""Qwen3, dense or with experts: Llama with RMSNorm of each query and key head before rotation.

Gemma 3, the text model, is Qwen3 with norms after attention and after the MLP too, and with GeGLU. Most of
its layers attend within a window, and rotate with frequencies of their own.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import HeadNorm
from baton.engine.layers.rotary import Rotary
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.llama import Attend, Llama, LlamaAttention, Norms


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        q_scale = weights.take(f"{name}.q_norm.weight", (self.head_dim,))
        k_scale = weights.take(f"{name}.k_norm.weight", (self.head_dim,))
        scale = torch.stack([q_scale] * self.q_heads.length + [k_scale] * self.kv_heads.length)
        self.head_norm = HeadNorm(scale, config.rms_norm_eps)


class Qwen3(Llama):
    attention = Qwen3Attention


class Gemma3(Qwen3):
    norms = Norms(
        before_mixer="input_layernorm",
        after_mixer="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )

    gelu = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        local = config.local_rope
        assert local is not None, "the loader sets it for this architecture"
        assert self.embedding_scale is not None, "the loader sets the multipliers"
        # The model was trained with a factor in its dtype.
        self.embedding_scale = torch.tensor(self.embedding_scale, dtype=weights.dtype).item()
        self.local_layers = frozenset(local.layers)
        self.local_rotary = Rotary(replace(config, rope_theta=local.theta, rope_scaling=None), weights)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        of_local = self.local_rotary.at(positions)

        def attend_in(layer: int, qkv: Tensor, rotary: Tensor, *others: Any) -> Tensor:
            return attend(layer, qkv, of_local if layer in self.local_layers else rotary, *others)

        return super().__call__(token_ids, positions, attend_in)
