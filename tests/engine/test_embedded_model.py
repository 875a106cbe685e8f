"""The embedded model gives the tokens of transformers, for one request and for many at once."""

import json
from pathlib import Path

import pytest

from baton.engine import Engine, EngineConfig, build_engine
from tests.device import DEVICE
from tests.engine.conftest import request_of, run

GOLDENS = json.loads((Path(__file__).parents[1] / "system" / "goldens.json").read_text())
"""Made by tests/system/make_goldens.py from transformers, greedily, in float32."""


@pytest.fixture(scope="module")
def engine(embedded_model_path: Path) -> Engine:
    config = EngineConfig(
        model=str(embedded_model_path),
        dtype="float32",
        device=DEVICE,
        max_num_batched_tokens=64,
        num_threads=1,
    )
    return build_engine(config)


@pytest.mark.all
@pytest.mark.parametrize(
    ("which", "count"), [(slice(2, None, 8), 12), pytest.param(slice(None), 32, marks=pytest.mark.long)]
)
def test_greedy_tokens_equal_transformers(engine: Engine, which: slice, count: int) -> None:
    """All at once, so that chunks of long prompts share steps with decodes. The system tests use all
    prompts."""
    goldens = GOLDENS[which]
    requests = [request_of(i, golden["prompt_ids"], max_tokens=count) for i, golden in enumerate(goldens)]
    results = run(engine, requests)
    engine.assert_whole()
    for request, golden in zip(requests, goldens, strict=True):
        assert results[request.id].tokens == golden["output_ids"][:count], golden.get("prompt", "")[:60]


@pytest.mark.all
def test_greedy_tokens_equal_transformers_alone(engine: Engine) -> None:
    golden = GOLDENS[8]
    request = request_of(1, golden["prompt_ids"], max_tokens=16)
    assert run(engine, [request])[request.id].tokens == golden["output_ids"][:16]
    engine.assert_whole()
