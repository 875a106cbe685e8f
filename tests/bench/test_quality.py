"""The answers of `bench.quality`, and how it compares distributions. `test_smoke.py` runs it with real
processes (long)."""

import json
from pathlib import Path

import pytest
import torch

from baton.bench.lab.quality import divergence, fixed_answers, questions


def test_the_divergence_counts_unknown_tokens_as_one() -> None:
    expected = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    served = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()
    all_of_them = dict(enumerate(served.tolist()))
    exact = float((expected.exp() * (expected - served)).sum())
    assert divergence(expected, dict(enumerate(expected.tolist()))) == pytest.approx(0, abs=1e-6)
    assert divergence(expected, all_of_them) == pytest.approx(exact, rel=1e-5)
    assert divergence(expected, dict([*all_of_them.items()][:2])) == pytest.approx(exact, rel=1e-5)
    assert 0 < divergence(expected, dict([*all_of_them.items()][1:3])) < exact


def test_a_fixed_answer_is_the_right_choice_and_the_next_questions(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(
        json.dumps({"query": query, "choices": [" 0", right], "gold": 1}) + "\n"
        for query, right in (("One is", " 1"), ("Two is", " 2"), ("Three is", " 3"))
    ))  # fmt: skip

    def encode(text: str) -> list[int]:
        return [1, *text.encode()]  # with BOS

    answers = [" 1. Two is 2. Three is 3", " 2. Three is 3. One is 1", " 3. One is 1. Two is 2"]
    found = fixed_answers(questions(tasks, encode, None), encode)
    assert [json.loads(case.options)["structured_outputs"] for case in found] == [
        {"choice": [answer]} for answer in answers
    ]
    assert [case.max_tokens for case in found] == [*map(len, answers)]
    assert json.loads(found[1].options)["prompt"] == encode("Two is")
