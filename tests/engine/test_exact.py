"""The exact mode: the bits of a row do not depend on the other rows of its step, nor on the cut of its prompt.

In Triton's interpreter the tensor cores are a chain of float32 additions (`chained_products`): products of
any shape add in the order of the columns, as `wgmma` does. On a GPU the same tests run in the model's dtypes.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.kernels import AttentionMetadata, Kernels
from baton.engine.model_config import Span
from tests.device import DEVICE
from tests.engine.kernel_checks import BF16, F16, F32, normal

ON_GPU = DEVICE == "cuda"
HALVES = [BF16, F16] if ON_GPU else [F32]


@pytest.fixture
def exact_kernels(
    triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> Kernels:
    monkeypatch.setattr(triton_kernels, "exact", True)
    if not ON_GPU:
        chained_products(monkeypatch)
    return triton_kernels


def chained_products(patch: pytest.MonkeyPatch) -> None:
    """NumPy adds in an order that depends on the shapes of both operands."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[None, k]
        return TensorHandle(total, d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", dot)


class Sequences:
    """Requests with all their KV cached, and the queries of all positions."""

    def __init__(
        self, lengths: Sequence[int], heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.heads, self.block_size, self.dtype = heads, block_size, dtype
        width = max(-(-length // block_size) for length in lengths)
        order = list(range(len(lengths) * width))
        random.Random(0).shuffle(order)
        self.tables = torch.tensor(order, dtype=torch.int32, device=DEVICE).view(len(lengths), width)
        self.kv = normal(2, len(order), block_size, heads[1], head_dim).to(dtype).to(DEVICE)
        self.q = [normal(n, heads[0], head_dim, seed=i).mul(3).to(dtype).to(DEVICE) for i, n in enumerate(lengths)]
        self.sinks: Tensor | None = None
        self.span: Span | None = None

    def attend(
        self, kernels: Kernels, decodes: Sequence[tuple[int, int]], chunks: Sequence[tuple[int, int, int]], padding: int = 0
    ) -> Tensor:
        """Of decodes (request, position) and chunks (request, start, stop)."""
        requests = [request for request, *_ in (*decodes, *chunks)]
        spans = [(request, at, at + 1) for request, at in decodes] + list(chunks)
        q = torch.cat([self.q[request][start:stop] for request, start, stop in spans])
        contexts = torch.tensor([at + 1 for _, at in decodes] + [0] * padding, dtype=torch.int32, device=DEVICE)
        metadata = AttentionMetadata(
            self.block_size,
            torch.zeros(len(q), dtype=torch.int64, device=DEVICE),
            self.tables[requests],
            contexts,
            len(decodes),
            [(start, stop) for _, start, stop in chunks],
        )
        plan = kernels.plan(metadata, *self.heads, self.dtype, self.span)
        return kernels.attention(q, self.kv, plan, self.sinks, self.q[0].shape[2] ** -0.5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("span", "with_sinks"), [(None, False), (None, True), (Span(100), True), (Span(160, chunked=True), False)]
)
def test_attention(
    exact_kernels: Kernels, dtype: torch.dtype, span: Span | None, with_sinks: bool
) -> None:
    """Of a query: as a decode alone and beside others, and in chunks of several lengths."""
    length = 4500 if ON_GPU else 330
    shapes = [((4, 2), 64, 16), ((3, 1), 64, 128)] + [((8, 2), 128, 128)] * ON_GPU
    for heads, head_dim, block_size in shapes:
        requests = Sequences([length, length // 2, 40], heads, head_dim, block_size, dtype)
        requests.span = span
        requests.sinks = normal(heads[0], seed=5).to(dtype).to(DEVICE) if with_sinks else None
        whole = requests.attend(exact_kernels, [], [(0, 0, length)])
        draw = random.Random(1)
        positions = sorted({0, 63, 64, length - 1, *(draw.randrange(length) for _ in range(3))})
        for at in positions:
            alone = requests.attend(exact_kernels, [(0, at)], [])[0]
            beside = requests.attend(exact_kernels, [(1, length // 3), (0, at), (2, 3)], [(2, 5, 30)])[1]
            assert torch.equal(alone, whole[at]), at
            assert torch.equal(beside, alone), at
        cut = draw.randrange(1, length)
        chunks = [requests.attend(exact_kernels, [(1, 7)], [(0, *part)])[1:] for part in ((0, cut), (cut, length))]
        assert torch.equal(torch.cat(chunks), whole)


def test_pieces_are_whole_segments(exact_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pieces depends on the batch, the bits do not: one piece, and several of some segments."""
    length = 9000 if ON_GPU else 600
    requests = Sequences([length] * 3, (2, 1), 64, 128, HALVES[0])
    alone = requests.attend(exact_kernels, [(0, length - 1)], [])[0]
    monkeypatch.setattr(exact_kernels, "_multiprocessors", 0)
    together = requests.attend(exact_kernels, [(i, length - 1) for i in range(3)], [])[0]
    assert torch.equal(alone, together)
