"""Triton's kernels of mixtures of experts against the torch kernels that define them (`kernel_checks`)."""

import itertools

import pytest
import torch
from torch import Tensor

from baton.engine.kernels import Choice, Experts, Kernels
from baton.engine.kernels.moe.experts import route
from baton.engine.model_config import ClampedSwiGLU, Scoring
from tests.device import DEVICE
from tests.engine.kernel_checks import BF16, DTYPES, F16, F32, close, normal

pytestmark = pytest.mark.all

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


CLAMPED = ClampedSwiGLU(1.702, 7.0)
"""A quarter of the values are beyond the limit."""


@pytest.mark.parametrize("leaning", [*LEANINGS.values(), SATURATED], ids=[*LEANINGS, "saturated"])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (5, 2), (300, 4)])
@pytest.mark.parametrize(
    ("scoring", "groups"),
    [
        *((scoring, (1, 1)) for scoring in Scoring),
        # Llama 4's scoring has no groups.
        *((scoring, (3, 2)) for scoring in Scoring if scoring is not Scoring.SIGMOID_ON_INPUT),
    ],
)
def test_shuffle(
    kernel_device: str, leaning: Tensor, tokens: int, chosen: int, scoring: Scoring, groups: tuple[int, int]
) -> None:
    """Each pair is in the list of its expert, once. 300 tokens take several programs. Equal scores are told
    apart by their biases."""
    from baton.engine.kernels.moe.shuffle import shuffle

    logits, bias = expert_logits(tokens, leaning), None
    if scoring.is_biased:
        bias = normal(6, seed=4)
    choice = Choice(chosen, scoring, *groups, 2.5 if groups > (1, 1) else 1.0, bias)
    expected = route(logits, choice)
    counts = torch.zeros(6, dtype=torch.int32, device=kernel_device)
    on_device = choice._replace(bias=None if bias is None else bias.to(kernel_device))
    shuffled = shuffle(logits.to(kernel_device), counts, on_device)
    weights, counts, pairs = (x.cpu() for x in (shuffled.weights, shuffled.counts, shuffled.pairs))
    torch.testing.assert_close(weights, expected.weights)
    assert counts.tolist() == expected.experts.flatten().bincount(minlength=6).tolist()
    for expert, (count, found) in enumerate(zip(counts.tolist(), pairs, strict=True)):
        of_expert = (expected.experts.flatten() == expert).nonzero().flatten()
        assert sorted(found[:count].tolist()) == of_expert.tolist()


def test_rows_that_pad_a_graph_have_no_expert(kernel_device: str) -> None:
    from baton.engine.kernels.moe.shuffle import shuffle

    logits, slots = expert_logits(5, LEANINGS["even"]), torch.tensor([7, 3, -1, 0, -1])
    counts = torch.zeros(6, dtype=torch.int32, device=kernel_device)
    slots = slots.to(kernel_device)
    weights, _, pairs, _ = shuffle(logits.to(kernel_device), counts, Choice(2, Scoring.SOFTMAX), slots)
    listed = [pair for expert, count in enumerate(counts.tolist()) for pair in pairs[expert, :count].tolist()]
    assert sorted(listed) == [0, 1, 2, 3, 6, 7]
    assert (weights > 0).all(dim=1).tolist() == [True, True, False, True, False]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_shuffle_chooses_an_expert_for_any_logits(kernel_device: str) -> None:
    """The rows that pad a graph may have any logits. Of equal logits, the first are chosen."""
    from baton.engine.kernels.moe.shuffle import shuffle

    logits = torch.tensor([[torch.nan] * 6, [torch.inf] * 6, [1.0] * 6, [-torch.inf] * 6])
    counts = torch.zeros(6, dtype=torch.int32, device=kernel_device)
    shuffle(logits.to(kernel_device), counts, Choice(2, Scoring.NORMALIZED_SOFTMAX))
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
    triton_kernels: Kernels, leaning: str, shape: tuple[int, int, int, int, Scoring], dtype: torch.dtype
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
    shared, choice = normal(tokens, size, seed=3).to(dtype), Choice(chosen, scoring)
    expected = Kernels().mix_experts(
        x.double(), logits, Experts(gate_up.double(), down.double(), choice), expected_counts,
        shared=shared.double,
    )  # fmt: skip
    x, logits, gate_up, down, beside = (tensor.to(DEVICE) for tensor in (x, logits, gate_up, down, shared))
    counts = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    y = triton_kernels.mix_experts(x, logits, Experts(gate_up, down, choice), counts, shared=lambda: beside)
    close(y, expected)
    assert counts.tolist() == expected_counts.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 100, 300, 3000])
