"""Qwen3-Next: Qwen3-MoE with the gated delta rule in place of attention in most layers.

The other layers gate the output of attention (Qiu 2025).
"""

from typing import Any

from torch import Tensor

from baton.engine.layers.gated_delta import GatedDeltaMixer
from baton.engine.layers.ranks import whole
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.bamba import Bamba
from baton.engine.models.llama import Attend
from baton.engine.models.qwen3 import Qwen3Attention
from baton.engine.models.qwen3_moe import Qwen3Moe


class Qwen3NextAttention(Qwen3Attention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        columns = self.q_heads.of(self.head_dim)
        self.gate = weights.linear(
            [f"{name}.gate_proj"], [columns], whole(config.hidden_size), bias=config.attention_bias
        )

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        gate = self.gate(x).sigmoid_().unflatten(-1, (-1, self.head_dim))

        def attend_gated(*args: Any) -> Tensor:
            return attend(*args).mul_(gate)

        return super().__call__(layer, x, rotary, attend_gated)


class Qwen3Next(Bamba):
    attention = Qwen3NextAttention
    mlp = staticmethod(Qwen3Moe.mlp)

    @classmethod
    def mixer(cls, config: ModelConfig, weights: Weights, layer: int) -> Any:
        mamba = config.mamba
        if mamba is None or layer not in mamba.layers:
            return super().mixer(config, weights, layer)
        return GatedDeltaMixer(config, mamba, weights, f"model.layers.{layer}.linear_attn")
