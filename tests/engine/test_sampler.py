"""The vectorised sampler against the definition, one row at a time in numpy."""

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine import EngineRequest, SamplingParams
from baton.engine.core.adjustments import build_adjustments
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.step_builder import draw_keys, draws_of, is_plain
from baton.engine.execution.sampler import adjust, choose, top_logprobs
from baton.engine.kernels import Kernels
from baton.engine.kernels.sampling.reference import exponentials
from baton.engine.step import NO_CHOICE, NOT_FINITE, Draws
from baton.engine.step_adjustments import Adjustments

VOCABULARY = 1000
EOS = (2,)
MASK64 = (1 << 64) - 1


def live(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> LiveRequest:
    settings: dict[str, Any] = {"max_tokens": 99, **params}
    request = EngineRequest(b"x", prompt or [5], output or [], SamplingParams(**settings))
    return LiveRequest(request, 0)


def logits(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


NOTHING_PENDING = torch.empty(0, dtype=torch.int64)


def tokens(
    values: torch.Tensor, requests: list[LiveRequest], newest: torch.Tensor = NOTHING_PENDING
) -> list[int]:
    variant, draws = draws_of(requests, VOCABULARY)
    on_device = Draws(*map(torch.from_numpy, draws))
    adjusted = adjust(values, build_adjustments(requests, EOS, None), newest)
    return choose(adjusted, values, variant, on_device, Kernels()).tolist()


def forget_last(requests: list[LiveRequest], rng: np.random.Generator) -> torch.Tensor:
    """Makes the last tokens pending, in rows of the step before that differ from the rows of this step."""
    rows = rng.permutation(len(requests)).tolist()
    newest = torch.empty(len(requests), dtype=torch.int64)
    for row, request in zip(rows, requests, strict=True):
        newest[row] = request.token_ids.pop()
        request.promise(row)
    return newest


def draw_key(seed: int, position: int) -> int:
    """splitmix64 in Python's own integers."""

    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        return z ^ (z >> 31)

    return mix(mix(seed & MASK64) ^ position) >> 32


def defined(row: np.ndarray, request: LiveRequest) -> int:
    """A request's next token, computed by the definition."""
    p = request.request.sampling
    row = row.astype(np.float64).copy()
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if request.num_generated < p.min_tokens:
        row[[*EOS, *p.stop_token_ids]] = -np.inf
    output = Counter(request.token_ids[len(request.request.prompt_ids) :])
    for token in set(request.token_ids):
        row[token] = (
            row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
        )
    for token, count in output.items():
        row[token] -= p.frequency_penalty * count + p.presence_penalty
    if p.temperature == 0:
        return int(row.argmax())
    probs = np.exp((row - row.max()) / p.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    allowed = order[: p.top_k] if p.top_k else order
    share = probs[allowed] / probs[allowed].sum()
    before = np.cumsum(share) - share
    allowed = [t for t, b in zip(allowed, before, strict=True) if b < p.top_p or p.top_p == 1]
    allowed = [t for t in allowed if probs[t] >= p.min_p * probs.max()]
    keep = np.zeros(VOCABULARY)
    keep[allowed] = probs[allowed]
    return int((keep / clocks(draw_key(p.seed, len(request.token_ids)), VOCABULARY)).argmax())


def signed(keys: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(keys, dtype=np.uint32).view(np.int32))


def clocks(key: int, count: int) -> np.ndarray:
    """The hash in plain 32-bit arithmetic."""
    x = np.uint32(key) ^ (np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1))
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return -np.log1p(-(x.astype(np.float64) + 0.5) / 2**32)


VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 400, "temperature": 3.0},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.99, "temperature": 5.0},
    {"min_p": 0.2, "temperature": 2.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
    {"repetition_penalty": 1.5, "temperature": 0.0},
    {"frequency_penalty": 1.5, "presence_penalty": 0.7, "temperature": 0.8},
    {"frequency_penalty": -2.0, "temperature": 0.0},
    {"logit_bias": {7: 50.0}, "temperature": 0.0},
    {"logit_bias": {7: 3.0, 8: -100.0}, "min_tokens": 50, "stop_token_ids": (9, 10)},
]


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_batch_of_all_variants_equals_the_definition(seed: int, pending: bool) -> None:
    rng = np.random.default_rng(seed)
    requests = [
        live(rng.integers(0, 20, 9).tolist(), rng.integers(0, 20, 12).tolist(), seed=seed * 100 + i, **params)
        for i, params in enumerate(VARIANTS)
    ]
    values = logits(len(VARIANTS), seed)
    values[:, :20] += 6  # makes tokens with penalties likely
    untouched = values.clone()
    expected = [defined(row.numpy(), request) for row, request in zip(values, requests, strict=True)]
    newest = forget_last(requests, rng) if pending else NOTHING_PENDING
    assert tokens(values, requests, newest) == expected
    assert torch.equal(values, untouched)


