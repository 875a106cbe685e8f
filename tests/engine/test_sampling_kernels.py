"""The kernels of `sampling` and `thresholds` against `Kernels`, which defines them: compiled on a GPU,
else in Triton's interpreter."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.api.sampling_params import SamplingParams
from baton.engine.core.step_builder import draw_keys
from baton.engine.kernels import Kernels
from baton.engine.kernels.sampling import drafts
from baton.engine.kernels.sampling.reference import exponentials

pytestmark = pytest.mark.all


@pytest.fixture
def device(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if kernel_device == "cpu":  # the interpreter needs the same time for programs of any size
        from baton.engine.kernels.sampling import thresholds

        monkeypatch.setattr(thresholds, "BLOCK", 4096)
        monkeypatch.setattr(thresholds, "PIVOTS", 64)
        monkeypatch.setattr(thresholds, "PROGRAMS", 22)
    return kernel_device


def logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


LIMITS = [
    SamplingParams(top_k=k, top_p=p, min_p=m)
    for k, p, m in [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (400, 1.0, 0.0),
        (5000, 1.0, 0.0),
        (0, 0.05, 0.0),
        (0, 0.9, 0.0),
        (0, 0.99, 0.0),
        (0, 1.0, 0.2),
        (50, 0.8, 0.0),
        (50, 0.8, 0.3),
    ]
]


def limits(params: list[SamplingParams], vocabulary: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.tensor([p.top_k or vocabulary for p in params], dtype=torch.int32, device=device),
        torch.tensor([p.top_p if p.top_p < 1 else 2.0 for p in params], device=device),
        torch.tensor([p.min_p for p in params], device=device),
    )


@pytest.mark.parametrize(
    ("vocabulary", "spread"), [(1, 3.0), (100, 3.0), (9001, 0.1), (9001, 3.0), (9001, 30.0)]
)
def test_thresholds(device: str, vocabulary: int, spread: float) -> None:
    """Flat, ordinary and peaked rows. In the last, many probabilities underflow to 0."""
    from baton.engine.kernels.sampling.thresholds import thresholds

    probs = logits(len(LIMITS), vocabulary, vocabulary, spread).softmax(-1)
    ours = thresholds(probs.to(device), *limits(LIMITS, vocabulary, device)).cpu()
    expected = (
        Kernels().thresholds(probs.double(), *limits(LIMITS, vocabulary, "cpu")).float()
    )  # exact sums: boundaries are fine ones
    kept, kept_expected = ((probs >= t[:, None]) & (probs > 0) for t in (ours, expected))
    assert torch.equal(kept.sum(-1), kept_expected.sum(-1))
    assert torch.equal(ours[ours > 0], expected[ours > 0])


def test_thresholds_keep_all_equal_values(kernel_device: str) -> None:
    """In a row of few different values, all tokens as likely as the last kept one are kept."""
    from baton.engine.kernels.sampling.thresholds import thresholds

    probs = torch.tensor([0.25, 0.125, 0.125, 0.125, 0.125, 0.0625, 0.0625, 0.0625, 0.0625, 0.0])
    params = [SamplingParams(top_k=k) for k in (1, 2, 5, 6, 10)]
    params += [SamplingParams(top_p=p) for p in (0.2, 0.25, 0.3, 0.75, 0.76)]
    params += [SamplingParams(top_k=3, top_p=p) for p in (0.4, 0.5, 0.51)]
    probs = probs.repeat(len(params), 1).to(kernel_device)
    ours = thresholds(probs, *limits(params, 10, kernel_device))
    a, b, c = 0.25, 0.125, 0.0625
    assert ours.tolist() == [a, b, b, c, 0, a, a, b, b, c, a, a, b]


def test_thresholds_of_rows_that_are_not_dense(device: str) -> None:
    from baton.engine.kernels.sampling.thresholds import thresholds

    params = LIMITS[2::4]
    probs = logits(len(params), 700).softmax(-1).to(device)[:, :500]
    arguments = limits(params, 500, device)
    assert torch.equal(thresholds(probs, *arguments), thresholds(probs.contiguous(), *arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 1000, 6001])
def test_greedy(device: str, dtype: torch.dtype, vocabulary: int) -> None:
    from baton.engine.kernels.sampling.race import draw

    values = logits(6, vocabulary).to(dtype)
    values[1:4, vocabulary // 2] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    values[4] = 2.0  # of equals the first
    values[5] = math.nan
    tokens, finite = draw(values.to(device))
    assert finite.tolist() == [True, False, False, False, True, False]
    assert tokens.dtype is torch.int64
    assert tokens[[0, 4]].tolist() == [int(values[0].argmax()), 0]
    assert tokens[2] == vocabulary // 2
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < vocabulary


def race(values: Tensor, temperatures: Tensor, keys: Tensor, least: Tensor) -> Tensor:
    """The race by its definition, row by row."""
    winners = []
    for row, temperature, key, bound in zip(values, temperatures.tolist(), keys, least, strict=True):
        probs = (row / temperature).softmax(-1) if temperature else row
        if temperature:
            probs = probs.where(probs >= bound, 0.0) / exponentials(key[None], len(row))[0]
        winners.append(int(probs.argmax()))
    return torch.tensor(winners)


@pytest.mark.parametrize("limited", [False, True])
def test_draw(device: str, limited: bool) -> None:
    from baton.engine.kernels.sampling.race import draw
    from baton.engine.kernels.sampling.thresholds import thresholds

    rows, vocabulary = 12, 2500
    values = logits(rows, vocabulary)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 3.0]).repeat(rows // 4)
    seeds = np.arange(rows, dtype=np.uint64)
    keys = torch.from_numpy(draw_keys(seeds, 7 * seeds))
    probs = (values / temperatures.clamp_min(1e-5)[:, None]).softmax(-1)
    params = [LIMITS[i % len(LIMITS)] for i in range(rows)] if limited else [SamplingParams()] * rows
    least = Kernels().thresholds(probs, *limits(params, vocabulary, "cpu"))
    extra = ()
    if limited:
        extra = (probs.to(device), thresholds(probs.to(device), *limits(params, vocabulary, device)))
    tokens, finite = draw(values.to(device), temperatures.to(device), keys.to(device), *extra)
    assert bool(finite.all())
    assert torch.equal(tokens.cpu(), race(values, temperatures, keys, least))


def test_masked_columns_never_win(device: str) -> None:
    """A grammar sets logits to −∞. The row is drawn from the other columns, though it is not finite."""
    from baton.engine.kernels.sampling.race import draw

    values = torch.full((24, 2500), -math.inf)
    values[:, 1234] = -50.0
    values[:, 2400] = -50.0
    keys = torch.arange(24, dtype=torch.int32, device=device)
    tokens, _ = draw(values.to(device), torch.ones(24, device=device), keys)
    assert set(tokens.tolist()) == {1234, 2400}


@pytest.mark.parametrize("seed", range(6))
def test_what_follows_drafts(triton_kernels: Kernels, kernel_device: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ahead, decodes = int(rng.integers(2, 9)), int(rng.integers(1, 40))
    most = ahead - 1
    tokens = decodes + int(rng.integers(0, 300)) * (seed % 2)
    contexts, kept = (decodes, 50) if seed % 3 else (decodes + 20, 300)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(low, high, shape))

    def some(high: int, *shape: int) -> torch.Tensor:
        """−1 in many places."""
        return ints(-high, high, *shape).clamp_min(-1).int()

    inputs = drafts.StepInputs(
        ints(-1, 90, tokens).int(), ints(0, 70, tokens), ints(-1, 70, tokens), ints(0, 70, contexts).int()
    )
    sources = drafts.Sources(
        some(20, tokens),
        some(20, decodes),
        ints(-1, 90, decodes, ahead).int(),
        ints(0, 70, decodes, ahead),
        some(60 * most, decodes),
    )
    sampled, guesses = torch.stack((ints(-2, 90, 60), ints(0, ahead, 60)), dim=1), ints(100, 190, 60, most)

    def moved(values: Any) -> Any:
        return [each.to(kernel_device) for each in values]

    resolved, ours = torch.full((2, kept + 1), 7), torch.full((2, kept + 1), 7, device=kernel_device)
    expected = drafts.follow(inputs, sources, sampled, guesses, resolved)
    of_host, to_come = drafts.StepInputs(*moved(inputs)), drafts.Sources(*moved(sources))
    sampled, guesses = moved((sampled, guesses))
    found = triton_kernels.follow(of_host, to_come, sampled, guesses, ours)
    for mine, other in zip(found, expected, strict=True):
        assert mine.cpu().equal(other)
        assert mine.dtype == other.dtype
    assert ours.cpu().equal(resolved)

    counts = rng.integers(0, ahead, 30)
    left = torch.from_numpy(np.concatenate([np.arange(count, -1, -1) for count in counts]))
    rows = torch.arange(len(left))
    resolved = ints(0, 2, 2, len(left) + 1)
    chosen = ints(0, 2, len(left))
    expected_counts = drafts.accepted(chosen, rows, left, resolved)
    assert triton_kernels.accepted(*moved((chosen, rows, left, resolved))).cpu().equal(expected_counts)
    assert expected_counts.max() > 0
