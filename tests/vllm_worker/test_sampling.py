"""Requests of Baton in vLLM's words, and its log probabilities in Baton's."""

import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.engine import EngineRequest, Logprobs, Reasoning, SamplingParams, StructuredOutput
from baton.engine.grammar import Grammars
from baton.vllm_worker.sampling import after_reasoning, logprobs_at, prompt_logprobs, sampling

from .served import VOCABULARY, save_tokenizer

EOS, START, END = (0, 7), 298, 299
STRUCTURES = [
    StructuredOutput("json_schema", '{"enum": ["{", "start: }", 3]}'),
    StructuredOutput("regex", r"a/b|[/}]\/c\n?"),
    StructuredOutput("grammar", 'start: "a" WORD? // the last\nWORD: /[{b]/'),
    None,
]


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


def test_a_reasoning_that_another_worker_began_does_not_go_on() -> None:
    assert fields(reasoning=Reasoning(5, budget=3))
    with pytest.raises(ValueError, match="reasoning: a vLLM worker cannot continue"):
        fields([4], reasoning=Reasoning(5, budget=3))


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> str:
    save_tokenizer(at := tmp_path_factory.mktemp("tokenizer"), VOCABULARY)
    return (at / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def grammars(spelled: str) -> Iterator[Grammars]:
    made = Grammars(lambda _: spelled, "tokenizer.json", VOCABULARY, EOS)
    yield made
    made.close()


@pytest.mark.parametrize("budget", [None, 0, 3])
@pytest.mark.parametrize("start", [None, START])
@pytest.mark.parametrize("structure", STRUCTURES, ids=["json", "regex", "grammar", "none"])
def test_a_reasoning_has_the_tokens_that_batons_engine_allows(
    grammars: Grammars,
    spelled: str,
    structure: StructuredOutput | None,
    start: int | None,
    budget: int | None,
) -> None:
    tokenizer = LLTokenizer(spelled, n_vocab=VOCABULARY, eos_token=EOS[0])
    reasoning = Reasoning(END, start, budget)
    asked = EngineRequest(
        b"r" * 16, [1], [], SamplingParams(structured_output=structure, reasoning=reasoning)
    )
    given = sampling(asked, only_first=False, scores_prompt=True).get("structured_outputs")
    lark = after_reasoning(given, reasoning, EOS)["grammar"]
    for seed in range(6):
        rng, ids = random.Random(seed), array("i", [1])
        expected, matcher = grammars.compile(asked), LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark))
        while not expected.ready:
            grammars.wait(1)
        while len(ids) < 12:
            masked, failed = grammars.allowed([(expected, ids)])
            assert not failed
            allowed = {*range(VOCABULARY)} if masked is None else _bits(masked[1])
            found = _bits(np.frombuffer(matcher.compute_bitmask(), np.uint8))
            assert found <= allowed
            assert allowed - found <= {EOS[1]}, "after a structure llguidance knows one EOS"
            likely = [each for each in (START, END) if each in allowed]
            token = rng.choice(likely if likely and rng.random() < 0.4 else sorted(allowed))
            if token in EOS:
                break
            ids.append(token)
            assert matcher.consume_token(token)
        expected.abandon()


def _bits(mask: np.ndarray) -> set[int]:
    return {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY]).tolist()}


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
