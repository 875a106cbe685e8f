"""The cases of FP8: quantizing activations, the products of a layer, and whole layers without attention.

A product of few rows is compared with cuBLAS (`torch._scaled_mm`), quantizing with the kernel that does not
quantize. `fp8_layer` is a chain of two norms, four products, the activation function, and the quantizing of
attention's output, in launches that overlap. It is compared with the same layer in bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

from baton.bench.kernels.cases import Case, Make, nbytes
from baton.bench.kernels.layer import EPS, LayerCases
from baton.engine.kernels import FP8_GROUP, Quantized
from baton.engine.kernels.fp8_linear import MAX_FEW_ROWS, Fp8Linear, runs_at_once
from baton.engine.kernels.split_k import multiprocessors
from baton.engine.kernels.torch_kernels import TorchKernels


class Fp8Cases(LayerCases):
    """All cases of a shape on a device."""

    def __iter__(self) -> Iterator[Make]:
        rows = (*self.shape.batches, self.shape.prompts[0])
        for count in rows:
            yield partial(self.layer, count)
        for count, name in itertools.product(rows, self.sizes):
            yield partial(self.product, name, count)
        for count in rows:
            yield partial(self.blocks, count)
        for count in (rows[0], rows[len(rows) // 2], rows[-1]):
            yield partial(self.add_rms_norm, count)
            yield partial(self.silu_mul, count)
            yield partial(self.quantize, count)

    def linear(self, columns: int, out: int) -> Fp8Linear:
        weight = TorchKernels().quantize(self.normal(out, columns), grouped=False)
        linear = self.kernels.fp8_linear(weight.values, weight.scales.T.contiguous(), None, self.shape.dtype)
        assert isinstance(linear, Fp8Linear)
        return linear

    def product(self, name: str, rows: int) -> Case:
        columns, out = self.sizes[name]
        x, linear = (
            self.kernels.quantize(self.normal(rows, columns), grouped=False),
            self.linear(columns, out),
        )
        moved = rows * columns + columns * out + rows * out * self.shape.dtype.itemsize
        flops = rows * columns * out  # half of them: a GPU multiplies twice as much in FP8
        if rows > MAX_FEW_ROWS and not runs_at_once(rows, out, multiprocessors(self.device)):
            return Case(f"fp8_cublas.{name}.t{rows}", moved, flops, lambda: linear(x))
        return Case(
            f"fp8_linear.{name}.t{rows}", moved, flops, lambda: linear(x), lambda: linear.cublas(x), "cuBLAS"
        )

    def blocks(self, rows: int) -> Case:
        """With scales of blocks of 128 × 128."""
        columns, out = self.sizes["gate_up"]
        x, weight = (TorchKernels().quantize(self.normal(n, columns), grouped=True) for n in (rows, out))
        scales = weight.scales.T if out % FP8_GROUP else weight.scales.T[:, ::FP8_GROUP]
        linear = self.kernels.fp8_linear(weight.values, scales.contiguous(), None, self.shape.dtype)
        by_row, plain = (
            self.linear(columns, out),
            self.kernels.quantize(self.normal(rows, columns), grouped=False),
        )
        return Case(
            f"fp8_linear.blocks.gate_up.t{rows}",
            rows * columns + columns * out + rows * out * self.shape.dtype.itemsize,
            rows * columns * out,
            lambda: linear(x),
            lambda: by_row.cublas(plain),
            "cuBLAS with scales of rows",
        )

    def layer(self, rows: int) -> Case:
        shape, kernels = self.shape, self.kernels
        qkv, out, gate_up, down = (self.linear(*size) for size in self.sizes.values())
        residual, delta, weight = (
            self.normal(rows, shape.hidden),
            self.normal(rows, shape.hidden),
            self.normal(shape.hidden),
        )
        attended = self.normal(rows, shape.hidden)

        def norm() -> Quantized:
            return kernels.add_rms_norm_quantized(residual, delta, weight, EPS, grouped=False)

        def ours() -> object:
            qkv(norm())
            out(kernels.quantize(attended, grouped=False))
            return down(kernels.silu_mul_quantized(gate_up(norm()), grouped=False))

        parameters = sum(i * o for i, o in self.sizes.values())
        theirs = self.chain(rows, self.plain)
        return Case(
            f"fp8_layer.t{rows}", parameters, rows * parameters, ours, theirs, "the layer in bfloat16"
        )

    def add_rms_norm(self, rows: int) -> Case:
        residual, delta, weight = (
            self.normal(*size) for size in [(rows, self.shape.hidden)] * 2 + [(self.shape.hidden,)]
        )
        return self._quantizing(
            f"add_rms_norm.t{rows}",
            3 * nbytes(residual) + residual.numel(),
            lambda: self.kernels.add_rms_norm_quantized(residual, delta, weight, EPS, grouped=False),
            lambda: self.kernels.add_rms_norm(residual, delta, weight, EPS),
        )

    def silu_mul(self, rows: int) -> Case:
        gate_up = self.normal(rows, 2 * self.shape.inner)
        return self._quantizing(
            f"silu_mul.t{rows}",
            nbytes(gate_up) + gate_up.numel() // 2,
            lambda: self.kernels.silu_mul_quantized(gate_up, grouped=False),
            lambda: self.kernels.silu_mul(gate_up),
        )

    def quantize(self, rows: int) -> Case:
        x = self.normal(rows, self.shape.hidden)
        return self._quantizing(
            f"quantize.t{rows}",
            nbytes(x) + x.numel(),
            lambda: self.kernels.quantize(x, grouped=False),
            lambda: x.clone(),
        )

    @staticmethod
    def _quantizing(name: str, moved: int, ours: Callable[[], object], plain: Callable[[], object]) -> Case:
        return Case(f"fp8_{name}", moved, 0, ours, plain, "the same without FP8")
