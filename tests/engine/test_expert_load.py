"""What an engine counts of its experts."""

from pathlib import Path

import pytest
import torch

from baton.engine import Engine
from baton.engine.execution import expert_load
from baton.engine.execution.expert_load import ExpertLoad
from baton.engine.model_config import ExpertsConfig, Scoring
from tests.device import DEVICE
from tests.engine.checkpoints import load
from tests.engine.conftest import request_of, run, save_tiny


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """Has 8 experts in the first and in the third layer. Each token has 3 of them."""
    save_tiny(tmp_path, "Qwen3Moe", num_hidden_layers=3, mlp_only_layers=[1])
    return load(tmp_path, device=DEVICE, num_blocks=64, max_num_seqs=4)


def test_each_computed_token_counts_for_each_of_its_experts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_load, "PERIOD", 0.0)
    stats = engine.stats().experts
    assert stats is not None
    assert (stats.tokens, stats.imbalance, stats.used) == ([0] * 8, 0.0, 0.0)
    # Prefills of 9, 8 and 7 tokens, then 5 decodes of one token each. Graphs pad these to 4 rows.
    run(engine, [request_of(i, range(3, 12 - i), max_tokens=6, ignore_eos=True) for i in range(3)])
    load = engine.runner.expert_load
    assert load is not None
    load.begin_step()
    tokens, reads = load.totals.cpu()
    assert tokens.shape == (2, 8)
    assert tokens.sum(dim=1).tolist() == [3 * (9 + 8 + 7 + 3 * 5)] * 2
    assert ((tokens > 0) == (reads > 0)).all()
    assert (reads <= tokens).all()
    while not any(stats.tokens):  # the first call begins a copy
        stats = engine.stats().experts
        assert stats is not None
    assert stats.tokens == tokens.sum(dim=0).tolist()
    assert stats.used == reads.sum() / (2 * 6), "of two layers in six steps"
    assert 1 <= stats.imbalance <= 8 / 3


class LateEvent:
    passed = False

    def query(self) -> bool:
        return self.passed


def test_statistics_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "PERIOD", 0.0)
    load = ExpertLoad(ExpertsConfig(4, 1, 8, Scoring.SOFTMAX, (0, 1)), torch.device("cpu"))
    late = LateEvent()
    monkeypatch.setattr(expert_load, "record", lambda _: late)
    first, second = load.counts
    for counts in ([4, 0, 0, 0], [2, 2, 0, 0]):
        load.begin_step()
        first += torch.tensor(counts)
        second += torch.tensor([1, 1, 1, 1])
    load.begin_step()
    for _ in range(3):
        assert load.read().tokens == [0] * 4, "the copy is not over"
    late.passed = True
    stats = load.read()
    assert stats.tokens == [8, 4, 2, 2]
    assert stats.imbalance == (3.0 + 1.0) / 2
    assert stats.used == (1 + 2 + 4 + 4) / 4
    load.read()
    assert load.read() is stats, "no step since"
