"""The cases of a dense layer: each kernel, the same by torch, and the least bytes and operations.

`rows_of` times a case against torch and the limit of the card.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.bench.lab.driver import in_turns
from baton.bench.report import Row, paired_ratio
from baton.engine.kernels import KV, AttentionMetadata, Kernels
from baton.engine.kernels.attention.tiles import tile_work
from baton.engine.layers.linear import MAX_SKINNY_ROWS, PlainLinear

BYTES_PER_S, FLOPS_PER_S = 4.8e12, 790e12
"""Limits of an H200: bandwidth by its datasheet, bfloat16 products of random numbers as measured (cuBLAS,
8192³)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one layer. The defaults are those of Llama-3.1-8B."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    vocabulary: int = 128256
    block_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    context: int = 1064
    prompts: tuple[int, ...] = (2000, 8000)

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(columns, rows) of the fused weights."""
        return {
            "qkv": (self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim),
            "out": (self.hidden, self.hidden),
            "gate_up": (self.hidden, 2 * self.inner),
            "down": (self.inner, self.hidden),
        }


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    bytes: int
    flops: int
    kernel: Callable[[], object]
    torch: Callable[[], object] | None = None
    torch_is: str = ""


Make = Callable[[], Case]
"""Makes a case with new inputs."""


S = TypeVar("S", bound=Any)


class Cases(Generic[S]):
    """All cases of the shape of a layer on a device. Subclasses have the cases."""

    def __init__(self, shape: S, kernels: Kernels, device: torch.device) -> None:
        self.shape, self.kernels, self.device = shape, kernels, device

    def __iter__(self) -> Iterator[Make]:
        raise NotImplementedError

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.shape.dtype)


class DenseCases(Cases[Shape]):
    def __iter__(self) -> Iterator[Make]:
        shape = self.shape
        for rows in (shape.batches[0], shape.batches[len(shape.batches) // 2], shape.prompts[0]):
            yield partial(self.add_rms_norm, rows)
            yield partial(self.silu_mul, rows)
            yield partial(self.rope_and_write, rows)
        for batch in shape.batches:
            yield partial(self.decode, f"b{batch}", [shape.context] * batch)
        longest, batch = 16 * shape.context, shape.batches[len(shape.batches) // 2]
        yield partial(self.decode, f"b{batch}.ragged", [longest] + [shape.context // 2] * (batch - 1))
        for tokens in shape.prompts:
            yield partial(self.prefill, 0, tokens)
        yield partial(self.prefill, 3 * shape.prompts[0], shape.prompts[0])
        for tokens in (40, 300):  # the next turn of a chat, and one that computes the answer before it, too
            yield partial(self.prefill, shape.prompts[-1], tokens, in_graph=True)
        yield from self._products()

    def add_rms_norm(self, rows: int) -> Case:
        size = self.shape.hidden
        residual, delta, weight = self.normal(rows, size), self.normal(rows, size), self.normal(size)
        return Case(
            f"add_rms_norm.t{rows}",
            4 * nbytes(residual),
            0,
            lambda: self.kernels.add_rms_norm(residual, delta, weight, 1e-5),
            lambda: F.rms_norm(residual.add_(delta), (size,), weight, 1e-5),
            "torch add_, rms_norm",
        )

    def silu_mul(self, rows: int) -> Case:
        gate_up = self.normal(rows, 2 * self.shape.inner)
        gate, up = gate_up.chunk(2, dim=-1)
        return Case(
            f"silu_mul.t{rows}",
            nbytes(gate_up) * 3 // 2,
            0,
            lambda: self.kernels.activate(gate_up),
            lambda: F.silu(gate).mul_(up),
            "torch silu, mul_",
        )

    def rope_and_write(self, rows: int) -> Case:
        shape = self.shape
        qkv = self.normal(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        rotary = torch.randn(rows, 2, shape.head_dim, device=self.device)
        kv, _ = self.cache([rows])
        slots = torch.arange(rows, device=self.device)
        moved = nbytes(qkv) * 2 + nbytes(rotary)
        return Case(
            f"rope_and_write.t{rows}",
            moved,
            0,
            lambda: self.kernels.rope_and_write(qkv, rotary, None, kv, slots),
        )

    def cache(self, contexts: Sequence[int]) -> tuple[KV, Tensor]:
        """The cache of a layer with these requests in shuffled blocks, and their block tables."""
        shape = self.shape
        blocks = [-(-context // shape.block_size) for context in contexts]
        places = torch.randperm(sum(blocks)).tolist()
        tables = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
        for table, count in zip(tables, blocks, strict=True):
            table[:count] = torch.tensor([places.pop() for _ in range(count)])
        kv = self.normal(2, sum(blocks), shape.block_size, shape.kv_heads, shape.head_dim)
        return kv, tables.to(self.device)

    def attention(
        self, spans: Sequence[tuple[int, int]], *, in_graph: bool = False
    ) -> tuple[Callable[[], object], Tensor, Tensor, Tensor]:
        """The attention of one layer in a step, and its dense q, k and v. `in_graph`: of a step that a graph
        replays."""
        shape, decodes = self.shape, sum(stop - start == 1 for start, stop in spans)
        kv, tables = self.cache([stop for _, stop in spans])
        tokens = sum(stop - start for start, stop in spans)
        q = self.normal(tokens, shape.heads, shape.head_dim)
        k, v = (self.normal(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
        contexts = torch.tensor([stop for _, stop in spans], dtype=torch.int32, device=self.device)
        slots = torch.empty(0, dtype=torch.int64, device=self.device)  # no KV is written
        tiles, kind = None, self.kernels.tile_shape(shape.dtype, shape.head_dim, shape.block_size, plain=True)
        if in_graph:
            tile, programs = (
                kind.tokens(shape.heads // shape.kv_heads),
                self.kernels.tile_programs(kind, shape.kv_heads),
            )
            work = tile_work(spans[decodes:], decodes, tile, programs, kind.piece_keys)
            tiles = torch.from_numpy(work).to(self.device)
        metadata = AttentionMetadata(
            shape.block_size, slots, tables, contexts, decodes, spans[decodes:], tiles=tiles, tile_shape=kind
        )
        tiling = self.kernels.tile(metadata, shape.heads, shape.kv_heads, shape.dtype)
        return lambda: self.kernels.attention(q, kv, tiling, None, q.shape[-1] ** -0.5), q, k, v

    def decode(self, name: str, contexts: Sequence[int]) -> Case:
        kernel, q, k, _ = self.attention([(context - 1, context) for context in contexts])
        if len(set(contexts)) > 1:  # torch would have to pad ragged lengths
            dense = None
        else:
            keys, values = (
                self.normal(len(contexts), self.shape.kv_heads, contexts[0], self.shape.head_dim)
                for _ in range(2)
            )

            def dense() -> Tensor:
                return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)

        kv_bytes = 2 * sum(contexts) * nbytes(k) // len(contexts)
        flops = 4 * sum(contexts) * self.shape.hidden
        return Case(
            f"decode_attention.{name}", 2 * nbytes(q) + kv_bytes, flops, kernel, dense, "torch SDPA, KV dense"
        )

    def prefill(self, start: int, tokens: int, *, in_graph: bool = False) -> Case:
        kernel, q, k, v = self.attention([(start, start + tokens)], in_graph=in_graph)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))

        def dense() -> Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
                return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

        visible = tokens * start + tokens * (tokens + 1) // 2
        return Case(
            f"prefill_attention.{tokens}" + (f".after{start}" if start else ""),
            2 * nbytes(q) + 2 * nbytes(k) * (start + tokens) // tokens,
            4 * visible * self.shape.hidden,
            kernel,
            None if start else dense,
            "torch SDPA (cuDNN)",
        )

    def _products(self) -> Iterator[Make]:
        """Products with the fused weights: Baton's kernel and cuBLAS up to 64 rows, cuBLAS alone above."""
        sizes = self.shape.products | {"head": (self.shape.hidden, self.shape.vocabulary)}
        rows = (*self.shape.batches, self.shape.prompts[0])
        for count, (name, size) in itertools.product(rows, sizes.items()):
            yield partial(self.product, name, count, *size)

    def product(self, name: str, rows: int, columns: int, out: int) -> Case:
        x, weight = self.normal(rows, columns), self.normal(out, columns)
        moved = nbytes(x) + nbytes(weight) + rows * out * x.itemsize
        flops = 2 * rows * columns * out
        if rows > MAX_SKINNY_ROWS:
            return Case(f"cublas.{name}.t{rows}", moved, flops, lambda: F.linear(x, weight))
        linear = PlainLinear(weight)
        return Case(
            f"linear.{name}.t{rows}", moved, flops, lambda: linear(x), lambda: F.linear(x, weight), "cuBLAS"
        )


