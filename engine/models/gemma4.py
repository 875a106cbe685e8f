"""Gemma 4, the text model: layers that attend to all tokens have other heads than those with windows, the
last layers read the KV of earlier ones, and a layer may have an input of its own from the token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels import HeadNorm
from baton.engine.layers.mlp import MLP
from baton.engine.layers.norm import RMSNorm
from baton.engine.layers.ranks import unsharded
from baton.engine.layers.weights import Weights
from baton.engine.model_config import GemmaConfig, ModelConfig
from baton.engine.models.cache_spec import CacheSpec, SharedCache
from baton.engine.models.llama import Attend, Gemma3, Llama, LlamaAttention

MOST_IN_FLOAT32 = 256
"""Numbers of a head, on a GPU."""


class Gemma4Attention(LlamaAttention):
    """Values are normalized without weights. `shared`: it has queries alone, and reads the KV of another
    layer. `k_is_v`: values are the keys before their norm."""

    def __init__(
        self, config: ModelConfig, weights: Weights, name: str, *, shared: bool, k_is_v: bool
    ) -> None:
        self.head_dim, self.scale = config.head_dim, 1.0
        self.q_heads = weights.ranks.shard(config.num_heads)
        self.kv_heads = weights.ranks.shard_with_copies(config.num_kv_heads)
        rows, of_kv = self.q_heads.of(config.head_dim), self.kv_heads.of(config.head_dim)
        hidden, values = unsharded(config.hidden_size), "k_proj" if k_is_v else "v_proj"
        names = ["q_proj"] if shared else ["q_proj", "k_proj", values]
        self.input = weights.linear(
            [f"{name}.{part}" for part in names], [rows, of_kv, of_kv][: len(names)], hidden
        )
        self.out = weights.linear([f"{name}.o_proj"], [hidden], rows)
        scales = [("q_norm", self.q_heads.length), ("k_norm", self.kv_heads.length)][: len(names)]
        taken = [
            [weights.take(f"{name}.{norm}.weight", (config.head_dim,))] * heads for norm, heads in scales
        ]
        self.head_norm = HeadNorm(
            torch.stack([scale for each in taken for scale in each]), config.rms_norm_eps
        )
        self.sinks = None
        self.shared = shared

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        qkv = self.input(x).unflatten(-1, (-1, self.head_dim))
        if not self.shared:
            v = qkv[:, -self.kv_heads.length :]
            assert self.head_norm is not None, "it is set above"
            v.copy_(F.rms_norm(v, (self.head_dim,), eps=self.head_norm.eps))
        return self.out(attend(layer, qkv, rotary, self.head_norm, None, self.scale).flatten(1))


class LayerInputs:
    """What each layer gets of a token: from a table, and from the embedding [tokens, layers, size]."""

    def __init__(self, config: ModelConfig, gemma: GemmaConfig, weights: Weights) -> None:
        self.size = gemma.layer_input
        columns = config.num_layers * self.size
        self.table = weights.take("model.embed_tokens_per_layer.weight", (gemma.layer_vocab, columns))
        self.factor = torch.tensor(self.size**0.5, dtype=weights.dtype).item()
        self.project = weights.linear(
            ["model.per_layer_model_projection"], [unsharded(columns)], unsharded(config.hidden_size)
        )
        self.scale = config.hidden_size**-0.5
        self.norm = weights.take("model.per_layer_projection_norm.weight", (self.size,))
        self.eps = config.rms_norm_eps

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        of_token = (F.embedding(token_ids, self.table) * self.factor).unflatten(1, (-1, self.size))
        projected = (self.project(embedded) * self.scale).unflatten(1, (-1, self.size))
        projected = F.rms_norm(projected, (self.size,), self.norm, self.eps)
        return (projected + of_token) * 2.0**-0.5


class LayerInput:
    """Adds a layer's input to the residual stream, gated by it."""

    def __init__(self, config: ModelConfig, size: int, weights: Weights, name: str) -> None:
        hidden = unsharded(config.hidden_size)
        self.gate = weights.linear([f"{name}.per_layer_input_gate"], [unsharded(size)], hidden)
        self.project = weights.linear([f"{name}.per_layer_projection"], [hidden], unsharded(size))
        norm = f"{name}.post_per_layer_input_norm"
        self.norm = RMSNorm(weights, norm, config.hidden_size, config.rms_norm_eps, summed=True)

    def __call__(self, residual: Tensor, x: Tensor) -> None:
        gated = F.gelu(self.gate(residual), approximate="tanh") * x
        residual.add_(self.norm(self.project(gated)))


class Gemma4(Gemma3):
    @staticmethod
    def cache_spec(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        spans = config.spans or (None,) * config.num_layers
        return tuple(
            cache if source == layer else SharedCache(source, spans[layer])
            for layer, (source, cache) in enumerate(
                zip(gemma_of(config).sources, Llama.cache_spec(config, dtype, kv_dtype), strict=True)
            )
        )

    @classmethod
    def mixer(cls, config: ModelConfig, weights: Weights, layer: int) -> Any:
        gemma, shape = gemma_of(config), config.of_layer(layer)
        name, shared = f"model.layers.{layer}.self_attn", gemma.sources[layer] != layer
        k_is_v = gemma.k_is_v and shape is not config
        return Gemma4Attention(shape, weights, name, shared=shared, k_is_v=k_is_v)

    @classmethod
    def mlp(cls, config: ModelConfig, weights: Weights, layer: int) -> MLP:
        gemma = gemma_of(config)
        wide = gemma.double_wide and gemma.sources[layer] != layer
        size = config.intermediate_size * (2 if wide else 1)
        return MLP(config, weights, f"model.layers.{layer}.mlp", size, config.activation)

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        gemma, other = gemma_of(config), config.other_attention
        assert other is not None, "the loader sets it for this architecture"
        on_gpu, size = weights.device.type != "cpu", other.head_dim or 0
        if on_gpu and weights.dtype is torch.float32 and size > MOST_IN_FLOAT32:
            raise ValueError(
                f"{weights.source}: a GPU has no room to attend with heads of {size} in float32; use --dtype "
                "bfloat16, or --device cpu"
            )
        super().__init__(config, weights)
        names = [f"model.layers.{layer}" for layer in range(config.num_layers)]
        self.scalars = [weights.take(f"{name}.layer_scalar", (1,)) for name in names]
        self.inputs: LayerInputs | None = None
        self.added: list[LayerInput] = []
        if size := gemma.layer_input:
            self.inputs = LayerInputs(config, gemma, weights)
            self.added = [LayerInput(config, size, weights, name) for name in names]
        self.softcap, self.pad_id = gemma.softcap, gemma.pad_id

    def layer_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """What each layer gets of a token. None: nothing."""
        return None if self.inputs is None else self.inputs(token_ids, embedded)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        residual, delta = self.embed(token_ids)
        assert delta is None, "the embedding is summed over ranks"
        inputs = self.layer_inputs(token_ids, residual)
        rotary = self.rotations(positions)
        for i, layer in enumerate(self.layers):
            delta = layer(i, residual, None, rotary[i in self.other_layers], attend)
            assert isinstance(delta, Tensor), "the layer normalizes what it adds"
            residual.add_(delta)
            if inputs is not None:
                self.added[i](residual, inputs[:, i])
            residual.mul_(self.scalars[i])
        return self.norm(residual)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if self.softcap is None else (logits / self.softcap).tanh_().mul_(self.softcap)


def gemma_of(config: ModelConfig) -> GemmaConfig:
    assert config.gemma is not None, "the loader sets it for this architecture"
    return config.gemma
