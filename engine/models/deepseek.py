"""Models with multi-head latent attention: DeepSeek-V2 and V3 (R1, Kimi-K2), and GLM-4.7-Flash. DeepSeek-V3.2
and GLM-5 have an index beside it."""

from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import FP8, Index, IndexLayer, LatentHeads, LatentNorm, LinearMethod
from baton.engine.kernels.attention.index import hadamard
from baton.engine.layers.norm import InputNorm, RMSNorm
from baton.engine.layers.partly_quantized import product
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Stack, Weights
from baton.engine.model_config import IndexConfig, ModelConfig
from baton.engine.models.cache_spec import AttentionCache, CacheSpec, IndexedLatentCache
from baton.engine.models.llama import AttendLatent, Llama
from baton.kv_names.cache_kinds import INDEX, LATENT, latent_head_dim

NORM_EPS = 1e-6
"""Of the norms of queries and latents, whatever the configuration says of the others."""


class LatentAttention:
    """A rank has some of the query heads. All ranks compute the same latents, and the same index."""

    def __init__(
        self, config: ModelConfig, weights: Weights, name: str, index: IndexConfig | None = None
    ) -> None:
        """`index`: that of this layer. None: it has none."""
        latent = config.latent
        assert latent is not None, "the loader sets it for this architecture"
        heads = weights.ranks.shard(config.num_heads)
        self.head_dim = latent.nope_dim + latent.rope_dim
        hidden, queries = unsharded(config.hidden_size), heads.of(self.head_dim)
        of_index: list[tuple[str, Shard]] = []
        if index is not None:
            sizes = {"wk": index.head_dim, "weights_proj": index.num_heads}
            of_index = [(f"indexer.{part}", unsharded(size)) for part, size in sizes.items()]
        first, rows = "q_proj", queries
        self.query: LinearMethod | None = None
        if latent.query_rank is not None:
            first, rows = "q_a_proj", unsharded(latent.query_rank)
            of_queries = [("q_b_proj", queries)]
            if index is not None:
                of_queries.append(("indexer.wq_b", unsharded(index.num_heads * index.head_dim)))
            self.query = product(weights, name, of_queries[:1], of_queries[1:], rows, bias=False)
            norm = RMSNorm(weights, f"{name}.q_a_layernorm", latent.query_rank, NORM_EPS, summed=True)
            self.query_norm = InputNorm(weights, norm, self.query)
            self.query_sizes = [part.length for _, part in of_queries]
        parts = [(first, rows), ("kv_a_proj_with_mqa", unsharded(latent.size)), *of_index[:1]]
        self.input = product(weights, name, parts, of_index[1:], hidden, bias=False)
        self.sizes = [rows.length, latent.rank, latent.rope_dim, *(part.length for _, part in of_index)]
        self.norm = LatentNorm(weights.take(f"{name}.kv_a_layernorm.weight", (latent.rank,)), NORM_EPS)
        made = heads.of(latent.nope_dim + latent.value_dim)
        up = weights.format.dense(weights, Stack([f"{name}.kv_b_proj"], [made], unsharded(latent.rank)))
        self.heads = LatentHeads.of(up.unflatten(0, (heads.length, -1)), latent)
        self.out = weights.linear([f"{name}.o_proj"], [hidden], heads.of(latent.value_dim))
        self.index = None if index is None else _index_layer(weights, f"{name}.indexer", index)

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: AttendLatent) -> Tensor:
        q, latent, shared, *of_index = _split(self.input(x), self.sizes)
        index = None
        if self.query is not None:
            q, *of_queries = _split(self.query(self.query_norm(q)), self.query_sizes)
            if self.index is not None:
                (queries,), (keys, weights) = of_queries, of_index
                index = Index(queries.unflatten(1, (weights.shape[1], -1)), keys, weights, self.index)
        q = q.unflatten(1, (-1, self.head_dim))
        return self.out(attend(layer, q, latent, shared, self.norm, rotary, self.heads, index).flatten(1))


def _split(made: Any, sizes: list[int]) -> list[Tensor]:
    """The parts of a product. The last one is apart if only the others are quantized."""
    if isinstance(made, Tensor):
        return [*made.split(sizes, dim=1)]
    return [*made[0].split(sizes[:-1], dim=1), made[1]]


def _index_layer(weights: Weights, name: str, index: IndexConfig) -> IndexLayer:
    size, dtype = index.head_dim, weights.dtype
    norm, bias = (weights.take(f"{name}.k_norm.{part}", (size,)) for part in ("weight", "bias"))
    turn = None if dtype is torch.float32 else hadamard(size).to(weights.device, dtype)
    return IndexLayer(norm, bias, index.interleaved, turn)


class DeepSeek(Llama):
    attention = LatentAttention
    shared_name = "shared_experts"

    @classmethod
    def mixer(cls, config: ModelConfig, weights: Weights, layer: int) -> Any:
        latent, index = config.latent, None
        if latent is not None and latent.index is not None and layer not in latent.index.without:
            index = latent.index
        return cls.attention(config, weights, f"model.layers.{layer}.self_attn", index)

    @staticmethod
    def cache_spec(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        latent = config.latent
        assert latent is not None, "the loader sets it for this architecture"
        size = latent_head_dim(latent.rank, latent.size)
        plain = AttentionCache(latent.size // size, size, kv_dtype, kind=LATENT)
        if latent.index is None:
            return (plain,) * config.num_layers
        of_index = dtype if dtype is torch.float32 else FP8
        indexed = IndexedLatentCache(plain, AttentionCache(1, latent.index.head_dim, of_index, kind=INDEX))
        without = latent.index.without
        return tuple(plain if layer in without else indexed for layer in range(config.num_layers))
