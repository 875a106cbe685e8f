"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP, in all layers or some."""

from baton.engine.layers.mlp import GatedMLP
from baton.engine.layers.moe import MoE
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    @staticmethod
    def mlp(config: ModelConfig, weights: Weights, layer: int) -> GatedMLP | MoE:
        if config.experts is None or layer not in config.experts.layers:
            return Qwen3.mlp(config, weights, layer)
        return MoE(config, config.experts, weights, f"model.layers.{layer}.mlp")
