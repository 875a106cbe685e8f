"""The cases of a mixture of experts: index shuffling, and the products of all experts, of random routes.

Torch multiplies by `torch._grouped_mm`, of rows that are sorted already, without SwiGLU and without the sum
over a token's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.bench.kernels.cases import Case, Cases, Make, nbytes
from baton.engine.kernels.moe.combine import combine
from baton.engine.kernels.moe.grouped_linear import grouped_linear
from baton.engine.kernels.moe.shuffle import shuffle
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
    dtype: torch.dtype = torch.bfloat16


class MoeCases(Cases[MoeShape]):
    def __iter__(self) -> Iterator[Make]:
        for make in (self.shuffle, self.gate_up, self.down):
            for tokens in self.shape.tokens:
                yield partial(make, tokens)

    def routes(self, layers: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Logits of some layers' routers, and zeros to count the tokens of each expert."""
        experts = self.shape.experts
        logits = self.normal(layers, tokens, experts)
        return logits, torch.zeros(layers, experts, dtype=torch.int32, device=self.device)

    def shuffle(self, tokens: int) -> Case:
        """A step clears the counts of all its layers at once, so a call is for several layers."""
        chosen = self.shape.chosen
        logits, counts = self.routes(LAYERS, tokens)

        def ours() -> object:
            counts.zero_()
            return [shuffle(*layer, chosen, SCORING) for layer in zip(logits, counts, strict=True)]

        def of_layer(logits: Tensor) -> object:
            _, found = logits.softmax(dim=-1, dtype=torch.float32).topk(chosen, dim=-1)
            return found.flatten().sort()

        return Case(
            f"shuffle.t{tokens}.e{self.shape.experts}.top{chosen}",
            nbytes(logits) + LAYERS * 8 * tokens * chosen + nbytes(counts),
            0,
            ours,
            lambda: [of_layer(layer) for layer in logits],
            "torch softmax, topk, sort",
            repeats=LAYERS,
        )

    def gate_up(self, tokens: int) -> Case:
        x = self.normal(tokens, self.shape.hidden)
        return self._product(f"moe_gate_up.t{tokens}", tokens, x, 2 * self.shape.inner, gated=True)

    def down(self, tokens: int) -> Case:
        x = self.normal(tokens * self.shape.chosen, self.shape.inner)
        return self._product(f"moe_down.t{tokens}", tokens, x, self.shape.hidden, gated=False)

    def _product(self, name: str, tokens: int, x: Tensor, size: int, *, gated: bool) -> Case:
        """The products of x with the weights [size, in] of all experts. Those that are not `gated` are summed
        over the experts of a token."""
        (logits,), (zeros,) = self.routes(1, tokens)
        shuffled = shuffle(logits, zeros, self.shape.chosen, SCORING)
        chosen, inner = self.shape.chosen, x.shape[1]
        weight = self.normal(self.shape.experts, size, inner)
        counts = shuffled.counts.tolist()
        lists = [pairs[:count] for pairs, count in zip(shuffled.pairs, counts, strict=True)]
        rows = torch.cat(lists).long() // (chosen if len(x) == tokens else 1)
        ordered, ends = x[rows], shuffled.counts.cumsum(0).int()

        def ours() -> object:
            y = grouped_linear(x, weight, shuffled, dtype=x.dtype, weighted=False, gated=gated)
            return y if gated else combine(y, shuffled.weights, None, weighted=True)

        def theirs() -> object:
            return torch._grouped_mm(ordered, weight.transpose(1, 2), offs=ends)

        out = (len(rows) // 2 if gated else tokens) * size * x.itemsize
        moved = nbytes(x) + sum(count > 0 for count in counts) * size * inner * x.itemsize + out
        flops = 2 * len(rows) * size * inner
        against: Callable[[], object] | None = None
        if hasattr(torch, "_grouped_mm") and x.dtype is torch.bfloat16:
            against = theirs
        return Case(name, moved, flops, ours, against, "torch._grouped_mm, rows sorted")
