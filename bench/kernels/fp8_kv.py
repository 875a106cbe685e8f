"""The cases of a KV cache in FP8: attention at the shapes of the plain cases, and the kernels that write it.

Each case is compared with the same over a plain cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baton.bench.kernels.cases import Case, Cases, Make, Shape, nbytes
from baton.engine.kernels import FP8, KV, Fp8KV, Kernels


class _Fp8Caches(Cases):
    def cache(self, contexts: Sequence[int]) -> tuple[KV, Tensor]:
        plain, tables = super().cache(contexts)
        assert isinstance(plain, Tensor), "the cache that is quantized here"
        scales = plain.abs().amax(dim=-1).float().transpose(2, 3).contiguous() / torch.finfo(FP8).max
        return Fp8KV((plain / scales.transpose(2, 3)[..., None]).to(FP8), scales), tables


class Fp8KVCases:
    """All cases of a shape on a device."""

    def __init__(self, shape: Shape, kernels: Kernels, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.plain, self.fp8 = Cases(shape, kernels, device), _Fp8Caches(shape, kernels, device)

    def __iter__(self) -> Iterator[Make]:
        shape = self.shape
        for batch in shape.batches:
            yield partial(self.decode, f"b{batch}", [shape.context] * batch)
        longest, batch = 16 * shape.context, shape.batches[len(shape.batches) // 2]
        yield partial(self.decode, f"b{batch}.ragged", [longest] + [shape.context // 2] * (batch - 1))
        for tokens in shape.prompts:
            yield partial(self.prefill, 0, tokens)
        yield partial(self.prefill, 3 * shape.prompts[0], shape.prompts[0])
        for rows in (shape.batches[0], shape.batches[len(shape.batches) // 2], shape.prompts[0]):
            yield partial(self._against_plain, lambda cases, rows=rows: cases.rope_and_write(rows))
        yield self.convert

    def decode(self, name: str, contexts: Sequence[int]) -> Case:
        return self._against_plain(lambda cases: cases.decode(name, contexts), sum(contexts))

    def prefill(self, start: int, tokens: int) -> Case:
        return self._against_plain(lambda cases: cases.prefill(start, tokens), start + tokens)

    def _against_plain(self, make: Callable[[Cases], Case], read: int = 0) -> Case:
        """`read`: positions of the cache that the case reads."""
        plain, fp8 = make(self.plain), make(self.fp8)
        vectors = 2 * read * self.shape.kv_heads
        saved = vectors * (self.shape.head_dim * (self.shape.dtype.itemsize - FP8.itemsize) - 4)
        return replace(
            fp8, name=f"fp8_kv.{fp8.name}", bytes=fp8.bytes - saved, torch=plain.ours, torch_is="plain KV"
        )

    def convert(self) -> Case:
        """A slice of plain KV into the cache, against the same into a plain cache."""
        from baton.kv_transfer.device import copy_kernels
        from baton.kv_transfer.layout import Slice

        tokens, shape = self.shape.prompts[0], self.shape
        kv, tables = self.fp8.cache([tokens] * 4)
        assert isinstance(kv, Fp8KV)
        blocks, dense = tables[1].long(), self.plain.normal(2, tokens, shape.kv_heads, shape.head_dim)
        piece, heads = Slice(0, 0, shape.kv_heads, 0, tokens), (0, shape.kv_heads)
        line = copy_kernels.line_to_convert(*kv, blocks, dense.data_ptr(), piece, heads, 0)
        table = torch.tensor([line], device=self.device)

        def ours() -> None:
            copy_kernels.launch_converting(table, kv.values, shape.dtype, tokens * shape.kv_heads)
            _ = blocks, dense  # keeps them alive: the kernel has only their addresses

        plain = self.plain.scatter()
        moved = nbytes(dense) + dense.numel() + 4 * dense.numel() // shape.head_dim
        return Case(f"fp8_kv.convert.t{tokens}", moved, 0, ours, plain.ours, "scatter of plain KV")
