"""The cases of latent attention: decodes of many positions, and chunks of a prompt in both forms."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from baton.bench.lab.kernels.cases import Case, Cases, Make
from baton.engine.kernels import FP8, KV, AttentionMetadata, Fp8KV, LatentHeads, parts
from baton.engine.kernels.attention import latent_tiling
from baton.engine.kernels.launch import multiprocessors
from baton.engine.model_config import LatentConfig
from baton.kv_names.cache_kinds import latent_head_dim


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of one layer. The defaults are those of DeepSeek-V2-Lite and of DeepSeek-V3."""

    heads: tuple[int, ...] = (16, 128)
    rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 8000
    chunks: tuple[int, ...] = (64, 128, 192, 256, 512, 2000)
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    """Of the cache."""


class LatentCases(Cases[LatentShape]):
    def __iter__(self) -> Iterator[Make]:
        for heads in self.shape.heads:
            for batch in self.shape.batches:
                name = f"absorbed_decode.h{heads}.b{batch}"
                yield partial(self.attention, name, heads, batch, 1, absorbed=True)
            for tokens in self.shape.chunks:
                for form, absorbed in (("absorbed", True), ("expanded", False)):
                    name = f"{form}_chunk.h{heads}.t{tokens}"
                    yield partial(self.attention, name, heads, 1, tokens, absorbed=absorbed)

    def attention(self, name: str, heads: int, requests: int, tokens: int, *, absorbed: bool) -> Case:
        """The last `tokens` of each context: a decode, if it is one token."""
        shape, decodes = self.shape, requests if tokens == 1 else 0
        blocks = -(-shape.context // shape.block_size)
        tables = torch.randperm(requests * blocks).int().view(requests, blocks).to(self.device)
        size = shape.rank + shape.rope
        cut = latent_head_dim(shape.rank, size)
        plain = self.normal(1, requests * blocks, shape.block_size, size // cut, cut)
        kv: KV = plain
        if shape.fp8:
            kv = Fp8KV(plain.to(FP8), torch.ones(plain.transpose(2, 3).shape[:-1], device=self.device))
        q = self.normal(requests * tokens, heads, shape.nope + shape.rope)
        up = self.normal(heads, shape.nope + shape.value, shape.rank) / shape.rank**0.5
        config = LatentConfig(None, shape.rank, shape.nope, shape.rope, shape.value, 0.1)
        weights = LatentHeads.of(up, config)
        contexts = torch.full((requests,), shape.context, dtype=torch.int32, device=self.device)
        slots = torch.empty(0, dtype=torch.int64, device=self.device)  # no latent is written
        chunks = [] if decodes else [(shape.context - tokens, shape.context)]
        metadata = AttentionMetadata(shape.block_size, slots, tables, contexts, decodes, chunks)
        min_tokens = tokens + absorbed  # of an expanded chunk
        programs = multiprocessors(self.device)
        tiling = latent_tiling.tile_latent(
            metadata, heads, config, min_tokens, shape.dtype, programs, fp8=shape.fp8
        )
        pairs = requests * tokens * (shape.context - tokens // 2) * heads
        expanded = (shape.nope + shape.value) * shape.rank * heads
        flops = 2 * pairs * (2 * shape.rank + shape.rope) + 2 * expanded * requests * tokens
        if not absorbed:
            flops = 2 * pairs * (shape.nope + shape.rope + shape.value) + 2 * expanded * shape.context
        cached = sum(part.nbytes for part in parts(kv) if part is not None)
        moved = cached + 2 * (2 * q.numel() + up.numel())
        return Case(name, moved, flops, lambda: self.kernels.latent_attention(q, kv, tiling, weights))
