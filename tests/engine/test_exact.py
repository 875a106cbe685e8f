"""The exact mode: the bits of a row depend neither on the rows beside it nor on the cut of its prompt.

In Triton's interpreter the tensor cores are a chain of float32 additions (`chained_products`): products of
any shape add in the order of the columns, as `wgmma` does. On a GPU the same tests run in the model's dtypes.
"""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from baton.bench.lab.shapes import DENSE, SHAPES
from baton.engine import Engine, EngineConfig, SpeculativeConfig, build_engine
from baton.engine.execution import numerics
from baton.engine.kernels import (
    KV,
    AttentionMetadata,
    Both,
    Choice,
    Experts,
    FourBits,
    Fp8Experts,
    Fp8KV,
    HeadNorm,
    Kernels,
    LatentHeads,
    LatentNorm,
    LayerState,
    exact_linear,
)
from baton.engine.kernels.attention import latent_tiling, online_softmax
from baton.engine.kernels.quantized.reference import four_bits, of_experts
from baton.engine.layers.linear import PlainLinear
from baton.engine.loader import check_model
from baton.engine.model_config import LatentConfig, Scoring, Span
from baton.kv_names.cache_kinds import latent_head_dim
from tests.device import DEVICE
from tests.engine.conftest import request_of, run
from tests.engine.drafting import draft_always
from tests.engine.kernel_checks import BF16, F16, F32, normal
from tests.engine.random_checkpoints import save_random
from tests.engine.test_fp8_kv import quantized
from tests.engine.test_groups import random_groups
from tests.engine.test_latents import FAMILIES
from tests.engine.test_mamba2 import HEADS, DeltaStep, KimiStep, Step, layer_of

pytestmark = pytest.mark.all

ON_GPU = DEVICE == "cuda"
HALVES = [BF16, F16] if ON_GPU else [F32]


