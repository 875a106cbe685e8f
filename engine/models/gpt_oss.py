"""gpt-oss: Llama with sinks in attention, windows in every other layer, and a mixture of experts.

Router and experts have biases. The activation of the experts is `ClampedSwiGLU`.
"""

from baton.engine.layers.moe import MoE
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.llama import Llama, LlamaAttention


class GptOssAttention(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        self.sinks = weights.stack([f"{name}.sinks"], [[self.q_heads]])


class GptOss(Llama):
    attention = GptOssAttention

    @staticmethod
    def mlp(config: ModelConfig, weights: Weights, layer: int) -> MoE:
        assert config.experts is not None, "all layers have experts"
        return MoE(config, config.experts, weights, f"model.layers.{layer}.mlp", "router")
