"""Triton kernels against the torch kernels that define them: compiled on a GPU, else in Triton's interpreter.

The interpreter's bfloat16 products are wrong, so bfloat16 is for the GPU alone.
"""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import AttentionMetadata, HeadNorm, Kernels
from engine.kernels.attention import first_seen
from engine.kernels.experts import route
from engine.kernels.torch_kernels import TorchKernels
from engine.model_config import ClampedSwiGLU, Scoring, Span

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, pytest.param(BF16, marks=pytest.mark.gpu)]
CLOSE = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}
"""Largest error, relative to the size of what is compared."""


def close(ours: Tensor, reference: Tensor) -> None:
    """`reference` is in float64 or float32, `ours` in the dtype that sets the tolerance."""
    assert ours.isfinite().all()
    error = (ours.cpu().double() - reference.double()).norm() / reference.double().norm()
    assert error <= CLOSE[ours.dtype], f"relative error {float(error):.2e}"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Pointwise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (2, 4096)])
@pytest.mark.parametrize("add", [False, True])
def test_add_rms_norm(
    triton_kernels: Kernels, kernel_device: str, dtype: torch.dtype, rows: int, size: int, add: bool
) -> None:
    residual, delta, weight = (
        normal(*s, seed=i).to(dtype) for i, s in enumerate([(rows, size)] * 2 + [(size,)])
    )
    expected = residual.clone()
    out = TorchKernels().add_rms_norm(expected, delta if add else None, weight, 1e-5)
    ours = residual.to(kernel_device)
    result = triton_kernels.add_rms_norm(
        ours, delta.to(kernel_device) if add else None, weight.to(kernel_device), 1e-5
    )
    assert torch.equal(ours.cpu(), expected), "the sum is rounded once, in both"
    close(result, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 96), (3, 1536), (2, 1024)])
def test_silu_mul(
    triton_kernels: Kernels, kernel_device: str, dtype: torch.dtype, rows: int, size: int
) -> None:
    gate_up = (4 * normal(rows, 2 * size)).to(dtype)
    close(triton_kernels.silu_mul(gate_up.to(kernel_device)), TorchKernels().silu_mul(gate_up))


# Products


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("rows", "inner", "size", "multiprocessors"),
    [(1, 512, 128, 4), (3, 1000, 200, 32), (20, 520, 64, 8), (33, 264, 70, 6), (64, 512, 300, 4)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_of_few_rows(
    kernel_device: str,
    dtype: torch.dtype,
    rows: int,
    inner: int,
    size: int,
    multiprocessors: int,
    bias: bool,
) -> None:
    """With tiles that W does not fill, with one part and with several. The counters are 0 afterwards."""
    from engine.kernels.skinny_linear import SkinnyLinear

    x, weight, b = (
        normal(*s, seed=i).to(dtype) for i, s in enumerate([(rows, inner), (size, inner), (size,)])
    )
    linear = SkinnyLinear(weight.to(kernel_device), b.to(kernel_device) if bias else None, multiprocessors)
    expected = F.linear(x.double(), weight.double(), b.double() if bias else None)
    first, second = (linear(x.to(kernel_device)) for _ in range(2))
    close(first, expected)
    assert torch.equal(first, second)


@pytest.mark.gpu
def test_linear_of_few_rows_does_not_depend_on_timing() -> None:
    from engine.kernels.skinny_linear import SkinnyLinear

    x, weight = (normal(*s).to(BF16).cuda() for s in [(64, 14336), (4096, 14336)])
    assert SkinnyLinear.suits(weight)
    linear = SkinnyLinear(weight, None, 264)  # with two parts
    close(linear(x), F.linear(x.cpu().double(), weight.cpu().double()))
    assert all(torch.equal(linear(x), linear(x)) for _ in range(200))


# Mixture of experts

LEANINGS = {
    "even": torch.zeros(6),
    "one-takes-all": torch.tensor([0.0, 0.0, 20.0, 0.0, 0.0, 0.0]),
    "two-are-empty": torch.tensor([-20.0, 0.0, 0.0, 0.0, 0.0, -20.0]),
}
SATURATED = torch.full((6,), 40.0)
"""The sigmoids of all logits are 1 in float32."""


def expert_logits(tokens: int, leaning: Tensor) -> Tensor:
    """Logits of the router for 6 experts: random, with a leaning towards some."""
    return normal(tokens, 6, seed=3) + leaning


@pytest.mark.parametrize("leaning", [*LEANINGS.values(), SATURATED], ids=[*LEANINGS, "saturated"])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (5, 2), (300, 4)])
@pytest.mark.parametrize("scoring", Scoring)
def test_shuffle(kernel_device: str, leaning: Tensor, tokens: int, chosen: int, scoring: Scoring) -> None:
    """Each pair is in the list of its expert, once. 300 tokens take several programs."""
    from engine.kernels.shuffle import shuffle

    logits = expert_logits(tokens, leaning)
    expected = route(logits, chosen, scoring)
    counts = torch.zeros(6, dtype=torch.int32, device=kernel_device)
    shuffled = shuffle(logits.to(kernel_device), counts, chosen, scoring)
    weights, counts, pairs = (x.cpu() for x in (shuffled.weights, shuffled.counts, shuffled.pairs))
    torch.testing.assert_close(weights, expected.weights)
    assert counts.tolist() == expected.experts.flatten().bincount(minlength=6).tolist()
    for expert, (count, found) in enumerate(zip(counts.tolist(), pairs, strict=True)):
        of_expert = (expected.experts.flatten() == expert).nonzero().flatten()
        assert sorted(found[:count].tolist()) == of_expert.tolist()