@pytest.fixture
def exact_kernels(triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setattr(triton_kernels, "exact", True)
    if not ON_GPU:
        chained_products(monkeypatch)
        shorten_segments(monkeypatch, 128)
    return triton_kernels


def shorten_segments(patch: pytest.MonkeyPatch, size: int) -> None:
    """Of `size` positions, so that short contexts have several."""
    for module in (online_softmax, latent_tiling):
        patch.setattr(module, "SEGMENT", tl.constexpr(size))


def chained_products(patch: pytest.MonkeyPatch) -> None:
    """NumPy's products add in an order that depends on the shapes of both operands. Its sums over the first
    axis add one slice after the other, except where a slice has one number."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        assert d.data.size > 1
        terms = np.empty((a.data.shape[1] + 1, *d.data.shape), d.data.dtype)
        terms[0] = d.data
        lhs, rhs = (operand.data.astype(terms.dtype) for operand in (a, b))
        np.multiply(lhs.T[:, :, None], rhs[:, None], out=terms[1:])
        return TensorHandle(np.add.reduce(terms, axis=0), d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", dot)


class Sequences:
    """Requests with all their KV cached, and the queries of all positions."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        fp8: bool = False,
    ) -> None:
        self.heads, self.block_size, self.dtype = heads, block_size, dtype
        width = max(-(-length // block_size) for length in lengths)
        order = list(range(len(lengths) * width))
        random.Random(0).shuffle(order)
        self.tables = torch.tensor(order, dtype=torch.int32, device=DEVICE).view(len(lengths), width)
        plain = normal(2, len(order), block_size, heads[1], head_dim).to(dtype)
        self.kv: KV = quantized(plain, DEVICE) if fp8 else plain.to(DEVICE)
        self.q = [
            normal(n, heads[0], head_dim, seed=i).mul(3).to(dtype).to(DEVICE) for i, n in enumerate(lengths)
        ]
        self.sinks: Tensor | None = None
        self.span: Span | None = None

    def step(
        self,
        decodes: Sequence[tuple[int, int]],
        chunks: Sequence[tuple[int, int, int]],
    ) -> tuple[Tensor, AttentionMetadata]:
        """Of decodes (request, position) and chunks (request, start, stop)."""
        requests = [request for request, *_ in (*decodes, *chunks)]
        spans = [(request, at, at + 1) for request, at in decodes] + list(chunks)
        q = torch.cat([self.q[request][start:stop] for request, start, stop in spans])
        contexts = torch.tensor([at + 1 for _, at in decodes], dtype=torch.int32, device=DEVICE)
        return q, AttentionMetadata(
            self.block_size,
            torch.zeros(len(q), dtype=torch.int64, device=DEVICE),
            self.tables[requests],
            contexts,
            len(decodes),
            [(start, stop) for _, start, stop in chunks],
        )

    def attend(
        self,
        kernels: Kernels,
        decodes: Sequence[tuple[int, int]],
        chunks: Sequence[tuple[int, int, int]],
    ) -> Tensor:
        q, metadata = self.step(decodes, chunks)
        tiling = kernels.tile(metadata, *self.heads, self.dtype, self.span)
        return kernels.attention(q, self.kv, tiling, self.sinks, self.q[0].shape[2] ** -0.5)

    def check(self, kernels: Kernels, length: int) -> None:
        """Of the first request, which has `length` positions: a query as a decode alone and beside others,
        and in chunks of several lengths."""
        whole = self.attend(kernels, [], [(0, 0, length)])
        draw = random.Random(1)
        positions = [0, 63, 64, draw.randrange(length), length - 1]
        for at in positions[1:]:
            assert torch.equal(self.attend(kernels, [(0, at)], [])[0], whole[at]), at
        decodes = [(1, length // 3), *((0, at) for at in positions), (2, 3)]
        beside = self.attend(kernels, decodes, [(2, 5, 30)])[1 : 1 + len(positions)]
        assert torch.equal(beside, whole[positions])
        cuts = [0, draw.randrange(1, length - 40), length - 20, length]
        chunks = [self.attend(kernels, [(1, 7)], [(0, *part)])[1:] for part in pairwise(cuts)]
        assert torch.equal(torch.cat(chunks), whole)


class Latents(Sequences):
    """As `Sequences`, with latents."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        dims: tuple[int, int, int, int],
        block_size: int,
        dtype: torch.dtype,
        *,
        fp8: bool = False,
    ) -> None:
        """`dims`: as in `LatentStep`."""
        rank, nope, rope, value = dims
        super().__init__(lengths, (heads, 1), nope + rope, block_size, dtype)
        self.shape, cut = LatentConfig(None, *dims, (nope + rope) ** -0.5), latent_head_dim(rank, rank + rope)
        plain = normal(1, self.tables.numel(), block_size, (rank + rope) // cut, cut).to(dtype)
        self.kv = quantized(plain, DEVICE) if fp8 else plain.to(DEVICE)
        up = (normal(heads, nope + value, rank, seed=90) / rank**0.5).to(dtype).to(DEVICE)
        self.up = LatentHeads.of(up, self.shape)

    def attend(
        self,
        kernels: Kernels,
        decodes: Sequence[tuple[int, int]],
        chunks: Sequence[tuple[int, int, int]],
    ) -> Tensor:
        q, metadata = self.step(decodes, chunks)
        fp8 = isinstance(self.kv, Fp8KV)
        tiling = kernels.tile_latent(metadata, self.heads[0], self.shape, self.dtype, fp8=fp8)
        return kernels.latent_attention(q, self.kv, tiling, self.up)


@pytest.mark.parametrize("itemsize", [1, 2])
def test_no_sum_is_cut_into_parts(itemsize: int) -> None:
    """The order of its additions would then depend on the number of rows."""
    shapes = product((1, 16, 64, 65, 500), (512, 4096, 14336), (64, 1024, 128256))
    assert {exact_linear.tiling(*shape, itemsize, 132).splits for shape in shapes} == {1}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("turn", "span", "with_sinks"),
    [(0, None, False), (1, None, True), (1, Span(100), True), (0, Span(160, chunked=True), False)],
)
@pytest.mark.usefixtures("exact_casts")
def test_attention(
    exact_kernels: Kernels, dtype: torch.dtype, turn: int, span: Span | None, with_sinks: bool, fp8: bool
) -> None:
    """A long chunk of a cache in FP8 gathers its blocks, others convert tiles. In the interpreter each span
    has one shape with a cache in FP8, and the other without."""
    length = 4500 if ON_GPU else 200
    shapes = [((4, 2), 64, 16), ((3, 1), 64, 192)]
    shapes = [*shapes, ((8, 2), 128, 128)] if ON_GPU else [shapes[(turn + fp8) % 2]]
    for heads, head_dim, block_size in shapes:
        requests = Sequences([length, length // 2, 40], heads, head_dim, block_size, dtype, fp8=fp8)
        requests.span = span
        requests.sinks = normal(heads[0], seed=5).to(dtype).to(DEVICE) if with_sinks else None
        requests.check(exact_kernels, length)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=() if ON_GPU else pytest.mark.long)])
@pytest.mark.usefixtures("exact_casts")
def test_latents(
    exact_kernels: Kernels, dtype: torch.dtype, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks that the default expands, and with more decodes than have partial results at once."""
    length, cases = 110, [(4, (32, 16, 16, 16), 16)]
    if not ON_GPU:
        monkeypatch.setattr(latent_tiling, "MOST_EXACT", 24)
        shorten_segments(monkeypatch, 64)
    else:
        sizes = (512, 128, 64, 128), (512, 192, 64, 256)
        length, cases = 4500, [(16, sizes[0], 64), (20, sizes[1], 128), (20, sizes[1], 16)]
    for heads, dims, block_size in cases:
        requests = Latents([length, length // 2, 40], heads, dims, block_size, dtype, fp8=fp8)
        requests.check(exact_kernels, length)
        positions = range(length - 150, length) if ON_GPU else range(60, 90)
        many = requests.attend(exact_kernels, [(0, at) for at in positions], [])
        assert torch.equal(
            many[::13], requests.attend(exact_kernels, [(0, at) for at in positions[::13]], [])
        )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("on_cpu", [False, True])
def test_latents_that_are_written(exact_kernels: Kernels, dtype: torch.dtype, on_cpu: bool) -> None:
    """The bits of a token in the cache, and of its rotated query."""
    rank, rope, heads, count, size = 128, 32, 3, 70, 64
    kernels, device = (Kernels(exact=True), "cpu") if on_cpu else (exact_kernels, DEVICE)
    made = normal(count, heads * size + rank + rope).to(BF16 if on_cpu else dtype).to(device)
    norm = LatentNorm(normal(rank, seed=1).to(made.dtype).to(device), 1e-6)
    rotary, slots = normal(count, 2, rope, seed=2).to(device), torch.arange(count, device=device)

    def written(rows: int) -> list[Tensor]:
        q, latent, shared = made[:rows].clone().split((heads * size, rank, rope), dim=1)
        kv, q = made.new_zeros(1, 5, 16, 5, 32), q.unflatten(1, (heads, size))
        kernels.write_latent(q, latent, shared, norm, rotary[:rows], kv, slots[:rows])
        return [q, kv.flatten(0, 2)[:rows]]

    whole = written(count)
    for rows in (1, 2, 17):
        for some, of_all in zip(written(rows), whole, strict=True):
            assert torch.equal(some, of_all[:rows])


def test_pieces_of_latents_are_the_segments_of_a_context(triton_kernels: Kernels) -> None:
    """Of decodes, which a GPU cuts, and of the queries of a chunk, which the host cuts."""
    contexts = [1, 256, 257, 4096, 4097, 70000]
    on_device = torch.tensor([*contexts, 0], dtype=torch.int32, device=DEVICE)
    pieces = latent_tiling.partition(on_device, 1, 16 * len(on_device), segments=True)
    first, work = pieces.first.tolist(), pieces.work.tolist()
    for row, context in enumerate(contexts):
        chunk = latent_tiling.pieces_between(context - 1, context, 32, 1, torch.device(DEVICE), exact=True)
        assert [piece[1:] for piece in work[first[row] : first[row + 1]]] == chunk.work[:, 1:].tolist()
        assert chunk.first.tolist() == [0, first[row + 1] - first[row]]
    assert work[first[-2]][1:] == [0, 0], "padding has one piece, which writes zeros"
    assert {piece[0] for piece in work[first[-1] :]} == {-1}


def test_pieces_are_whole_segments(exact_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pieces depends on the batch, the bits do not: one piece, and several of some segments."""
    length = 9000 if ON_GPU else 300
    requests = Sequences([length] * 3, (2, 1), 64, 128, HALVES[0])
    alone = requests.attend(exact_kernels, [(0, length - 1)], [])[0]
    monkeypatch.setattr(exact_kernels, "_multiprocessors", 0)
    together = requests.attend(exact_kernels, [(i, length - 1) for i in range(3)], [])[0]
    assert torch.equal(alone, together)


def test_padding_requests_get_zeros(exact_kernels: Kernels) -> None:
    """As in a captured graph. The other requests keep their bits, also in the layers after."""
    requests = Sequences([300, 300], (4, 2), 64, 16, HALVES[0])
    q = torch.cat([requests.q[0][[200]], requests.q[0][[299]].fill_(torch.nan), requests.q[1][[280]]])
    contexts = torch.tensor([201, 0, 281], dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    metadata = AttentionMetadata(16, slots, requests.tables[[0, 0, 1]], contexts, 3, [])
    tiling = exact_kernels.tile(metadata, 4, 2, HALVES[0])
    alone = requests.attend(exact_kernels, [(0, 200), (1, 280)], [])
    for _ in range(2):
        out = exact_kernels.attention(q, requests.kv, tiling, None, 64**-0.5)
        assert not out[1].any()
        assert torch.equal(out[[0, 2]], alone)
    assert not tiling.pieces.finished.any()


def test_the_default_differs(triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the mode the same comparison finds other bits."""
    if not ON_GPU:
        chained_products(monkeypatch)
    length = 330
    requests = Sequences([length], (4, 2), 64, 16, HALVES[0])
    whole = requests.attend(triton_kernels, [], [(0, 0, length)])
    decoded = requests.attend(triton_kernels, [(0, at) for at in range(200, length, 40)], [])
    assert not torch.equal(decoded, whole[200::40])


@pytest.mark.parametrize("span", [None, Span(100)])
def test_attention_on_a_cpu(span: Span | None) -> None:
    """In bfloat16. With heads like these, about a sixth of the queries differ in the default."""
    if ON_GPU:
        pytest.skip("the kernels of a CPU")
    kernels, length = Kernels(exact=True), 600
    requests = Sequences([length, 90], (9, 3), 64, 16, BF16)
    requests.span = span
    whole = requests.attend(kernels, [], [(0, 0, length)])
    alone = torch.cat([requests.attend(kernels, [(0, at)], []) for at in range(0, length, 7)])
    beside = requests.attend(kernels, [(1, 80), (0, 201)], [(0, 7, 100), (1, 0, 30)])
    assert torch.equal(alone, whole[::7])
    assert torch.equal(beside[1:95], torch.cat((whole[201:202], whole[7:100])))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dims", [(512, 192, 64, 256), (64, 8, 16, 8)])
def test_latents_on_a_cpu(dims: tuple[int, int, int, int], fp8: bool) -> None:
    """In bfloat16. The default expands chunks, with the second sizes from 10 queries on."""
    if ON_GPU:
        pytest.skip("the kernels of a CPU")
    length = 600
    Latents([length, length // 2, 40], 5, dims, 16, BF16, fp8=fp8).check(Kernels(exact=True), length)


@pytest.mark.parametrize("dtype", [BF16, F16] if ON_GPU else [F32, BF16])
def test_products(kernel_device: str, dtype: torch.dtype) -> None:
    """With any number of rows, by all tiles: those of few rows and of many, with a bias."""
    weight = normal(200, 1536).mul(0.05).to(dtype).to(DEVICE)
    product = PlainLinear(weight, normal(200, seed=1).to(dtype).to(DEVICE), exact=True)
    rows = normal(700, 1536, seed=2).to(dtype).to(DEVICE)
    whole = product(rows)
    for count in (1, 2, 15, 16, 17, 33, 64, 65, 129, 256, 257, 600):
        assert torch.equal(product(rows[-count:].contiguous()), whole[-count:]), count


@pytest.mark.parametrize("dtype", [BF16, F16] if ON_GPU else [F16])
@pytest.mark.parametrize(("size", "columns", "zeros"), [(32, 288, True), (64, 512, False), (128, 256, False)])
@pytest.mark.usefixtures("exact_kernels")
def test_products_in_four_bits(size: int, columns: int, zeros: bool, dtype: torch.dtype) -> None:
    """Codes that a product reads, and codes that are written to memory first."""
    from baton.engine.kernels.quantized.int4_linear import MAX_EXACT_ROWS, Int4Linear

    out = 2560 if ON_GPU else 80
    groups = random_groups(out, columns, size).on(torch.device(DEVICE))
    weight, bias = four_bits(groups.codes, groups.scales, groups.zeros * zeros, dtype), normal(out)
    product = Int4Linear(weight, bias.to(dtype).to(DEVICE), 3, exact=True)
    assert product.quantizes(600) is None
    rows = normal(MAX_EXACT_ROWS + 40, columns, seed=2).to(dtype).to(DEVICE)
    whole = product(rows)
    torch.testing.assert_close(
        whole.float(), rows.float() @ weight.exact().float().T + bias.to(DEVICE), rtol=0.02, atol=0.02
    )
    for count in (1, 2, 3, 16, 17, 33, 64, 65, MAX_EXACT_ROWS, MAX_EXACT_ROWS + 1):
        assert torch.equal(product(rows[-count:].contiguous()), whole[-count:]), count
    gated = product.silu_mul(rows, Kernels())
    assert torch.equal(product.silu_mul(rows[:1].contiguous(), Kernels()), gated[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("grouped", [False, True])
def test_products_in_fp8(triton_kernels: Kernels, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "exact", True)
    weight = triton_kernels.quantize(normal(1024, 512).cuda(), grouped=grouped)
    product = triton_kernels.fp8_linear(weight.values, weight.scales.T.contiguous(), None, BF16)
    rows = normal(700, 512, seed=2).to(BF16).cuda()
    whole = product(triton_kernels.quantize(rows, grouped=grouped))
    for count in (1, 16, 17, 33, 64, 65, 129, 256, 257, 600):
        some = triton_kernels.quantize(rows[:count].contiguous(), grouped=grouped)
        assert torch.equal(product(some), whole[:count]), count


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_experts(exact_kernels: Kernels, fp8: bool) -> None:
    """Few pairs and many for each expert: all tiles."""
    experts, size, inner = 16, 512, 256
    matrices = [normal(experts, *shape).mul(0.05).cuda() for shape in ((2 * inner, size), (size, inner))]
    held: list[Any] = [matrix.to(BF16) for matrix in matrices]
    if fp8:
        quantized = [exact_kernels.quantize(matrix.flatten(0, 1), grouped=False) for matrix in matrices]
        held = [
            Fp8Experts(q.values.view(matrix.shape), q.scales.view(experts, 1, -1))
            for q, matrix in zip(quantized, matrices, strict=True)
        ]
    layer = Experts(held[0], held[1], Choice(4, Scoring.NORMALIZED_SOFTMAX))
    check_experts(exact_kernels, layer, experts, size, BF16, (1, 8, 40, 100, 200, 300, 700, 1500, 3000))


@pytest.mark.parametrize("dtype", [BF16, F16] if ON_GPU else [F16])
@pytest.mark.parametrize("floats", [False, True])
def test_experts_in_four_bits(exact_kernels: Kernels, dtype: torch.dtype, floats: bool) -> None:
    experts, size, inner = (16, 512, 256) if ON_GPU else (4, 96, 64)

    def held(out: int, columns: int) -> FourBits:
        codes, scales, zeros = random_groups(out, columns, 32).on(torch.device(DEVICE))[:3]
        each = [
            four_bits(codes.roll(i, 0), scales, zeros * (not floats), dtype, floats=floats)
            for i in range(experts)
        ]
        return of_experts(each)

    layer = Experts(held(2 * inner, size), held(size, inner), Choice(4, Scoring.NORMALIZED_SOFTMAX))
    rows = (1, 8, 40, 100, 200, 300, 700, 1500) if ON_GPU else (1, 10, 22, 60, 210)
    check_experts(exact_kernels, layer, experts, size, dtype, rows)


def test_experts_on_a_cpu() -> None:
    if ON_GPU:
        pytest.skip("the kernels of a CPU")
    experts, size, inner = 8, 512, 200
    gate_up, down = normal(experts, 2 * inner, size), normal(experts, size, inner, seed=1)
    choice = Choice(3, Scoring.NORMALIZED_SIGMOID, 4, 2, bias=normal(experts))
    layer = Experts(gate_up.mul(0.05).to(BF16), down.mul(0.05).to(BF16), choice)
    check_experts(Kernels(exact=True), layer, experts, size, BF16, (1, 2, 7, 40, 41, 300))


def check_experts(
    kernels: Kernels, layer: Experts, experts: int, size: int, dtype: torch.dtype, rows: Sequence[int]
) -> None:
    """The results of so many rows are those of the most rows."""
    x = normal(rows[-1], size).to(dtype).to(DEVICE)
    logits = normal(rows[-1], experts, seed=3).to(dtype).to(DEVICE)

    def mixed(count: int) -> Tensor:
        counts = torch.zeros(experts, dtype=torch.int32, device=DEVICE)
        rows, grouped = x[:count].contiguous(), layer.quantizes(count)
        inputs = rows if grouped is None else Both(rows, kernels.quantize(rows, grouped=grouped))
        return kernels.mix_experts(inputs, logits[:count].contiguous(), layer, counts)

    whole = mixed(rows[-1])
    for count in rows[:-1]:
        assert torch.equal(mixed(count), whole[:count]), count


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("kind", [Step, DeltaStep, KimiStep])
def test_states(exact_kernels: Kernels, kind: type[Step], on_cpu: bool, dtype: torch.dtype) -> None:
    """Of a request: in one chunk, in several ones, as decodes, and in a copy of its state."""
    kernels, device = (Kernels(exact=True), "cpu") if on_cpu else (exact_kernels, DEVICE)
    dtype = BF16 if on_cpu else dtype
    layer, length = layer_of(HEADS if kind is KimiStep else 2, dtype), 110
    step, channels = kind([(0, 1)], layer, dtype), layer.conv_weight.shape[1]
    parameters, parts = step.parameters(device), [part.shape[1] for part in step.inputs()]
    inputs = normal(3, length, sum(parts), seed=6).to(dtype).to(device)

    def ran(state: LayerState, *spans: tuple[int, int, int], copied: int = 0) -> Sequence[Tensor]:
        """y of spans (request, start, stop), decodes first. A copy of the state after so many tokens goes to
        the last slot."""
        decodes = sum(stop - start == 1 for _, start, stop in spans)
        x = torch.cat([inputs[request, start:stop] for request, start, stop in spans])
        copies = torch.zeros(len(x), dtype=torch.int32, device=device)
        copies[copied - 1] = 4
        metadata = AttentionMetadata(
            1,
            x,
            x,
            torch.tensor([stop for *_, stop in spans], dtype=torch.int32, device=device),
            decodes,
            [(start, stop) for _, start, stop in spans[decodes:]],
            state_slots=torch.tensor([request for request, *_ in spans], dtype=torch.int32, device=device),
            state_copies=copies if copied else None,
        )
        x, *beside = x.split(parts, dim=1)
        y = kernels.mix_states(x, beside, parameters, state, kernels.tile_states(metadata, dtype))
        return y.split([stop - start for _, start, stop in spans])

    def states() -> LayerState:
        conv, ssm = torch.zeros(4, 3, channels, dtype=dtype), torch.zeros(4, HEADS, 16, 32)
        return LayerState(conv.to(device), ssm.to(device))

    once, parted, short = states(), states(), states()
    (whole,) = ran(once, (0, 0, length), copied=64)
    found = [ran(parted, (1, 0, 1), (0, 0, 70), (2, 0, 30))[1]]
    found += [ran(parted, (1, at - 69, at - 68), (0, at, at + 1))[1] for at in range(70, 74)]
    found += [ran(parted, (2, 30, 31), (0, 74, length))[1]]
    ran(short, (0, 0, 64))
    assert torch.equal(torch.cat(found), whole)
    for of_once, of_parted, of_short in zip(once, parted, short, strict=True):
        assert torch.equal(of_once[0], of_parted[0])
        assert torch.equal(of_once[3], of_short[0])


def test_norms_activations_and_rotation(exact_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of many tokens rotate several of them in a program."""
    from baton.engine.kernels.attention import rope

    many, dtype, heads, size = (1500, HALVES[0], 6, 192) if ON_GPU else (40, HALVES[0], 6, 192)
    monkeypatch.setattr(rope, "MANY", many)
    x, delta, gate_up = (normal(many, n, seed=n).to(dtype).to(DEVICE) for n in (size, size + 1, 2 * size))
    qkv = normal(many, heads, 64, seed=9).to(dtype).to(DEVICE)
    rotary, weight = normal(many, 2, 64).to(DEVICE), normal(size).to(dtype).to(DEVICE)
    norm = HeadNorm(normal(5, 64).to(dtype).to(DEVICE), 1e-6)
    slots = torch.arange(many, device=DEVICE)

    def results(rows: int) -> list[Tensor]:
        residual = x[:rows].clone()
        kv = torch.zeros(2, -(-many // 16), 16, 1, 64, dtype=dtype, device=DEVICE)
        normed = exact_kernels.add_rms_norm(residual, delta[:rows, :size].contiguous(), weight, 1e-6)
        inner = exact_kernels.activate(gate_up[:rows].clone())
        q = exact_kernels.rope_and_write(qkv[:rows].clone(), rotary[:rows], norm, kv, slots[:rows])
        small = quantized(kv.cpu(), DEVICE)
        exact_kernels.rope_and_write(qkv[:rows].clone(), rotary[:rows], norm, small, slots[:rows])
        written = kv, small.values.float(), small.scales.transpose(2, 3)[..., None]
        return [
            residual,
            normed,
            inner,
            q,
            *(part.flatten(1, 2)[:, :rows].transpose(0, 1) for part in written),
        ]

    whole = results(many)
    for rows in (1, 9):
        for some, of_all in zip(results(rows), whole, strict=True):
            assert torch.equal(some, of_all[:rows])


def test_thresholds_of_the_sampler(exact_kernels: Kernels) -> None:
    probs = normal(9, 3000, seed=4).mul(2).softmax(-1).to(DEVICE)
    limits = torch.full((9,), 3000, dtype=torch.int32), torch.full((9,), 0.9), torch.zeros(9)
    whole = exact_kernels.thresholds(probs, *(limit.to(DEVICE) for limit in limits))
    for rows in (1, 7):
        some = exact_kernels.thresholds(probs[:rows], *(limit[:rows].to(DEVICE) for limit in limits))
        assert torch.equal(some, whole[:rows])


def built(model: Path, **settings: Any) -> Engine:
    """An engine in this mode, of small steps."""
    if not any(model.glob("*.safetensors")):
        settings |= {"load_format": "dummy", "num_blocks": 512, "max_model_len": 1024}
    sizes: Any = {"device": DEVICE, "max_num_batched_tokens": 64, "num_threads": 1, "batch_invariant": True}
    return build_engine(EngineConfig(str(model), dtype="bfloat16", **(sizes | settings)))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a GPU: 8 layers of Llama 8B."""
    path = tmp_path_factory.mktemp("llama")
    if ON_GPU:
        (path / "config.json").write_text(json.dumps(SHAPES[DENSE] | {"num_hidden_layers": 8}))
    else:
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2}
        save_random(path, "Llama", hidden_size=576, intermediate_size=1536, vocab_size=1000, **heads)
    return path


@pytest.fixture(scope="module")
def exact_engine(model_path: Path) -> Engine:
    return built(model_path, enable_prefix_caching=True)


def test_an_engine_gives_the_same_tokens_in_any_batch_and_after_a_recovery(exact_engine: Engine) -> None:
    assert different_tokens(exact_engine) == 0


def test_drafts_change_no_token(exact_engine: Engine, model_path: Path) -> None:
    """Requests share steps, and some of their drafts are wrong. Tokens are those of each alone, without any.
    Without the mode some differ."""
    tokens, apart = (60, 40) if ON_GPU else (24, 60)
    requests = [
        request_of(
            i, prompt_of(i, length), max_tokens=tokens, ignore_eos=True, temperature=0.8 * (i % 2), seed=i,
            logprobs=1,
        )
        for i, length in enumerate(range(3, 243, apart))
    ]  # fmt: skip
    alone = [bits(exact_engine, request)[0] for request in requests]
    three = SpeculativeConfig("ngram", num_speculative_tokens=3)
    engine = built(model_path, speculative_config=three)
    answers = {request.id: [token for token, _ in of] for request, of in zip(requests, alone, strict=True)}
    draft_always(engine, answers, 0.3, vocabulary=128_256 if ON_GPU else 1000)
    assert bits(engine, *requests) == alone
    stats = engine.stats().speculation
    assert stats is not None
    assert 0 < stats.accepted < stats.drafts


def test_an_engine_with_int4_weights(model_path: Path) -> None:
    """And with KV in FP8. A CPU dequantizes the weights at load."""
    assert different_tokens(built(model_path, quantization="int4", kv_cache_dtype="fp8")) == 0


@pytest.mark.parametrize(
    ("kind", "kv"),
    [
        ("DeepseekV3", "auto"),
        pytest.param("Glm4MoeLite", "fp8", marks=pytest.mark.long),
        pytest.param("GlmMoeDsa", "auto", marks=pytest.mark.long),
        ("Bamba", "fp8"),
        pytest.param("GraniteMoeHybrid", "auto", marks=pytest.mark.long),  # as Bamba, with experts
        pytest.param("Qwen3Next", "auto", marks=pytest.mark.long),
        ("KimiLinear", "fp8"),
        ("Lfm2", "auto"),
    ],
)
@pytest.mark.usefixtures("one_form")
def test_an_engine_with_latents_or_states(kind: str, kv: str, tmp_path: Path) -> None:
    save_random(tmp_path, kind, vocab_size=1000)
    engine = built(tmp_path, kv_cache_dtype=kv, block_size=64, num_blocks=32, enable_prefix_caching=True)
    assert different_tokens(engine) == 0
    assert ("block=64" in engine.numerics.split("; ")) == (kind in (*FAMILIES, "KimiLinear"))


@pytest.mark.skipif(ON_GPU, reason="its kernels are for 16 bits, and another test has engines with them")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("DeepseekV3", {}),
        ("DeepseekV32", {"index_topk": 4}),
        ("Bamba", {}),
        ("Qwen3Next", {"layer_types": ["full_attention", "linear_attention"]}),
        ("KimiLinear", {"layer_types": ["full_attention", "linear_attention"]}),
    ],
)
@pytest.mark.usefixtures("exact_kernels")
def test_an_engine_on_the_kernels_of_a_gpu(
    kind: str, changes: Any, tmp_path: Path, check_tokens_of_kernels: Callable[..., None]
) -> None:
    save_random(tmp_path, kind, head_dim=16, num_hidden_layers=2, **changes)
    check_tokens_of_kernels(tmp_path)


@pytest.mark.skipif(ON_GPU, reason="the ranks are threads of one CPU")
def test_three_ranks_give_the_same_tokens_in_any_batch_and_after_a_recovery(
    model_path: Path, ranks: Callable[..., Engine]
) -> None:
    """Without the mode, a few of these tokens differ: the test can fail."""
    sizes: Any = {"dtype": "bfloat16", "max_num_batched_tokens": 64, "num_threads": 3, "quantization": "none"}
    assert different_tokens(ranks(model_path, 3, batch_invariant=True, **sizes)) == 0
    assert different_tokens(ranks(model_path, 3, **sizes)) > 0


def prompt_of(i: int, length: int) -> list[int]:
    return [(7 * i + 3 * j * j) % 900 + 5 for j in range(length)]


def different_tokens(engine: Engine) -> int:
    """How many tokens of requests together, and after a recovery, are not those of the same request alone, or
    have other log probabilities. Greedy and seeded. Together, prompts are cut into other chunks, share steps
    with decodes, and begin with cached blocks."""
    prompts = [prompt_of(i, length) for i, length in enumerate((3, 20, 75, 150))]

    def asked(i: int, output: Sequence[int] = ()) -> Any:
        sampled = {"temperature": 0.8, "seed": i} if i % 2 else {}
        return request_of(i, prompts[i], list(output), max_tokens=7, ignore_eos=True, logprobs=1, **sampled)

    alone = [bits(engine, asked(i))[0] for i in range(4)]
    recovered = [asked(i, [token for token, _ in alone[i][: 3 + i]]) for i in range(4)]
    found = bits(engine, *map(asked, range(4))) + bits(engine, *recovered)
    engine.assert_whole()
    expected = alone + [of_request[3 + i :] for i, of_request in enumerate(alone)]
    pairs = zip(found, expected, strict=True)
    return sum(a != b for ours, right in pairs for a, b in zip(ours, right, strict=True))


def bits(engine: Engine, *requests: Any) -> list[list[tuple[int, Any]]]:
    """For each request, its tokens and what a single bit would change: their log probabilities."""
    results = run(engine, list(requests))
    outputs = [results[request.id].outputs for request in requests]
    return [[(output.token, output.logprobs and output.logprobs.logprob) for output in of] for of in outputs]


def test_numerics_are_a_part_of_content_names(exact_engine: Engine, model_path: Path) -> None:
    default = built(model_path, batch_invariant=False, quantization="none")
    assert exact_engine.model_fingerprint == default.model_fingerprint
    assert exact_engine.content_root != default.content_root
    assert not default.numerics


def test_numerics_name_what_bits_depend_on(exact_engine: Engine, tmp_path: Path) -> None:
    named = dict(part.split("=") for part in exact_engine.numerics.split("; "))
    where = {"triton"} if ON_GPU else {"threads"}
    assert named.keys() == {"device", "ranks", "dtype", "kv", "format", "code", "torch"} | where
    assert named["torch"] == torch.__version__
    assert ON_GPU or named["threads"] == "1"
    copied = [tmp_path / room for room in numerics.COMPUTES]
    for room in copied:
        shutil.copytree(Path(numerics.__file__).parents[1] / room.name, room)
    hashes = [numerics.hash_of_sources(copied)]
    assert hashes == [named["code"]]
    for source in [max(room.rglob("*.py")) for room in copied]:
        source.write_bytes(source.read_bytes() + b"\n")
        hashes.append(numerics.hash_of_sources(copied))
    source.rename(source.with_stem("another_name"))
    hashes.append(numerics.hash_of_sources(copied))
    assert len({*hashes}) == len(hashes)


def test_more_than_two_ranks_of_gpus_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "Llama")
    config = EngineConfig(str(tmp_path), device="cuda", batch_invariant=True, tensor_parallel_size=4)
    with pytest.raises(ValueError, match="--batch-invariant: more than two ranks on GPUs"):
        check_model(config)
