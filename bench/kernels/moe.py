"""The cases of a mixture of experts: index shuffling, and the products of all experts.

Torch multiplies by `torch._grouped_mm`, of rows that are sorted already, without SwiGLU and without the sum
over a token's experts. Cases named `loop` are cuBLAS products of one expert after the other, of the same
rows.

The products of Llama-4's shapes have as many rows for each expert. They and the sizes of index shuffling are
those of MetaShuffling (Meta 2025). `grouped_fp8` has weights and rows in FP8, with scales of rows, and
`grouped_fp8_blocks` with scales of blocks of 128 × 128. The others have random routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.bench.kernels.cases import Case, Make, nbytes
from baton.engine.kernels import FP8_GROUP, Fp8Experts, Kernels
from baton.engine.kernels.moe.combine import combine
from baton.engine.kernels.moe.grouped_linear import grouped_linear
from baton.engine.kernels.moe.shuffle import Shuffled, shuffle
from baton.engine.model_config import Scoring

SCORING = Scoring.NORMALIZED_SOFTMAX
LAYERS = 16  # that a measured call of index shuffling is for


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The sizes of one layer. The defaults are those of Qwen3-30B-A3B."""

    experts: int = 128
    chosen: int = 8
    hidden: int = 2048
    inner: int = 768
    tokens: tuple[int, ...] = (1, 8, 64, 256, 2000, 8000)
    groups: tuple[tuple[int, int], ...] = ((16, 8), (128, 1), (16, 1024))
    """(experts, rows of each) of the products with Llama-4's sizes."""
    group_out: int = 2048
    group_in: int = 5120
    shuffles: tuple[tuple[int, int], ...] = ((128, 16), (128, 128), (4096, 16), (4096, 128))
    """(tokens, experts) of index shuffling with one expert for each token, as in Llama-4."""
    dtype: torch.dtype = torch.bfloat16