def test_rows_that_pad_a_graph_have_no_expert(kernel_device: str) -> None:
    from engine.kernels.shuffle import shuffle

    logits, slots = expert_logits(5, LEANINGS["even"]), torch.tensor([7, 3, -1, 0, -1])
    counts = torch.zeros(6, dtype=torch.int32, device=kernel_device)
    slots = slots.to(kernel_device)
    weights, _, pairs, _ = shuffle(logits.to(kernel_device), counts, 2, Scoring.SOFTMAX, slots)
    listed = [pair for expert, count in enumerate(counts.tolist()) for pair in pairs[expert, :count].tolist()]
    assert sorted(listed) == [0, 1, 2, 3, 6, 7]
    assert (weights > 0).all(dim=1).tolist() == [True, True, False, True, False]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_shuffle_chooses_an_expert_for_any_logits(kernel_device: str) -> None:
    """The rows that pad a graph may have any logits. Of equal logits, the first are chosen."""
    from engine.kernels.shuffle import shuffle

    logits = torch.tensor([[torch.nan] * 6, [torch.inf] * 6, [1.0] * 6, [-torch.inf] * 6])
    counts = torch.zeros(6, dtype=torch.int32, device=kernel_device)
    shuffle(logits.to(kernel_device), counts, 2, Scoring.NORMALIZED_SOFTMAX)
    assert counts.tolist() == [4, 4, 0, 0, 0, 0]


MIXES = [
    *itertools.product(
        LEANINGS,
        [
            (1, 1, 64, 32, Scoring.SOFTMAX),
            (3, 3, 72, 24, Scoring.NORMALIZED_SOFTMAX),
            (20, 4, 72, 12, Scoring.NORMALIZED_SOFTMAX),
            (50, 4, 136, 24, Scoring.NORMALIZED_SOFTMAX),
            (50, 1, 136, 24, Scoring.SIGMOID_ON_INPUT),
        ],
    ),
    ("two-are-empty", (400, 4, 64, 24, Scoring.SOFTMAX)),  # the largest tiles
]
IN_TURN = [(*mix, (F16, F32)[i % 2]) for i, mix in enumerate(reversed(MIXES))]
"""Each leaning and each shape in both dtypes, except the last shape."""


