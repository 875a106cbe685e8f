"""Qwen3, dense: Llama with RMSNorm of each query and key head before rotation."""

import torch

from baton.engine.kernels import HeadNorm
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.llama import Llama, LlamaAttention


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        q_scale = weights.take(f"{name}.q_norm.weight", (self.head_dim,))
        k_scale = weights.take(f"{name}.k_norm.weight", (self.head_dim,))
        scale = torch.stack([q_scale] * self.q_heads.length + [k_scale] * self.kv_heads.length)
        self.head_norm = HeadNorm(scale, config.rms_norm_eps)


class Qwen3(Llama):
    attention = Qwen3Attention