class MoeCases:
    """All cases of a shape on a device."""

    def __init__(self, shape: MoeShape, device: torch.device) -> None:
        self.shape, self.device = shape, device

    def __iter__(self) -> Iterator[Make]:
        shape = self.shape
        for tokens, experts in shape.shuffles:
            yield partial(self.shuffle, tokens, experts, 1)
        for tokens in shape.tokens:
            yield partial(self.shuffle, tokens, shape.experts, shape.chosen)
        for experts, rows in shape.groups:
            for loop in (False, True):
                yield partial(self.even, experts, rows, loop=loop)
            for blocks in (False, True):
                yield partial(self.even_fp8, experts, rows, blocks=blocks)
        for tokens in shape.tokens:
            for loop in (False, True):
                yield partial(self.gate_up, tokens, loop=loop)
                yield partial(self.down, tokens, loop=loop)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.shape.dtype)

    def routes(self, layers: int, tokens: int, experts: int) -> tuple[Tensor, Tensor]:
        """Logits of some layers' routers, and zeros to count the tokens of each expert."""
        logits = self.normal(layers, tokens, experts)
        return logits, torch.zeros(layers, experts, dtype=torch.int32, device=self.device)

    def shuffle(self, tokens: int, experts: int, chosen: int) -> Case:
        """A step clears the counts of all its layers at once, so a call is for several layers."""
        logits, counts = self.routes(LAYERS, tokens, experts)

        def ours() -> object:
            counts.zero_()
            return [shuffle(*layer, chosen, SCORING) for layer in zip(logits, counts, strict=True)]

        def of_layer(logits: Tensor) -> object:
            _, found = logits.softmax(dim=-1, dtype=torch.float32).topk(chosen, dim=-1)
            return found.flatten().sort()

        return Case(
            f"shuffle.t{tokens}.e{experts}.top{chosen}",
            nbytes(logits) + LAYERS * 8 * tokens * chosen + nbytes(counts),
            0,
            ours,
            lambda: [of_layer(layer) for layer in logits],
            "torch softmax, topk, sort",
            repeats=LAYERS,
        )

    def even(self, experts: int, rows: int, *, loop: bool) -> Case:
        """Products with as many rows for each expert."""
        x = self.normal(experts * rows, self.shape.group_in)
        shuffled = self._even(experts, rows)
        return self._product(f"grouped.g{experts}x{rows}", x, self.shape.group_out, shuffled, loop=loop)

    def even_fp8(self, experts: int, rows: int, *, blocks: bool) -> Case:
        """The same in FP8, with scales of rows or of blocks of 128 × 128. Half of the operations count, since
        a GPU multiplies twice as much in FP8."""
        tokens, size, inner = experts * rows, self.shape.group_out, self.shape.group_in
        x, weights = (
            Kernels().quantize(self.normal(n, inner), grouped=blocks) for n in (tokens, experts * size)
        )
        scales = weights.scales.view(experts, size, -1).transpose(1, 2)
        if blocks and size % FP8_GROUP == 0:
            scales = scales[..., ::FP8_GROUP]
        weight = Fp8Experts(weights.values.view(experts, size, inner), scales.contiguous())
        shuffled = self._even(experts, rows)
        return Case(
            f"grouped_fp8{'_blocks' if blocks else ''}.g{experts}x{rows}",
            tokens * inner + experts * size * inner + tokens * size * self.shape.dtype.itemsize,
            tokens * size * inner,
            lambda: grouped_linear(x, weight, shuffled, dtype=self.shape.dtype, weighted=False),
        )

    def _even(self, experts: int, rows: int) -> Shuffled:
        tokens, device = experts * rows, self.device
        counts = torch.full((experts,), rows, dtype=torch.int32, device=device)
        pairs = torch.zeros(experts, tokens, dtype=torch.int32, device=device)
        pairs[:, :rows] = torch.arange(tokens, device=device).view(experts, rows)
        return Shuffled(torch.ones(tokens, 1, device=device), counts, pairs, experts)

    def gate_up(self, tokens: int, *, loop: bool) -> Case:
        x = self.normal(tokens, self.shape.hidden)
        return self._product(
            f"moe_gate_up.t{tokens}", x, 2 * self.shape.inner, self._routed(tokens), loop=loop, gated=True
        )

    def down(self, tokens: int, *, loop: bool) -> Case:
        x = self.normal(tokens * self.shape.chosen, self.shape.inner)
        return self._product(
            f"moe_down.t{tokens}", x, self.shape.hidden, self._routed(tokens), loop=loop, combined=True
        )

    def _routed(self, tokens: int) -> Shuffled:
        (logits,), (counts,) = self.routes(1, tokens, self.shape.experts)
        return shuffle(logits, counts, self.shape.chosen, SCORING)

    def _product(
        self,
        name: str,
        x: Tensor,
        size: int,
        shuffled: Shuffled,
        *,
        loop: bool,
        gated: bool = False,
        combined: bool = False,
    ) -> Case:
        """The products of x with the weights [size, in] of all experts, or the same in a loop."""
        (tokens, chosen), experts, inner = shuffled.weights.shape, len(shuffled.counts), x.shape[1]
        weight = self.normal(experts, size, inner)
        counts = shuffled.counts.tolist()
        lists = [pairs[:count] for pairs, count in zip(shuffled.pairs, counts, strict=True)]
        rows = torch.cat(lists).long() // (chosen if len(x) == tokens else 1)
        ordered, ends = x[rows], shuffled.counts.cumsum(0).int()

        def ours() -> object:
            y = grouped_linear(x, weight, shuffled, dtype=x.dtype, weighted=False, gated=gated)
            return combine(y, shuffled.weights, None, weighted=True) if combined else y

        def one_by_one() -> object:
            parts = zip(ordered.split(counts), weight, strict=True)
            return [F.linear(part, of_expert) for part, of_expert in parts if len(part)]

        def theirs() -> object:
            return torch._grouped_mm(ordered, weight.transpose(1, 2), offs=ends)

        out = (tokens if combined else len(rows)) * size * x.itemsize // (2 if gated else 1)
        moved = nbytes(x) + sum(count > 0 for count in counts) * size * inner * x.itemsize + out
        flops = 2 * len(rows) * size * inner
        if loop:
            return Case(f"{name}.loop", moved, flops, one_by_one)
        against: Callable[[], object] | None = None
        if hasattr(torch, "_grouped_mm") and x.dtype is torch.bfloat16:
            against = theirs
        return Case(name, moved, flops, ours, against, "torch._grouped_mm, rows sorted")
