"""What an engine counts of its experts."""

from pathlib import Path
from typing import Any

from engine import EngineConfig, build_engine
from tests.device import DEVICE


def test_each_computed_token_counts_for_each_of_its_experts(
    tmp_path: Path, save_tiny: Any, run: Any, request_of: Any
) -> None:
    save_tiny(tmp_path, "Qwen3Moe", num_hidden_layers=3, mlp_only_layers=[1])
    engine = build_engine(
        EngineConfig(str(tmp_path), dtype="float32", device=DEVICE, num_blocks=64, cuda_graphs=False)
    )
    # A prefill of 9 tokens, then 5 decodes of one token each.
    run(engine, [request_of(0, range(3, 12), max_tokens=6, ignore_eos=True)])
    load = engine._runner.model.expert_load
    load.begin_step()
    tokens, steps = load.totals.cpu()
    assert tokens.shape == (2, 8)
    assert tokens.sum(dim=1).tolist() == [3 * (9 + 5)] * 2
    assert ((tokens > 0) == (steps > 0)).all()
    assert (steps <= tokens).all()
    assert all(5 * 3 < layer <= 5 * 3 + 8 for layer in steps.sum(dim=1).tolist())
