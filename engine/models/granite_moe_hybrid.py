"""GraniteMoeHybrid (Granite 4): Bamba with multipliers, and with a mixture of experts beside a shared one.

Attention may have no positions (NoPE, Kazemnejad 2023). A layer adds its output times a factor to the
residual stream. Here the stream is divided by this factor instead, so no layer multiplies. An RMSNorm has the
same result for it, with its eps divided by the square of the factor.
"""

from dataclasses import replace

from torch import Tensor

from baton.engine.layers.mlp import GatedMLP
from baton.engine.layers.moe import MoE
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.bamba import Bamba


class GraniteMoeHybrid(Bamba):
    @staticmethod
    def mlp(config: ModelConfig, weights: Weights, layer: int) -> GatedMLP | MoE:
        if config.experts is None:
            return Bamba.mlp(config, weights, layer)
        return MoE(config, config.experts, weights, f"model.layers.{layer}.mlp")

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        factors = config.multipliers
        assert factors is not None, "the loader sets it for this architecture"
        eps = config.rms_norm_eps / factors.residual**2
        super().__init__(replace(config, rms_norm_eps=eps), weights)
        self.logits_scale = 1 / factors.logits

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden * self.logits_scale)
