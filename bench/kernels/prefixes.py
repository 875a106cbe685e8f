"""The cases of a common prefix: decodes that begin with the same blocks read these together, or alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from baton.bench.kernels.cases import Case, Cases, Make
from baton.engine.kernels import FP8, KV, AttentionMetadata, Fp8KV
from baton.engine.kernels.attention.pieces import Prefixes, most_pieces, partition
from baton.engine.kernels.launch import multiprocessors


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """The sizes of one layer, and of agents with one system prompt. The defaults are of Llama-3.1-8B."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = (8, 24, 64)
    context: int = 15500
    prefix: int = 4000
    members: tuple[int, ...] = (2, 4, 8)
    """Most requests that read the prefix together: with more, registers spill."""
    fp8: bool = False
    """Of the cache."""


class PrefixCases(Cases[PrefixShape]):
    def __iter__(self) -> Iterator[Make]:
        for batch in self.shape.batches:
            for members in self.shape.members:
                yield partial(self.decode, batch, self.shape.prefix, members)
            # What a step costs that may have groups, and has none.
            yield partial(self.decode, batch, 0, self.shape.members[-1])

    def decode(self, batch: int, prefix: int, members: int) -> Case:
        """Its bytes are those of the positions that a step must read at least."""
        shape = self.shape
        blocks, common = -(-shape.context // shape.block_size), prefix // shape.block_size
        tables = torch.randperm(batch * blocks).int().view(batch, blocks)
        tables[:, :common] = tables[0, :common].clone()
        plain = self.normal(2, batch * blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        kv: KV = plain
        if shape.fp8:
            scales = torch.ones(plain.transpose(2, 3).shape[:-1], device=self.device)
            kv = Fp8KV(plain.to(FP8), scales)
        q = self.normal(batch, shape.heads, shape.head_dim)
        of_requests = partial(torch.tensor, dtype=torch.int32, device=self.device)
        contexts = of_requests([shape.context] * batch)
        slots = torch.empty(0, dtype=torch.int64, device=self.device)  # no KV is written
        metadata = AttentionMetadata(shape.block_size, slots, tables.to(self.device), contexts, batch, [])
        alone = self.kernels.tile(metadata, shape.heads, shape.kv_heads, shape.dtype, None, shape.head_dim)
        groups = Prefixes(
            members,
            of_requests(range(batch) if common else [0] * batch),
            of_requests([common * shape.block_size] * batch),
        )
        most = most_pieces(batch, shape.kv_heads, multiprocessors(self.device), prefixes=True)
        together = replace(alone, pieces=partition(contexts, shape.kv_heads, most, prefixes=groups))
        position = 2 * shape.kv_heads * (shape.head_dim + 4 if shape.fp8 else 2 * shape.head_dim)  # bytes
        read = batch * shape.context - (batch - 1) * common * shape.block_size
        attend = partial(self.kernels.attention, q, kv, sinks=None, scale=shape.head_dim**-0.5)
        return Case(
            f"decode_attention.b{batch}.prefix{prefix}.members{members}",
            2 * q.numel() * q.itemsize + read * position,
            4 * batch * shape.context * shape.heads * shape.head_dim,
            lambda: attend(tiling=together),
            lambda: attend(tiling=alone),
            "each request alone",
        )
