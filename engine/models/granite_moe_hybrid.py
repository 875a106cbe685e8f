"""GraniteMoeHybrid (Granite 4): Bamba with multipliers, and with a mixture of experts beside a shared one.

Attention may have no positions (NoPE, Kazemnejad 2023). A layer adds its output times a factor to the
residual stream. Here the stream is divided by this factor instead, so no layer multiplies. An RMSNorm has the
same result for it, with its eps divided by the square of the factor.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from baton.engine.layers.mlp import GatedMLP
from baton.engine.layers.moe import MoE
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig, Multipliers
from baton.engine.models.bamba import Bamba
from baton.engine.models.llama import Attend, LlamaAttention


def multipliers_of(config: ModelConfig) -> Multipliers:
    assert config.multipliers is not None, "the loader sets it for this architecture"
    return config.multipliers


class GraniteAttention(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        self.query_scale = multipliers_of(config).attention * config.head_dim**0.5

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        def attend_scaled(layer: int, qkv: Tensor, *others: Any) -> Tensor:
            qkv[:, : self.q_heads.length] *= self.query_scale
            return attend(layer, qkv, *others)

        return super().__call__(layer, x, rotary, attend_scaled)


class GraniteMoeHybrid(Bamba):
    attention = GraniteAttention

    @staticmethod
    def mlp(config: ModelConfig, weights: Weights, layer: int) -> GatedMLP | MoE:
        if config.experts is None:
            return Bamba.mlp(config, weights, layer)
        return MoE(config, config.experts, weights, f"model.layers.{layer}.mlp")

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        factors = multipliers_of(config)
        eps = config.rms_norm_eps / factors.residual**2
        super().__init__(replace(config, rms_norm_eps=eps), weights)
        self.embedding_scale = factors.embedding / factors.residual
        self.logits_scale = 1 / factors.logits

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        residual, delta = self.embedding(token_ids)
        (residual if delta is None else delta).mul_(self.embedding_scale)
        return residual, delta

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden * self.logits_scale)