def test_a_row_does_not_depend_on_its_batch() -> None:
    requests = [live(seed=i, **params) for i, params in enumerate(VARIANTS)]
    values = logits(len(VARIANTS))
    together = tokens(values, requests)
    alone = [tokens(values[i : i + 1], [request])[0] for i, request in enumerate(requests)]
    assert together == alone
    assert tokens(values.flip(0), requests[::-1]) == together[::-1]


def test_only_a_repetition_penalty_counts_the_prompt_and_each_token_once() -> None:
    """So a long prompt does not delay each step."""
    requests = [
        live([7, 5, 7, 9], [3], presence_penalty=1.0, frequency_penalty=0.5),
        live([7, 5, 7, 9], [3, 7], repetition_penalty=1.5),
        live([8, 8, 8], [8], repetition_penalty=0.5, frequency_penalty=-1.0),
    ]
    penalties = build_adjustments(requests, EOS, None).penalties
    assert penalties is not None
    found = zip(*(part.tolist() for part in penalties.prompt), strict=True)
    assert sorted(found) == [(1, 5), (1, 7), (1, 9), (2, 8)]
    values = logits(3)
    pairs = [(i, t) for i, r in enumerate(requests) for t in r.request.prompt_ids]
    rows, prompt = np.array(pairs).T.copy()
    whole = Adjustments(penalties=replace(penalties, prompt=(rows, prompt)))
    expected = adjust(values, whole, NOTHING_PENDING)
    assert torch.equal(adjust(values, Adjustments(penalties=penalties), NOTHING_PENDING), expected)
    assert not torch.equal(expected, values)


def test_random_numbers_follow_seed_and_position() -> None:
    pairs = [(seed, position) for seed in range(-100, 100) for position in range(200)]
    seeds, positions = (
        np.array([n & MASK64 for n in column], np.uint64) for column in zip(*pairs, strict=True)
    )
    keys = draw_keys(seeds, positions).view(np.uint32).tolist()
    assert keys == [draw_key(*pair) for pair in pairs]
    assert len(set(keys)) > 40_000 - 5
    for key in (0, 1, draw_key(3, 4), (1 << 32) - 1):
        ours = exponentials(signed([7, key, 9]), 60_000)[1].double().numpy()
        np.testing.assert_allclose(ours, clocks(key, 60_000), rtol=1e-3)


def test_random_numbers_are_exponential_and_independent() -> None:
    keys = [draw_key(11, position) for position in range(300)]
    values = exponentials(signed(keys), 2000).double().numpy()
    ranks = 1 - np.exp(-values)  # uniform, if the values are exponential
    for bins, scale in ((64, 1), (64, 1024)):  # all values, and the smallest, which decide the race
        inside = ranks[ranks * scale < 1] * scale
        counts, _ = np.histogram(inside, bins=bins, range=(0, 1))
        expected = ranks.size / scale / bins
        assert ((counts - expected) ** 2 / expected).sum() < bins + 5 * math.sqrt(2 * bins)
    for shift in (1, 2, 64):  # neighbours: positions, and tokens
        assert abs(np.corrcoef(ranks[shift:].ravel(), ranks[:-shift].ravel())[0, 1]) < 0.006
        assert abs(np.corrcoef(ranks[:, shift:].ravel(), ranks[:, :-shift].ravel())[0, 1]) < 0.006