def test_a_mixture_does_not_depend_on_timing(tokens: int) -> None:
    """Each tiling of bfloat16. The lists of pairs have another order each time."""
    from baton.engine.kernels.triton_kernels import TritonKernels

    x, logits, gate_up, down = (
        normal(*shape, seed=i).cuda()
        for i, shape in enumerate([(tokens, 1024), (tokens, 32), (32, 2 * 256, 1024), (32, 1024, 256)])
    )
    x, gate_up, down = x.to(BF16), (gate_up / 32).to(BF16), down.to(BF16)
    counts, choice = torch.zeros(32, dtype=torch.int32, device="cuda"), Choice(4, Scoring.SOFTMAX)
    expected = Kernels().mix_experts(
        x.double(), logits, Experts(gate_up.double(), down.double(), choice), counts.clone()
    )
    kernels = TritonKernels(torch.device("cuda"), 128)
    first, *others = (
        kernels.mix_experts(x, logits, Experts(gate_up, down, choice), counts.clone()) for _ in range(30)
    )
    close(first, expected.cpu())
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the undefined rows of pairs elsewhere
@pytest.mark.parametrize("leaning", LEANINGS)
@pytest.mark.parametrize(
    ("chosen", "scoring"), [(1, Scoring.SIGMOID_ON_INPUT), (4, Scoring.NORMALIZED_SOFTMAX)]
)
def test_the_sums_over_parts_of_the_experts_add_up(
    triton_kernels: Kernels, leaning: str, chosen: int, scoring: Scoring
) -> None:
    x, gate_up, down = (
        normal(*shape, seed=i) for i, shape in enumerate([(50, 64), (6, 48, 64), (6, 64, 24)])
    )
    logits = expert_logits(50, LEANINGS[leaning])

    def mixed(kernels: Kernels, device: str, first: int, last: int) -> Tensor:
        held = slice(first, last)
        counts = torch.zeros(6, dtype=torch.int32)
        tokens, router, one, other, counted = (
            tensor.to(device) for tensor in (x, logits, gate_up[held], down[held], counts)
        )
        experts = Experts(one, other, Choice(chosen, scoring), first)
        return kernels.mix_experts(tokens, router, experts, counted).cpu()

    whole = mixed(Kernels(), "cpu", 0, 6)
    for kernels, device in ((Kernels(), "cpu"), (triton_kernels, DEVICE)):
        close(mixed(kernels, device, 0, 4) + mixed(kernels, device, 4, 6), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("grouped", [None, False])
def test_the_norm_behind_experts_adds_them_up(
    triton_kernels: Kernels, dtype: torch.dtype, shared: bool, grouped: bool | None
) -> None:
    """With the bits of the sum, the residual add and the norm one after the other."""
    x, gate_up, down, residual, beside, weight = (
        normal(*shape, seed=i).to(dtype).to(DEVICE)
        for i, shape in enumerate([(50, 64), (6, 48, 64), (6, 64, 24), (50, 64), (50, 64), (64,)])
    )
    logits = expert_logits(50, LEANINGS["even"]).to(DEVICE)
    experts = Experts(gate_up, down, Choice(3, Scoring.NORMALIZED_SOFTMAX))
    streams, found = [], []
    for summed in (True, False):
        counts = torch.zeros(6, dtype=torch.int32, device=DEVICE)
        delta = triton_kernels.mix_experts(
            x, logits, experts, counts, shared=(lambda: beside) if shared else None, summed=summed
        )
        streams.append(residual.clone())
        normed = triton_kernels.add_rms_norm(streams[-1], delta, weight, 1e-5, grouped)
        found.append(normed if isinstance(normed, Tensor) else normed.values.float() * normed.scales)
    assert torch.equal(*streams)
    assert not torch.equal(streams[0], residual)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("chosen", "activation"),
    [(1, CLAMPED), (3, CLAMPED), (3, ClampedSwiGLU(None, 7.0))],
    ids=["1", "3", "3-bounded-silu"],
)
def test_experts_with_biases_and_a_clamped_activation(
    triton_kernels: Kernels, dtype: torch.dtype, chosen: int, activation: ClampedSwiGLU
) -> None:
    shapes = [(50, 72), (6, 2 * 24, 72), (6, 72, 24), (6, 2 * 24), (6, 72)]
    x, *experts = (normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))
    logits, counts = expert_logits(50, LEANINGS["even"]), torch.zeros(6, dtype=torch.int32)

    def mixed(kernels: Kernels, *tensors: Tensor) -> Tensor:
        x, logits, counts, gate_up, down, gate_up_bias, down_bias = tensors
        scoring = Scoring.NORMALIZED_SOFTMAX
        experts = Experts(gate_up, down, Choice(chosen, scoring), 0, gate_up_bias, down_bias, activation)
        return kernels.mix_experts(x, logits, experts, counts)

    expected = mixed(Kernels(), x.double(), logits, counts.clone(), *(e.double() for e in experts))
    on_device = (tensor.to(DEVICE) for tensor in (x, logits, counts, *experts))
    close(mixed(triton_kernels, *on_device), expected)
