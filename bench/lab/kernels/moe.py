"""The cases of a mixture of experts: the products of all experts, of random routes.

Torch multiplies by `torch._grouped_mm`, of rows that are sorted already, without SwiGLU and without the sum
over a token's experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.bench.lab.kernels.cases import Case, Cases, Make, nbytes
from baton.engine.kernels import Terms
from baton.engine.kernels.moe.combine import combine
from baton.engine.kernels.moe.experts import Choice
from baton.engine.kernels.moe.grouped_linear import grouped_linear
from baton.engine.kernels.moe.shuffle import shuffle
from baton.engine.model_config import Scoring


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
        for make in (self.gate_up, self.down):
            for tokens in self.shape.tokens:
                yield partial(make, tokens)

    def gate_up(self, tokens: int) -> Case:
        x = self.normal(tokens, self.shape.hidden)
        return self._product(f"moe_gate_up.t{tokens}", tokens, x, 2 * self.shape.inner, gated=True)

    def down(self, tokens: int) -> Case:
        x = self.normal(tokens * self.shape.chosen, self.shape.inner)
        return self._product(f"moe_down.t{tokens}", tokens, x, self.shape.hidden, gated=False)

    def _product(self, name: str, tokens: int, x: Tensor, size: int, *, gated: bool) -> Case:
        """The products of x with the weights [size, in] of all experts. Those that are not `gated` are summed
        over the experts of a token."""
        experts, chosen, inner = self.shape.experts, self.shape.chosen, x.shape[1]
        zeros = torch.zeros(experts, dtype=torch.int32, device=self.device)
        shuffled = shuffle(self.normal(tokens, experts), zeros, Choice(chosen, Scoring.NORMALIZED_SOFTMAX))
        weight = self.normal(experts, size, inner)
        counts = shuffled.counts.tolist()
        lists = [pairs[:count] for pairs, count in zip(shuffled.pairs, counts, strict=True)]
        rows = torch.cat(lists).long() // (chosen if len(x) == tokens else 1)
        ordered, ends = x[rows], shuffled.counts.cumsum(0).int()

        def ours() -> object:
            y = grouped_linear(x, weight, shuffled, dtype=x.dtype, weighted=False, gated=gated)
            return y if gated else combine(Terms(y, shuffled.weights, None, True))

        def theirs() -> object:
            return torch._grouped_mm(ordered, weight.transpose(1, 2), offs=ends)

        out_bytes = (len(rows) // 2 if gated else tokens) * size * x.itemsize
        moved = nbytes(x) + sum(count > 0 for count in counts) * size * inner * x.itemsize + out_bytes
        flops = 2 * len(rows) * size * inner
        against = theirs if x.dtype is torch.bfloat16 else None
        return Case(name, moved, flops, ours, against, "torch._grouped_mm, rows sorted")
