"""Step-3.7, the text model: windows in most layers, with more query heads and another rotation there, a gate
for each head of attention, and experts of which some layers bound their activations."""

from torch import Tensor

from baton.engine.layers.ranks import unsharded
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.llama import Attend, Llama, Qwen3Attention


class StepAttention(Qwen3Attention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        q, kv = self.q_heads.of(self.head_dim), self.kv_heads.of(self.head_dim)
        names = [f"{name}.{part}_proj" for part in "qkvg"]
        self.input = weights.linear(names, [q, kv, kv, self.q_heads], unsharded(config.hidden_size))

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        projected, heads = self.input(x), self.q_heads.length
        qkv = projected[:, :-heads].contiguous().unflatten(-1, (-1, self.head_dim))
        out = attend(layer, qkv, rotary, self.head_norm, None, self.scale)
        return self.out((out * projected[:, -heads:, None].sigmoid()).flatten(1))


class Step(Llama):
    attention = StepAttention
