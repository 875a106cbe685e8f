"""Qwen3, dense: Llama with every query and key head normalised before it is rotated."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_config import ModelConfig
from engine.models.llama import Llama, LlamaAttention
from engine.weights import Weights


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        q_scale = weights.take(f"{name}.q_norm.weight", (self.head_dim,))
        k_scale = weights.take(f"{name}.k_norm.weight", (self.head_dim,))
        self.scale = torch.stack([q_scale] * self.num_heads + [k_scale] * self.num_kv_heads)
        self.eps = config.rms_norm_eps

    def normalise(self, qk: Tensor) -> Tensor:
        return F.rms_norm(qk, (self.head_dim,), eps=self.eps) * self.scale


class Qwen3(Llama):
    attention = Qwen3Attention
