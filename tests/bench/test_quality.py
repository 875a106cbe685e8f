"""How `bench.quality` compares distributions. `test_smoke.py` runs it with real processes (long)."""

import pytest
import torch

from baton.bench.lab.quality import divergence


def test_the_divergence_counts_unknown_tokens_as_one() -> None:
    expected = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    served = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()
    all_of_them = dict(enumerate(served.tolist()))
    exact = float((expected.exp() * (expected - served)).sum())
    assert divergence(expected, dict(enumerate(expected.tolist()))) == pytest.approx(0, abs=1e-6)
    assert divergence(expected, all_of_them) == pytest.approx(exact, rel=1e-5)
    assert divergence(expected, dict([*all_of_them.items()][:2])) == pytest.approx(exact, rel=1e-5)
    assert 0 < divergence(expected, dict([*all_of_them.items()][1:3])) < exact
