"""The cases of INT4: the products of a layer, and whole layers without attention, against bfloat16.

Weights have groups of 128 columns without zeros, but `.zeros` has groups of 32 with zeros, as GGUF files do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from baton.bench.kernels.cases import Case, Make
from baton.bench.kernels.layer import LayerCases
from baton.engine.kernels.int4_linear import Int4Linear
from baton.engine.kernels.split_k import multiprocessors

GROUP, SMALL_GROUP = 128, 32


class Int4Cases(LayerCases):
    """All cases of a shape on a device."""

    def __iter__(self) -> Iterator[Make]:
        rows = (*self.shape.batches, self.shape.prompts[0])
        for count in rows:
            yield partial(self.layer, count)
        for count, name in itertools.product(rows, self.sizes):
            yield partial(self.product, name, count)
        yield partial(self.zeros, rows[0])

    def linear(self, columns: int, out: int, *, group: int = GROUP, zeros: bool = False) -> Int4Linear:
        codes = torch.randint(0, 16, (out, columns), dtype=torch.uint8, device=self.device)
        scales = torch.rand(out, columns // group, device=self.device).add_(0.5).div_(4)
        programs = multiprocessors(self.device)
        return Int4Linear(codes, scales, scales * zeros, None, self.shape.dtype, programs)

    def product(self, name: str, rows: int) -> Case:
        columns, out = self.sizes[name]
        x, ours, theirs = self.normal(rows, columns), self.linear(columns, out), self.plain(columns, out)
        return Case(
            f"int4_linear.{name}.t{rows}",
            2 * rows * (columns + out) + columns * out // 2 + 2 * columns * out // GROUP,
            2 * rows * columns * out,
            lambda: ours(x),
            lambda: theirs(x),
            "bfloat16",
        )

    def zeros(self, rows: int) -> Case:
        columns, out = self.sizes["gate_up"]
        x, ours = self.normal(rows, columns), self.linear(columns, out, group=SMALL_GROUP, zeros=True)
        plain = self.linear(columns, out)
        return Case(
            f"int4_linear.zeros.gate_up.t{rows}",
            2 * rows * (columns + out) + columns * out // 2 + 4 * columns * out // SMALL_GROUP,
            2 * rows * columns * out,
            lambda: ours(x),
            lambda: plain(x),
            f"groups of {GROUP} without zeros",
        )

    def layer(self, rows: int) -> Case:
        parameters = sum(i * o for i, o in self.sizes.values())
        return Case(
            f"int4_layer.t{rows}",
            parameters // 2 + 2 * parameters // GROUP,
            2 * rows * parameters,
            self.chain(rows, self.linear),
            self.chain(rows, self.plain),
            "the layer in bfloat16",
        )
