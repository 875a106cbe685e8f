"""OLMo 2: Llama with its norms after attention and the MLP, and RMSNorm of all query and of all key heads."""

from typing import Any

import torch
from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.llama import Attend, Llama, LlamaAttention, Norms


class Olmo2Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        self.eps = config.rms_norm_eps
        self.ranks = weights.ranks
        self.scales = [
            weights.stack([f"{name}.{norm}.weight"], [[heads.of(self.head_dim)]]).view(-1, self.head_dim)
            for norm, heads in (("q_norm", self.q_heads), ("k_norm", self.kv_heads))
        ]

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        def attend_normalized(layer: int, qkv: Tensor, *others: Any) -> Tensor:
            self._normalize(qkv)
            return attend(layer, qkv, *others)

        return super().__call__(layer, x, rotary, attend_normalized)

    def _normalize(self, qkv: Tensor) -> None:
        """Applies both norms, in place. With several ranks, each has some of the heads that a norm spans."""
        q, k, _ = qkv.split((self.q_heads.length, self.kv_heads.length, self.kv_heads.length), dim=1)
        squares = torch.stack([self._squares(*part) for part in ((q, self.q_heads), (k, self.kv_heads))])
        factors = (self.ranks.all_reduce(squares) + self.eps).rsqrt_()
        for heads, factor, scale in zip((q, k), factors, self.scales, strict=True):
            heads.copy_(heads * factor[:, None, None] * scale)

    def _squares(self, heads: Tensor, part: Part) -> Tensor:
        """This rank's term of the mean of the squares of all heads [tokens] float32."""
        holders = max(1, self.ranks.size // part.size)  # ranks with the same heads
        return heads.float().square().sum((1, 2)) / (part.size * self.head_dim * holders)


class Olmo2(Llama):
    attention = Olmo2Attention
    norms = Norms(
        before_mixer=None,
        after_mixer="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    )
