"""Drafts change no stream: every kind of request, with drafters that are right, wrong and both."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine import EngineRequest, SpeculativeConfig, StructuredOutput
from tests.engine.conftest import MakeEngine, Result, request_of, run
from tests.engine.drafting import draft_always
from tests.engine.mixed_requests import mixed_requests
from tests.engine.test_engine import PREEMPTING, PROMPT, crowd, without_repeats

THREE = SpeculativeConfig(num_speculative_tokens=3)
SEVEN = SpeculativeConfig(num_speculative_tokens=7)


def endings() -> list[EngineRequest]:
    """Requests that end in many ways, some in the middle of drafts."""
    return [
        request_of(200 + n, PROMPT[: n + 2], max_tokens=5 + 3 * n, ignore_eos=True, **sampling)
        for n, sampling in enumerate(
            [
                {"stop_token_ids": tuple(range(3, 40))},
                {"temperature": 1.0, "stop_token_ids": tuple(range(3, 40)), "min_tokens": 7},
                {"bad_words": tuple((token,) for token in range(50, 80))},
                {"temperature": 1.2, "logprobs": 4, "allowed_token_ids": tuple(range(3, 160))},
                {"logprobs": 2, "frequency_penalty": 1.5},
            ]
        )
    ]


def requests_of() -> list[EngineRequest]:
    structured = [
        request_of(
            300 + n, [1, 9, 3 + n], temperature=1.0, seed=n, max_tokens=30,
            structured_output=StructuredOutput("regex", "(ab|cd|e){3,6}"),
        )
        for n in range(3)
    ]  # fmt: skip
    mixed = mixed_requests()
    for request in mixed:
        request.id = b"mixed" + request.id[5:]
    return [*crowd(), *without_repeats(), *endings(), *structured, *mixed]


def answers_of(results: dict[bytes, Result]) -> dict[bytes, list[int]]:
    return {request_id: result.tokens for request_id, result in results.items()}


def assert_same(got: dict[bytes, Result], expected: dict[bytes, Result]) -> None:
    assert answers_of(got) == answers_of(expected)
    for request_id, result in got.items():
        assert result.finish_reason == expected[request_id].finish_reason
        for mine, other in zip(result.outputs, expected[request_id].outputs, strict=True):
            assert mine.output_index == other.output_index
            assert (mine.logprobs is None) == (other.logprobs is None)
            if mine.logprobs is not None and other.logprobs is not None:
                assert mine.logprobs.top_ids == other.logprobs.top_ids
                assert mine.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


@pytest.fixture(scope="module")
def expected(tiny_engine: MakeEngine, spelled_path: Path) -> dict[bytes, Result]:
    return run(tiny_engine(model=str(spelled_path), num_blocks=512), requests_of())


ROOMY: dict[str, Any] = {"num_blocks": 512, "speculative_config": SEVEN}
CACHED: dict[str, Any] = {"block_size": 2, "enable_prefix_caching": True, "speculative_config": THREE}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        pytest.param(ROOMY, 0.0, id="right"),
        pytest.param(ROOMY, 0.3, id="some wrong"),
        pytest.param(ROOMY, 1.0, id="wrong"),
        pytest.param(
            {**PREEMPTING, "max_num_batched_tokens": 40, "num_blocks": 24, "speculative_config": THREE},
            0.3,
            id="preemption",
        ),
        pytest.param({**CACHED, "num_blocks": 512}, 0.0, id="prefix cache"),
        pytest.param(
            {"max_num_seqs": 3, "max_num_batched_tokens": 32, "speculative_config": SEVEN},
            0.3,
            id="few seats",
        ),
    ],
)
def test_drafts_change_no_stream(
    tiny_engine: MakeEngine,
    late_engine: MakeEngine,
    spelled_path: Path,
    expected: dict[bytes, Result],
    config: dict[str, Any],
    overlap: bool,
    wrong: float,
) -> None:
    engine = (late_engine if overlap else tiny_engine)(model=str(spelled_path), **config)
    draft_always(engine, answers_of(expected), wrong)
    for _ in range(2):
        assert_same(run(engine, requests_of()), expected)
        engine.assert_whole()
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.drafts
    if wrong in (0.0, 1.0):
        assert stats.accepted == (stats.drafts if not wrong else 0)
