"""Models with multi-head latent attention: DeepSeek-V2 and V3 (R1, Kimi-K2), and GLM-4.7-Flash."""

import torch
from torch import Tensor

from baton.content.cache_kinds import LATENT, latent_head_dim
from baton.engine.kernels import LatentHeads, LatentNorm, LinearMethod
from baton.engine.layers.norm import InputNorm, RMSNorm
from baton.engine.layers.ranks import unsharded
from baton.engine.layers.weights import Stack, Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.cache_spec import AttentionCache, CacheSpec
from baton.engine.models.llama import AttendLatent, Llama

NORM_EPS = 1e-6
"""Of the norms of queries and latents, whatever the configuration says of the others."""


class LatentAttention:
    """A rank has some of the query heads. All ranks compute the same latents."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        latent = config.latent
        assert latent is not None, "the loader sets it for this architecture"
        heads = weights.ranks.shard(config.num_heads)
        self.head_dim = latent.nope_dim + latent.rope_dim
        hidden, queries = unsharded(config.hidden_size), heads.of(self.head_dim)
        first, rows = "q_proj", queries
        self.query: LinearMethod | None = None
        if latent.query_rank is not None:
            first, rows = "q_a_proj", unsharded(latent.query_rank)
            self.query = weights.linear([f"{name}.q_b_proj"], [queries], rows)
            norm = RMSNorm(weights, f"{name}.q_a_layernorm", latent.query_rank, NORM_EPS, summed=True)
            self.query_norm = InputNorm(weights, norm, self.query)
        names = [f"{name}.{first}", f"{name}.kv_a_proj_with_mqa"]
        self.input = weights.linear(names, [rows, unsharded(latent.size)], hidden)
        self.sizes = [rows.length, latent.rank, latent.rope_dim]
        self.norm = LatentNorm(weights.take(f"{name}.kv_a_layernorm.weight", (latent.rank,)), NORM_EPS)
        made = heads.of(latent.nope_dim + latent.value_dim)
        up = weights.format.dense(weights, Stack([f"{name}.kv_b_proj"], [made], unsharded(latent.rank)))
        self.heads = LatentHeads.of(up.unflatten(0, (heads.length, -1)), latent)
        self.out = weights.linear([f"{name}.o_proj"], [hidden], heads.of(latent.value_dim))

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: AttendLatent) -> Tensor:
        q, latent, shared = self.input(x).split(self.sizes, dim=1)
        if self.query is not None:
            q = self.query(self.query_norm(q))
        q = q.unflatten(1, (-1, self.head_dim))
        return self.out(attend(layer, q, latent, shared, self.norm, rotary, self.heads).flatten(1))


class DeepSeek(Llama):
    attention = LatentAttention
    shared_name = "shared_experts"

    @staticmethod
    def cache_spec(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        latent = config.latent
        assert latent is not None, "the loader sets it for this architecture"
        size = latent_head_dim(latent.rank, latent.size)
        return (AttentionCache(latent.size // size, size, kv_dtype, kind=LATENT),) * config.num_layers
