"""The cases of quantized weights: the products of a layer, and whole layers without attention.

A layer is a chain of two norms, four products and the activation function, in launches that overlap. It is
compared with the same layer in bfloat16. An FP8 product of few rows is compared with cuBLAS
(`torch._scaled_mm`), an INT4 product with bfloat16. INT4 weights have groups of 128 columns without zeros.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from baton.bench.lab.kernels.cases import Case, Cases, Make, Shape
from baton.engine.kernels import Kernels
from baton.engine.kernels.launch import multiprocessors
from baton.engine.kernels.quantized.fp8_linear import MAX_FEW_ROWS, Fp8Linear, runs_at_once
from baton.engine.kernels.quantized.int4_linear import Int4Linear
from baton.engine.kernels.quantized.reference import four_bits
from baton.engine.layers.linear import PlainLinear

EPS = 1e-5
GROUP = 128


class LayerCases(Cases[Shape]):
    """The products and the whole layer. Subclasses have the format."""

    def __iter__(self) -> Iterator[Make]:
        rows = (*self.shape.batches, self.shape.prompts[0])
        for count in rows:
            yield partial(self.layer, count)
        for count, name in itertools.product(rows, self.shape.products):
            yield partial(self.product, name, count)

    def layer(self, rows: int) -> Case:
        raise NotImplementedError

    def product(self, name: str, rows: int) -> Case:
        raise NotImplementedError

    @property
    def parameters(self) -> int:
        return sum(columns * out for columns, out in self.shape.products.values())

    def plain(self, columns: int, out: int) -> PlainLinear:
        return PlainLinear(self.normal(out, columns))

    def chain(
        self, rows: int, make: Callable[[int, int], Any], *, quantizes: bool = False
    ) -> Callable[[], object]:
        """A layer whose products are made by `make`. `quantizes`: norms, activation and the output of
        attention are quantized in their kernels."""
        hidden, kernels = self.shape.hidden, self.kernels
        qkv, out, gate_up, down = (make(*size) for size in self.shape.products.values())
        residual, delta, attended = (self.normal(rows, hidden) for _ in range(3))
        weight, grouped = self.normal(hidden), False if quantizes else None

        def run() -> object:
            qkv(kernels.add_rms_norm(residual, delta, weight, EPS, grouped))
            out(kernels.quantize(attended, grouped=False) if quantizes else attended)
            x = kernels.add_rms_norm(residual, delta, weight, EPS, grouped)
            return down(kernels.activate(gate_up(x), False) if quantizes else gate_up.silu_mul(x, kernels))

        return run


class Fp8Cases(LayerCases):
    """Half of the operations count, since a GPU multiplies twice as much in FP8."""

    def linear(self, columns: int, out: int) -> Fp8Linear:
        weight = Kernels().quantize(self.normal(out, columns), grouped=False)
        linear = self.kernels.fp8_linear(weight.values, weight.scales.T.contiguous(), None, self.shape.dtype)
        assert isinstance(linear, Fp8Linear)
        return linear

    def product(self, name: str, rows: int) -> Case:
        columns, out = self.shape.products[name]
        x = self.kernels.quantize(self.normal(rows, columns), grouped=False)
        linear = self.linear(columns, out)
        moved = rows * columns + columns * out + rows * out * self.shape.dtype.itemsize
        flops = rows * columns * out
        if rows > MAX_FEW_ROWS and not runs_at_once(rows, out, multiprocessors(self.device)):
            return Case(f"fp8_cublas.{name}.t{rows}", moved, flops, lambda: linear(x))
        return Case(
            f"fp8_linear.{name}.t{rows}", moved, flops, lambda: linear(x), lambda: linear.cublas(x), "cuBLAS"
        )

    def layer(self, rows: int) -> Case:
        ours = self.chain(rows, self.linear, quantizes=True)
        theirs, count = self.chain(rows, self.plain), self.parameters
        return Case(f"fp8_layer.t{rows}", count, rows * count, ours, theirs, "the layer in bfloat16")


class Int4Cases(LayerCases):
    def linear(self, columns: int, out: int) -> Int4Linear:
        codes = torch.randint(0, 16, (out, columns), dtype=torch.uint8, device=self.device)
        scales = torch.rand(out, columns // GROUP, device=self.device).add_(0.5).div_(4)
        weight = four_bits(codes, scales, torch.zeros_like(scales), self.shape.dtype)
        return Int4Linear(weight, None, multiprocessors(self.device))

    def product(self, name: str, rows: int) -> Case:
        columns, out = self.shape.products[name]
        x, ours, theirs = self.normal(rows, columns), self.linear(columns, out), self.plain(columns, out)
        moved = 2 * rows * (columns + out) + columns * out // 2 + 2 * columns * out // GROUP
        flops = 2 * rows * columns * out
        return Case(
            f"int4_linear.{name}.t{rows}", moved, flops, lambda: ours(x), lambda: theirs(x), "bfloat16"
        )

    def layer(self, rows: int) -> Case:
        return Case(
            f"int4_layer.t{rows}",
            self.parameters // 2 + 2 * self.parameters // GROUP,
            2 * rows * self.parameters,
            self.chain(rows, self.linear),
            self.chain(rows, self.plain),
            "the layer in bfloat16",
        )