@pytest.mark.parametrize(
    ("leaning", "shape", "dtype"),
    [*IN_TURN, *(pytest.param(*mix, BF16, marks=pytest.mark.gpu) for mix in MIXES)],
)
def test_mix_experts(
    triton_kernels: Kernels,
    kernel_device: str,
    leaning: str,
    shape: tuple[int, int, int, int, Scoring],
    dtype: torch.dtype,
) -> None:
    """All tilings, tiles that are partly empty in each dimension, rows that the copy engine cannot read, and
    experts without a token. `shape`: tokens, experts of each, size, inner, scoring."""
    tokens, chosen, size, inner, scoring = shape
    x, gate_up, down = (
        normal(*sizes, seed=i).to(dtype)
        for i, sizes in enumerate([(tokens, size), (6, 2 * inner, size), (6, size, inner)])
    )
    gate_up /= size**0.5
    logits = expert_logits(tokens, LEANINGS[leaning])
    expected_counts = torch.zeros(6, dtype=torch.int32)
    shared = normal(tokens, size, seed=3).to(dtype)
    expected = TorchKernels().mix_experts(
        x.double(), logits, gate_up.double(), down.double(), expected_counts, chosen, scoring,
        shared=shared.double,
    )  # fmt: skip
    x, logits, gate_up, down, beside = (
        tensor.to(kernel_device) for tensor in (x, logits, gate_up, down, shared)
    )
    counts = torch.zeros(6, dtype=torch.int32, device=kernel_device)
    y = triton_kernels.mix_experts(x, logits, gate_up, down, counts, chosen, scoring, shared=lambda: beside)
    close(y, expected)
    assert counts.tolist() == expected_counts.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 100, 300, 3000])
def test_a_mixture_does_not_depend_on_timing(tokens: int) -> None:
    """Each tiling of bfloat16. The lists of pairs have another order each time."""
    from engine.kernels.triton_kernels import TritonKernels

    x, logits, gate_up, down = (
        normal(*shape, seed=i).cuda()
        for i, shape in enumerate([(tokens, 1024), (tokens, 32), (32, 2 * 256, 1024), (32, 1024, 256)])
    )
    x, gate_up, down = x.to(BF16), (gate_up / 32).to(BF16), down.to(BF16)
    counts = torch.zeros(32, dtype=torch.int32, device="cuda")
    expected = TorchKernels().mix_experts(
        x.double(), logits, gate_up.double(), down.double(), counts.clone(), 4, Scoring.SOFTMAX
    )
    kernels = TritonKernels(torch.device("cuda"), 128)
    first, *others = (
        kernels.mix_experts(x, logits, gate_up, down, counts.clone(), 4, Scoring.SOFTMAX) for _ in range(30)
    )
    close(first, expected.cpu())
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the undefined rows of pairs elsewhere
@pytest.mark.parametrize("leaning", LEANINGS)
@pytest.mark.parametrize(
    ("chosen", "scoring"), [(1, Scoring.SIGMOID_ON_INPUT), (4, Scoring.NORMALIZED_SOFTMAX)]
)
def test_the_sums_over_parts_of_the_experts_add_up(
    triton_kernels: Kernels, kernel_device: str, leaning: str, chosen: int, scoring: Scoring
) -> None:
    x, gate_up, down = (
        normal(*shape, seed=i) for i, shape in enumerate([(50, 64), (6, 48, 64), (6, 64, 24)])
    )
    logits = expert_logits(50, LEANINGS[leaning])

    def mixed(kernels: Kernels, device: str, first: int, last: int) -> Tensor:
        held = slice(first, last)
        counts = torch.zeros(6, dtype=torch.int32)
        inputs = [tensor.to(device) for tensor in (x, logits, gate_up[held], down[held], counts)]
        mix: Any = kernels.mix_experts
        return mix(*inputs, chosen, scoring, first=first).cpu()

    whole = mixed(TorchKernels(), "cpu", 0, 6)
    for kernels, device in ((TorchKernels(), "cpu"), (triton_kernels, kernel_device)):
        close(mixed(kernels, device, 0, 4) + mixed(kernels, device, 4, 6), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chosen", [1, 3])
def test_experts_with_biases_and_a_clamped_activation(
    triton_kernels: Kernels, kernel_device: str, dtype: torch.dtype, chosen: int
) -> None:
    shapes = [(50, 72), (6, 2 * 24, 72), (6, 72, 24), (6, 2 * 24), (6, 72)]
    x, *experts = (normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))
    logits, counts = expert_logits(50, LEANINGS["even"]), torch.zeros(6, dtype=torch.int32)
    activation = ClampedSwiGLU(1.702, 7.0)  # a quarter of the values are beyond the limit

    def mixed(kernels: Kernels, *tensors: Tensor) -> Tensor:
        x, logits, counts, gate_up, down, *biases = tensors
        return kernels.mix_experts(
            x, logits, gate_up, down, counts, chosen, Scoring.NORMALIZED_SOFTMAX,
            gate_up_bias=biases[0], down_bias=biases[1], activation=activation,
        )  # fmt: skip

    expected = mixed(TorchKernels(), x.double(), logits, counts.clone(), *(e.double() for e in experts))
    on_device = (tensor.to(kernel_device) for tensor in (x, logits, counts, *experts))
    close(mixed(triton_kernels, *on_device), expected)


