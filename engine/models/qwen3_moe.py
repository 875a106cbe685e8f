"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP, in all layers or some."""

from engine.layers.mlp import GatedMLP
from engine.layers.moe import MoE
from engine.layers.weights import Weights
from engine.model_config import ModelConfig
from engine.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    @staticmethod
    def mlp(config: ModelConfig, weights: Weights, layer: int) -> GatedMLP | MoE:
        if config.experts is None or layer not in config.experts.layers:
            return Qwen3.mlp(config, weights, layer)
        return MoE(config, config.experts, weights, f"model.layers.{layer}.mlp")