def test_frequencies_are_the_probabilities() -> None:
    row = logits(1, seed=5, spread=1.0)[:, :10].repeat(4000, 1)
    requests = [live(seed=i) for i in range(4000)]
    counts = Counter(tokens(row, requests))
    expected = torch.softmax(row[0], dim=0) * 4000
    chi2 = sum((counts[t] - float(expected[t])) ** 2 / float(expected[t]) for t in range(10))
    assert chi2 < 9 + 5 * math.sqrt(2 * 9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_row_that_is_not_finite_fails_alone(bad: float, everywhere: bool) -> None:
    requests = [live(seed=i, logprobs=2, **params) for i, params in enumerate(VARIANTS)]
    values = logits(len(VARIANTS))
    good = tokens(values, requests)
    for row in (0, 3, 8, 11):
        spoiled = values.clone()
        spoiled[row, slice(None) if everywhere else 17] = bad
        assert tokens(spoiled, requests) == [*good[:row], NOT_FINITE, *good[row + 1 :]]


def test_a_row_with_all_tokens_barred_fails_alone() -> None:
    requests = [live(seed=i, **params) for i, params in enumerate(VARIANTS)]
    values = logits(len(VARIANTS))
    values[:, 5] = 3e38  # finite; 5 is in every prompt
    good = tokens(values, requests)
    barred = {"min_tokens": 9, "stop_token_ids": tuple(range(VOCABULARY))}
    cases: list[tuple[int, dict[str, Any]]] = [
        (0, barred), (4, {"repetition_penalty": 1e-6}), (9, barred | {"temperature": 0.0})
    ]  # fmt: skip
    for row, params in cases:
        spoiled = [*requests[:row], live(**params), *requests[row + 1 :]]
        assert tokens(values, spoiled) == [*good[:row], NO_CHOICE, *good[row + 1 :]]


def test_logprobs_come_from_the_logits_before_adjustments() -> None:
    values = logits(3)
    requests = [
        live(logprobs=3, temperature=0.0, logit_bias={5: 100.0}),
        live(logprobs=0, temperature=0.0),
        live(temperature=0.0),
    ]
    chosen = tokens(values, requests)
    assert chosen[0] == 5
    adjustments = build_adjustments(requests, EOS, None)
    assert adjustments.logprob_rows is not None
    assert adjustments.logprob_rows.tolist() == [0, 1]
    logprobs = top_logprobs(values, torch.tensor(chosen), adjustments)
    assert logprobs is not None
    expected = values.log_softmax(-1)
    assert logprobs.chosen.tolist() == pytest.approx([float(expected[0, 5]), float(expected[1].max())])
    assert logprobs.ids.tolist() == expected[:2].topk(3).indices.tolist()
    assert logprobs.values[0].tolist() == pytest.approx(expected[0].topk(3).values.tolist())


def test_a_row_may_name_the_tokens_of_its_logprobs() -> None:
    values = logits(3)
    named = (9, 0, 4)
    requests = [live(logprobs=0, logprob_token_ids=named), live(logprobs=2), live(logprob_token_ids=(3,))]
    adjustments = build_adjustments(requests, EOS, None)
    logprobs = top_logprobs(values, torch.tensor([1, 2, 3]), adjustments)
    assert logprobs is not None
    expected = values.log_softmax(-1)
    assert logprobs.ids.tolist() == [[*named], expected[1].topk(3).indices.tolist()]
    assert logprobs.values[0].tolist() == pytest.approx([float(expected[0, i]) for i in named])
    assert logprobs.values[1].tolist() == pytest.approx(expected[1].topk(3).values.tolist())


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7}, False),
        ({"min_tokens": 3}, False),  # reached already
        ({"min_tokens": 4}, True),
        ({"logit_bias": {5: 1.0}}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logprobs": 0}, True),
    ],
)
def test_only_requests_beyond_draws_are_not_plain(params: dict[str, Any], expected: bool) -> None:
    """A step of plain requests needs no `adjust` and no `top_logprobs`."""
    request = live([5], [6, 7, 8], **params)
    asked = build_adjustments([request], EOS, None) != Adjustments()
    assert (not is_plain(request)) == asked == expected


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("temperature", -0.1, "between 0 and 1000000"),
        ("temperature", math.nan, "between 0 and 1000000"),
        ("temperature", 1e39, "between 0 and 1000000"),
        ("top_k", -1, "between 0 and 2147483647"),
        ("top_k", 1 << 31, "between 0 and 2147483647"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("min_p", 1.5, "between 0 and 1"),
        ("repetition_penalty", 1e-46, "between 1e-06 and 1000000"),
        ("repetition_penalty", 1e39, "between 1e-06 and 1000000"),
        ("presence_penalty", 2.5, "between -2 and 2"),
        ("frequency_penalty", -2.5, "between -2 and 2"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", 17, "at most max_tokens"),
        ("min_tokens", -1, "at least 0"),
        ("stop_token_ids", (-1,), "token ids, which are at least 0"),
        ("logit_bias", {1: math.inf}, "numbers between -1e+06 and 1e+06"),
        ("logit_bias", {1: math.nan}, "numbers between -1e+06 and 1e+06"),
        ("logprobs", 21, "between 0 and 20"),
    ],
)
def test_errors_name_parameters_out_of_bounds(field: str, value: Any, bound: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be {re.escape(bound)}, not"):
        SamplingParams(**{field: value})