# Attention


LARGEST_TILE = 128  # keys that a kernel loads at once


class Step:
    """A random step: requests with cached KV, and the QKV product of the step's tokens. What no request may
    see is NaN: unused blocks, positions after a request's own, and tiles before its span."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = F32,
        seed: int = 0,
        span: Span | None = None,
        with_sinks: bool = False,
    ) -> None:
        self.heads, self.dtype, self.span = heads, dtype, span
        self.sinks = normal(heads[0], seed=seed + 97).to(dtype) if with_sinks else None
        decodes = [span for span in spans if span[1] - span[0] == 1]
        self.spans = decodes + [span for span in spans if span not in decodes]
        width = max(-(-stop // block_size) for _, stop in spans)
        num_blocks = len(spans) * width + 3
        free = list(range(num_blocks))
        random.Random(seed).shuffle(free)
        tables = torch.tensor([[free.pop() for _ in range(width)] for _ in spans], dtype=torch.int32)
        slots = [
            tables[i].long()[torch.arange(stop) // block_size] * block_size + torch.arange(stop) % block_size
            for i, (_, stop) in enumerate(self.spans)
        ]
        self.metadata = AttentionMetadata(
            block_size=block_size,
            slots=torch.cat([s[start:] for s, (start, _) in zip(slots, self.spans, strict=True)]),
            block_tables=tables,
            contexts=torch.tensor([stop for _, stop in self.spans], dtype=torch.int32),
            num_decodes=len(decodes),
            prefills=self.spans[len(decodes) :],
        )
        tokens, all_heads = len(self.metadata.slots), heads[0] + 2 * heads[1]
        self.kv = torch.full((2, num_blocks, block_size, heads[1], head_dim), torch.nan, dtype=dtype)
        for i, (s, (start, _)) in enumerate(zip(slots, self.spans, strict=True)):
            cached = normal(2, start, heads[1], head_dim, seed=seed + i).to(dtype)
            hidden = int(first_seen(torch.tensor(start), span)) // LARGEST_TILE * LARGEST_TILE
            self.kv.flatten(1, 2)[:, s[hidden:start]] = cached[:, hidden:]
        self.qkv = normal(tokens, all_heads, head_dim, seed=seed + 99).to(dtype)
        angles = normal(tokens, head_dim // 2, seed=seed + 98)
        cos, sin = angles.cos(), angles.sin()
        self.rotary = torch.stack((cos.repeat(1, 2), torch.cat((-sin, sin), dim=1)), dim=1)

    def run(
        self, kernels: Kernels, device: str, norm: HeadNorm | None = None, *, exact: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention's output, the cache, and the rotated queries; with `exact` all in float64."""

        def put(x: Tensor) -> Tensor:
            return (x.double() if exact and x.is_floating_point() else x).to(device, copy=True)

        m = self.metadata
        metadata = replace(
            m,
            slots=put(m.slots),
            block_tables=put(m.block_tables),
            contexts=put(m.contexts),
            tiles=None if m.tiles is None else put(m.tiles),
        )
        kv, rotary = put(self.kv), put(self.rotary)
        if norm is not None:
            norm = HeadNorm(put(norm.scale), norm.eps)
        q, k, v = kernels.rope_and_write(put(self.qkv), rotary, norm, kv, metadata.slots)
        plan = kernels.plan(metadata, *self.heads, kv.dtype, self.span)
        sinks = None if self.sinks is None else put(self.sinks)
        return kernels.attention(q, k, v, kv, plan, sinks), kv, q

    def check(self, kernels: Kernels, device: str, norm: HeadNorm | None = None) -> None:
        out, kv, q = self.run(kernels, device, norm)
        expected, expected_kv, expected_q = self.run(TorchKernels(), "cpu", norm, exact=True)
        close(q, expected_q)
        written = expected_kv.isfinite()
        assert torch.equal(kv.cpu().isfinite(), written), "each position is in its slot, and nothing else is"
        close(kv.cpu()[written], expected_kv[written])
        close(out, expected)


