"""Requests of Baton in vLLM's words, and its log probabilities in Baton's."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest

from baton.engine import EngineRequest, Logprobs, Reasoning, SamplingParams, StructuredOutput
from baton.vllm_worker.sampling import logprobs_at, prompt_logprobs, sampling


def fields(output_ids: list[int] | None = None, *, only_first: bool = False, **params: Any) -> dict[str, Any]:
    request = EngineRequest(b"r" * 16, [1, 2, 3], output_ids or [], SamplingParams(**params))
    return sampling(request, only_first=only_first, scores_prompt=True)


def test_names_are_those_of_vllm() -> None:
    found = fields(
        temperature=0.5, top_k=4, max_tokens=20, min_tokens=3, stop_token_ids=(7, 8), logit_bias={5: -1.0},
        allowed_token_ids=(5, 6), bad_words=((1, 2), (3,)), prompt_logprobs=2, logprobs=1, seed=9,
    )  # fmt: skip
    assert found["stop_token_ids"] == [7, 8]
    assert found["logit_bias"] == {5: -1.0}
    assert found["allowed_token_ids"] == [5, 6]
    assert found["_bad_words_token_ids"] == [[1, 2], [3]]
    assert (found["max_tokens"], found["min_tokens"], found["top_k"], found["seed"]) == (20, 3, 4, 9)
    assert (found["prompt_logprobs"], found["logprobs"]) == (2, 1)


def test_a_prefill_for_another_worker_samples_one_token() -> None:
    found = fields(only_first=True, max_tokens=20, min_tokens=3)
    assert (found["max_tokens"], found["min_tokens"]) == (1, 1)


def test_an_output_so_far_counts_and_changes_the_seed() -> None:
    found = fields([4, 5], max_tokens=20, min_tokens=3, seed=9)
    assert (found["max_tokens"], found["min_tokens"]) == (18, 1)
    assert found["seed"] != 9
    assert 0 <= found["seed"] < 1 << 63
    assert fields([4] * 9, max_tokens=20, min_tokens=3)["min_tokens"] == 0
    assert "seed" not in fields([4, 5], temperature=0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 1.0),
        ("frequency_penalty", -1.0),
        ("structured_output", StructuredOutput("regex", "a+")),
    ],
)
def test_what_depends_on_the_output_alone_does_not_go_on(name: str, value: Any) -> None:
    assert fields(**{name: value})
    with pytest.raises(ValueError, match=f"{name}: a vLLM worker cannot continue"):
        fields([4], **{name: value})


def test_reasoning_with_a_budget_is_refused_and_without_effect_is_not() -> None:
    assert fields(reasoning=Reasoning(5))
    with pytest.raises(ValueError, match="vLLM workers support neither a budget"):
        fields(reasoning=Reasoning(5, budget=3))


def test_structures_have_the_whitespace_of_batons_engine() -> None:
    asked = StructuredOutput("json_schema", '{"type": "object"}')
    [(kind, text)] = fields(structured_output=asked)["structured_outputs"].items()
    assert kind == "json"
    assert json.loads(text) == {"type": "object", "x-guidance": {"whitespace_pattern": r"[ \n\r\t]{1,32}"}}
    asked = StructuredOutput("grammar", "start: /a/")
    assert fields(structured_output=asked)["structured_outputs"] == {"grammar": "start: /a/"}


def test_named_tokens_replace_the_most_likely_ones() -> None:
    found = fields(logprobs=5, logprob_token_ids=(3, 4))
    assert found["logprob_token_ids"] == [3, 4]
    assert "logprobs" not in found


@dataclass
class Flat:
    """As vLLM's FlatLogprobs: of each position (its token, alternatives …)."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int | None]
    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)


def test_log_probabilities_of_a_token() -> None:
    flat = Flat([5, 5, 6, 7, 8, 9], [-1.0, -1.0, -2.0, -0.5, -0.25, -4.0], [1, 1, 2, 3, 1, 2], [0, 3], [3, 6])
    assert logprobs_at(flat, 0, 2) == Logprobs(-1.0, (5, 6), (-1.0, -2.0))
    assert logprobs_at(flat, 1, 1) == Logprobs(-0.5, (8,), (-0.25,))
    assert logprobs_at(flat, 1, 0) == Logprobs(-0.5)


def test_log_probabilities_of_a_prompt_come_in_pieces() -> None:
    """Of 70 tokens: the first has none."""
    flat = Flat(
        [*chain.from_iterable((i, 100 + i) for i in range(1, 70))],
        [*chain.from_iterable((-float(i), -0.5) for i in range(1, 70))],
        [2, 1] * 69,
        [0, *range(0, 138, 2)],
        [0, *range(2, 139, 2)],
    )
    asked = EngineRequest(b"r", [1] * 70, sampling=SamplingParams(prompt_logprobs=1))
    pieces = list(prompt_logprobs(asked, flat))
    assert [(piece.position, len(piece.logprobs) // 4) for piece in pieces] == [(1, 64), (65, 5)]
    assert array("f", pieces[1].logprobs).tolist() == [-65.0, -66.0, -67.0, -68.0, -69.0]
    assert array("i", pieces[1].top_ids).tolist() == [165, 166, 167, 168, 169]
    assert array("i", pieces[0].ranks).tolist() == [2] * 64
    assert array("f", pieces[0].top_logprobs).tolist() == [-0.5] * 64