def nbytes(x: Tensor) -> int:
    return x.numel() * x.itemsize


BEYOND_CACHE = 256 << 20  # least bytes of all input sets of a case together
MAX_SETS = 32
LEAST_CALLS = 4  # of a graph, since its launch and the events take microseconds of their own
PAIRS = 7
WARM_SECONDS = 0.05  # a GPU that rested begins with lower clocks


Seconds = Callable[[Sequence[Callable[[], object]]], Callable[[], float]]
"""Prepares calls. Returns a function that runs all of them once and returns their seconds."""


def graph_seconds(calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # it may still fill the inputs
    with torch.cuda.stream(side):  # compile, choose algorithms and allocate before the capture
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    start = time.perf_counter()
    while time.perf_counter() - start < WARM_SECONDS:
        once()
    return once


def rows_of(make: Make, seconds: Seconds) -> list[Row]:
    case = make()
    sets = [case, *(make() for _ in range(min(MAX_SETS, BEYOND_CACHE // max(1, case.bytes))))]
    rounds = -(-LEAST_CALLS // len(sets))
    kernel, reference = seconds([case.kernel for case in sets] * rounds), None
    if all(case.torch for case in sets):
        reference = seconds([case.torch for case in sets if case.torch] * rounds)
    times, their_times = in_turns(kernel, reference or kernel, rounds=PAIRS)
    each = statistics.median(times) / (len(sets) * rounds)
    work, limit, unit, scale = case.bytes, BYTES_PER_S, "GB/s", 1e9
    if case.flops / FLOPS_PER_S > case.bytes / BYTES_PER_S:
        work, limit, unit, scale = case.flops, FLOPS_PER_S, "TFLOP/s", 1e12
    row = Row(f"kernels.{case.name}", work / each / scale, unit)
    if reference:
        ratio, spread = paired_ratio(their_times, times)
        row = replace(row, ratio=ratio, ratio_to=f"speed of {case.torch_is}", spread=spread)
    return [
        row,
        Row(f"kernels.{case.name}.time", each * 1e6, "µs"),
        Row(f"kernels.{case.name}.of_limit", work / each / limit, f"of {limit / scale:g} {unit}"),
    ]