RAGGED = [(0, 1), (15, 16), (70, 71), (0, 5), (3, 20), (60, 95)]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [(64, 16, F32), (64, 256, F16), (128, 64, F16), pytest.param(128, 128, BF16, marks=pytest.mark.gpu)],
)
def test_mixed_batch(
    triton_kernels: Kernels, kernel_device: str, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    Step(RAGGED, (4, 2), head_dim, block_size, dtype).check(triton_kernels, kernel_device)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_batch_padded_as_for_a_graph(
    triton_kernels: Kernels, kernel_device: str, dtype: torch.dtype
) -> None:
    """Padding rows have no slot, padding requests no context, padding tiles are zeros. They write nothing and
    do not change the other rows."""
    from engine.kernels.tiles import SHORT, tile_work

    step = Step(RAGGED, (4, 2), 64, 16, dtype)
    expected, expected_kv, _ = step.run(triton_kernels, kernel_device)
    rows, padded, m = len(expected), len(expected) + 5, step.metadata
    programs = triton_kernels.tile_programs(2)
    work = torch.from_numpy(tile_work(m.prefills, m.num_decodes, SHORT.tokens(2), programs))
    contexts = torch.zeros(padded, dtype=torch.int32)
    contexts[: m.num_decodes] = m.contexts[: m.num_decodes]
    step.qkv = F.pad(step.qkv, (0, 0, 0, 0, 0, padded - rows), value=torch.nan)
    step.rotary = F.pad(step.rotary, (0, 0, 0, 0, 0, padded - rows))
    step.metadata = replace(
        m,
        slots=F.pad(m.slots, (0, padded - rows), value=-1),
        contexts=contexts,
        num_decodes=padded,
        prefills=[],
        tiles=F.pad(work, (0, 0, 0, 3)),
    )
    out, kv, _ = step.run(triton_kernels, kernel_device)
    close(out[:rows], expected.cpu())
    assert torch.equal(kv.nan_to_num(9.0), expected_kv.nan_to_num(9.0))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1)])
def test_query_heads_per_kv_head(triton_kernels: Kernels, kernel_device: str, heads: tuple[int, int]) -> None:
    Step([(30, 31), (66, 67), (20, 40)], heads, 64, 32, F16).check(triton_kernels, kernel_device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normalized_before_they_are_rotated(
    triton_kernels: Kernels, kernel_device: str, dtype: torch.dtype
) -> None:
    step = Step([(20, 21), (0, 6)], (4, 2), 64, 16, dtype)
    norm = HeadNorm(1 + normal(6, 64).to(dtype) / 4, 1e-6)
    step.check(triton_kernels, kernel_device, norm)


@pytest.mark.parametrize("long_from", [100, 4096])
def test_chunks_longer_than_a_tile(
    triton_kernels: Kernels, kernel_device: str, monkeypatch: pytest.MonkeyPatch, long_from: int
) -> None:
    """Chunks of several tiles. Each sees whole tiles of keys, and tiles that the causal mask cuts."""
    from engine.kernels import tiles

    monkeypatch.setattr(tiles, "LONG_FROM", long_from)
    Step([(0, 70), (130, 200)], (4, 1), 64, 128, F16).check(triton_kernels, kernel_device)


@pytest.mark.parametrize(
    ("block_size", "dtype", "span", "with_sinks"),
    [
        (16, F32, None, True),
        (128, F16, None, False),
        (16, F16, Span(100), True),
        pytest.param(128, BF16, None, True, marks=pytest.mark.gpu),
    ],
)
def test_few_tokens_after_many(
    triton_kernels: Kernels,
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    dtype: torch.dtype,
    span: Span | None,
    with_sinks: bool,
) -> None:
    """Several programs share the keys of a tile. A layer with a span gets the same work."""
    from engine.kernels import tiles

    monkeypatch.setattr(tiles, "LEAST_KEYS", 128)
    monkeypatch.setattr(triton_kernels, "_multiprocessors", 16)
    spans = [(299, 300), (383, 395), (256, 260), (0, 3)]
    step = Step(spans, (4, 2), 64, block_size, dtype, span=span, with_sinks=with_sinks)
    m = step.metadata
    work = tiles.tile_work(m.prefills, m.num_decodes, tiles.SHORT.tokens(2), triton_kernels.tile_programs(2))
    assert sorted(work[:, 8]) == [1, 2, 2, 3, 3, 3]
    step.check(triton_kernels, kernel_device)


@pytest.mark.parametrize(
    ("tokens", "pieces", "longest"),
    [(232, 32, 4112), (300, 57, 2816), (400, 29, 8336), (640, 91, 4240), (1024, 64, 9024)],
)
def test_keys_are_cut_for_several_waves_where_these_are_over_sooner(
    tokens: int, pieces: int, longest: int
) -> None:
    """The choices are the fastest ones, measured on an H200, which has 33 programs for each of 8 KV heads."""
    from engine.kernels import tiles

    work = tiles.tile_work([(8000, 8000 + tokens)], 0, 16, 33)
    assert len(work) == pieces <= tiles.most_pieces(tokens, 16, 33)
    assert max(work[:, 5] - work[:, 4]) == longest
    read = {first: sum(work[work[:, 3] == first, 5] - work[work[:, 3] == first, 4]) for first in work[:, 3]}
    assert read == {first: min(first + 16, 8000 + tokens) for first in read}, "each tile reads each key once"


@pytest.mark.parametrize(
    ("span", "with_sinks", "block_size", "dtype"),
    [
        (None, True, 16, F16),
        (Span(5), False, 16, F16),
        (Span(128), True, 128, F32),
        (Span(24, chunked=True), True, 16, F16),
        pytest.param(Span(128), True, 128, BF16, marks=pytest.mark.gpu),
        pytest.param(Span(160, chunked=True), False, 128, BF16, marks=pytest.mark.gpu),
    ],
)
def test_a_layer_with_a_span_or_sinks(
    triton_kernels: Kernels,
    kernel_device: str,
    span: Span | None,
    with_sinks: bool,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Decodes of one piece and of several. Spans that end in a tile of keys, within a chunk of queries and
    before it."""
    spans = [(0, 1), (31, 32), (400, 401), (0, 40), (30, 33), (290, 315)]
    step = Step(spans, (2, 1), 64, block_size, dtype, span=span, with_sinks=with_sinks)
    step.check(triton_kernels, kernel_device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_that_rotates_several_tokens(
    triton_kernels: Kernels, kernel_device: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As many do not fill the last; Qwen3's norm, three query heads."""
    from engine.kernels import rope

    monkeypatch.setattr(rope, "MANY", 1)
    step = Step([(9, 10), (0, 6)], (3, 1), 64, 16, dtype)
    norm = HeadNorm(1 + normal(4, 64).to(dtype) / 4, 1e-6)
    step.check(triton_kernels, kernel_device, norm)


@settings(max_examples=6)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 150), st.integers(1, 12)).map(lambda x: (x[0], x[0] + x[1])),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    block_size=st.sampled_from([16, 24, 128]),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    triton_kernels: Kernels, kernel_device: str, spans: Any, block_size: int, seed: int
) -> None:
    Step(spans, (2, 1), 16, block_size, F16, seed).check(triton_kernels, kernel_device)


@pytest.mark.parametrize(
    "contexts",
    [[1], [64], [13 * 64], [65, 0, 0], [0], [1, 5000, 64, 200], [1000] * 20, [0, 3000, 0, 1]],
    ids=lambda contexts: f"{len(contexts)}x{max(contexts)}",
)
@pytest.mark.parametrize("span", [None, Span(100), Span(300, chunked=True)], ids=repr)
def test_pieces_cover_each_context_once(kernel_device: str, contexts: list[int], span: Span | None) -> None:
    from engine.kernels.decode_attention import BLOCK_N, PIECES_PER_SM, partition

    multiprocessors, kv_heads = 3, 2
    pieces = partition(
        torch.tensor(contexts, dtype=torch.int32, device=kernel_device), kv_heads, multiprocessors, span
    )
    seen = first_seen(torch.tensor(contexts) - 1, span).clamp_min(0).tolist()
    assert not pieces.finished.any()
    work, first = pieces.work.tolist(), pieces.first.tolist()
    assert len(work) == len(contexts) + PIECES_PER_SM * multiprocessors // kv_heads
    longest = max(stop - start for _, start, stop in work)
    for i, context in enumerate(contexts):
        own = work[first[i] : first[i + 1]]
        assert [request for request, _, _ in own] == [i] * len(own)
        ends = [seen[i], *(stop for _, _, stop in own)]
        assert [start for _, start, _ in own] == ends[:-1]
        assert ends[-1] == context
        assert all(start < stop for _, start, stop in own) if context else len(own) == 1
        assert all(start % BLOCK_N == 0 for _, start, _ in own[1:])
    assert all(request == -1 for request, _, _ in work[first[-1] :]), "the rest does nothing"
    if longest > BLOCK_N:
        shorter = -(-longest // BLOCK_N) * BLOCK_N - BLOCK_N
        tiles = (-(-stop // BLOCK_N) - start // BLOCK_N for start, stop in zip(seen, contexts, strict=True))
        needed = sum(max(1, -(-count * BLOCK_N // shorter)) for count in tiles)
        assert needed > len(work), "no shorter length makes do"


@pytest.mark.parametrize(("few", "heads"), [(2, (2, 1)), (1, (6, 2))], ids=["each head", "last program"])
def test_combining_more_pieces_than_fit_one_pass(
    triton_kernels: Kernels, kernel_device: str, few: int, heads: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from engine.kernels import decode_attention

    monkeypatch.setattr(decode_attention, "COMBINED", 2)
    monkeypatch.setattr(decode_attention, "COMBINED_LAST", 8)
    monkeypatch.setattr(decode_attention, "FEW_REQUESTS", few)
    monkeypatch.setattr(decode_attention, "PIECES_PER_SM", 8)
    Step([(350, 351), (9, 10)], heads, 64, 16).check(triton_kernels, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "few"), [(F16, 32), (BF16, 32), (BF16, 0)])
def test_a_captured_decode_step_serves_other_lengths(
    triton_kernels: Kernels, dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of a step with three requests, replayed for longer requests, and for two with padding."""
    from engine.kernels import decode_attention

    monkeypatch.setattr(decode_attention, "FEW_REQUESTS", few)
    steps = [
        Step([(c - 1, c) for c in contexts], (8, 2), 128, 128, dtype, seed=i)
        for i, contexts in enumerate([(100, 200, 3000), (2999, 5, 1), (1, 700, 2500)])
    ]
    kv = torch.full((2, 80, 128, 2, 128), torch.nan, dtype=dtype, device="cuda")
    qkv, rotary = torch.empty_like(steps[0].qkv, device="cuda"), steps[0].rotary.cuda()
    slots = torch.empty(3, dtype=torch.int64, device="cuda")
    metadata = AttentionMetadata(
        128,
        slots,
        torch.zeros(3, 32, dtype=torch.int32, device="cuda"),
        torch.ones(3, dtype=torch.int32, device="cuda"),
        3,
        [],
    )

    def load(step: Step) -> None:
        m, (_, blocks) = step.metadata, step.kv.shape[:2]
        kv.fill_(torch.nan)[:, :blocks].copy_(step.kv)
        qkv.copy_(step.qkv)
        rotary.copy_(step.rotary)
        slots.copy_(m.slots)
        metadata.block_tables[:, : m.block_tables.shape[1]].copy_(m.block_tables)
        metadata.contexts.copy_(m.contexts)

    def forward() -> Tensor:
        q, k, v = triton_kernels.rope_and_write(qkv, rotary, None, kv, slots)
        return triton_kernels.attention(q, k, v, kv, triton_kernels.plan(metadata, 8, 2, dtype))

    load(steps[0])
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for step in steps:
        expected, _, _ = step.run(TorchKernels(), "cpu", exact=True)
        load(step)
        graph.replay()
        close(out, expected)
    slots[1], metadata.contexts[1] = -1, 0
    qkv.copy_(steps[-1].qkv)
    graph.replay()
    assert not out[1].any()
    close(out[[0, 2]], expected[[0, 2]])


def test_padding_rows_write_and_read_nothing(triton_kernels: Kernels, kernel_device: str) -> None:
    """Padding as in a captured graph."""
    step = Step([(8, 9), (40, 41), (41, 42)], (2, 1), 64, 16)
    expected, expected_kv, _ = step.run(TorchKernels(), "cpu")
    m = step.metadata
    padded_kv = step.kv.clone()
    m.slots[1], m.contexts[1] = -1, 0
    out, kv, _ = step.run(triton_kernels, kernel_device)
    assert not out[1].any()
    close(out[[0, 2]], expected[[0, 2]])
    changed = ~torch.eq(kv.cpu().nan_to_num(7), padded_kv.nan_to_num(7)).all(-1).all(0).flatten()
    assert int(changed.sum()) == 2
    assert expected_kv.isfinite().all(-1).all(0).sum() == 9 + 41 + 42


def test_a_head_dim_that_no_tile_fits_is_refused(kernel_device: str) -> None:
    from engine.kernels.triton_kernels import TritonKernels

    with pytest.raises(ValueError, match=r"head_dim 24 cannot run on CUDA .* use --device cpu"):
        TritonKernels(torch.device(kernel_device), 24)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {"num_hidden_layers": 2}),
        ("Qwen3Moe", {"num_hidden_layers": 1}),
        ("Llama4", {"no_rope_layers": [1, 0], "num_hidden_layers": 2, "attention_chunk_size": 4}),
        ("GptOss", {"num_hidden_layers": 2, "sliding_window": 4}),
        ("Bamba", {"num_hidden_layers": 2}),
        ("Qwen3Next", {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}),
    ],
)
def test_an_engine_on_these_kernels(
    kind: str,
    changes: dict[str, Any],
    tmp_path: Path,
    save_tiny: Any,
    check_tokens_of_kernels: Callable[..., None],
) -> None:
    save_tiny(tmp_path, kind, head_dim=16, **changes)
    check_tokens_of_kernels(tmp_path)


def test_without_triton_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import kernels_for

    for name in [name for name in sys.modules if name.split(".")[0] == "triton" or "kernels." in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match=r"--device cuda:1 needs Triton: .*pip install -e '.\[cuda\]'"):
        kernels_for(torch.device("cuda:1"), 64)


@pytest.mark.long
def test_all_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    """In another process, because Triton interprets in this one."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.compile_kernels"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("_prefill") == ran.stdout.count("_split") == 14
