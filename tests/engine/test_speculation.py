"""Drafts change no stream: every kind of request, with drafters that are right, wrong and both."""

from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine import Engine, EngineRequest, SpeculativeConfig, StructuredOutput
from baton.engine.api.stats import SpeculationStats
from baton.engine.arrange import arrange
from baton.engine.core.draft_counts import StepCosts, draft_counts
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.speculation import PromptLookup, Speculation
from baton.engine.execution.inputs import read_by_device
from baton.engine.kernels.sampling.drafts import Sources, StepInputs, follow
from baton.engine.kernels.sampling.reference import with_sampled
from baton.engine.step import Draws, Variant
from baton.engine.step_drafts import Draft
from tests.engine.conftest import MakeEngine, Result, TinyOf, request_of, run
from tests.engine.drafting import draft_always
from tests.engine.mixed_requests import mixed_requests
from tests.engine.scheduling import add, make
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


FEW_BLOCKS: dict[str, Any] = {**PREEMPTING, "num_blocks": 24, "speculative_config": THREE}
FEW_SEATS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "speculative_config": SEVEN}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("config", "wrong", "overlap"),
    [
        pytest.param(ROOMY, 0.0, False, id="right"),
        pytest.param(ROOMY, 0.3, True, id="some wrong"),
        pytest.param(ROOMY, 1.0, False, id="wrong"),
        pytest.param(FEW_BLOCKS, 0.3, True, id="preemption"),
        pytest.param({**CACHED, "num_blocks": 512}, 0.0, True, id="prefix cache"),
        pytest.param(FEW_SEATS, 0.3, False, id="few seats"),
        pytest.param(FEW_SEATS, 0.3, True, id="few seats, overlap"),
    ],
)
def test_drafts_change_no_stream(
    tiny_engine: MakeEngine,
    late_engine: MakeEngine,
    spelled_path: Path,
    expected: dict[bytes, Result],
    config: dict[str, Any],
    wrong: float,
    overlap: bool,
) -> None:
    engine = (late_engine if overlap else tiny_engine)(model=str(spelled_path), **config)
    draft_always(engine, answers_of(expected), wrong)
    for _ in range(2 if "enable_prefix_caching" in config else 1):  # then with prompts from the cache
        assert_same(run(engine, requests_of()), expected)
        engine.assert_whole()
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.drafts
    if wrong in (0.0, 1.0):
        assert stats.accepted == (stats.drafts if not wrong else 0)


def test_ranks_follow_drafts(ranks: Any, spelled_path: Path, expected: dict[bytes, Result]) -> None:
    """The other ranks learn how many drafts were accepted."""
    engine = ranks(
        spelled_path, 2, num_blocks=512, overlap=True, enable_prefix_caching=True, speculative_config=THREE
    )
    draft_always(engine, answers_of(expected), 0.3)
    assert_same(run(engine, requests_of()), expected)
    engine.assert_whole()


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV3", "DeepseekV32", "Gemma3", "GptOss"])
def test_other_models(tiny_of: TinyOf, tiny_engine: MakeEngine, late_engine: MakeEngine, kind: str) -> None:
    """Experts, latents and sliding windows take several tokens of a request."""
    path, requests = str(tiny_of(kind)), crowd()
    answers = run(tiny_engine(model=path), requests)
    engine = late_engine(model=path, speculative_config=THREE)
    draft_always(engine, answers_of(answers), 0.3)
    assert_same(run(engine, requests), answers)
    engine.assert_whole()


SEATS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 8}
COPIES: dict[str, Any] = {"block_size": 2, "enable_prefix_caching": True, "num_blocks": 512}


def with_endings() -> list[EngineRequest]:
    return [*crowd(), *endings()]


@pytest.fixture(scope="module")
def plain_of(tiny_of: TinyOf, tiny_engine: MakeEngine) -> Callable[[str], tuple[Engine, dict[bytes, Result]]]:
    """By kind, an engine without drafts, and its results for `with_endings`."""

    @cache
    def make(kind: str) -> tuple[Engine, dict[bytes, Result]]:
        engine = tiny_engine(model=str(tiny_of(kind)), num_blocks=512)
        return engine, run(engine, with_endings())

    return make


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "config", "wrong", "overlap"),
    [
        pytest.param("Bamba", {"num_blocks": 512}, 0.0, True, id="right"),
        pytest.param("Qwen3Next", {"num_blocks": 512}, 1.0, True, id="wrong"),
        pytest.param("Bamba", {**PREEMPTING, "num_blocks": 24}, 0.3, True, id="preemption"),
        pytest.param("Qwen3Next", COPIES, 0.3, False, id="prefix cache"),
        pytest.param("Bamba", COPIES, 0.3, True, id="prefix cache, overlap"),
        pytest.param("Qwen3Next", SEATS, 0.3, False, id="few seats"),
    ],
)
def test_a_model_with_states(
    tiny_of: TinyOf,
    tiny_engine: MakeEngine,
    late_engine: MakeEngine,
    plain_of: Callable[[str], tuple[Engine, dict[bytes, Result]]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    config: dict[str, Any],
    wrong: float,
    overlap: bool,
) -> None:
    """Requests go on from the states before wrong drafts. No copy of states is one after a draft."""
    monkeypatch.setattr("baton.engine.engine.COPY_TOKENS", 8)
    path, requests = str(tiny_of(kind)), with_endings()
    plain, expected = plain_of(kind)
    engine = (late_engine if overlap else tiny_engine)(model=path, speculative_config=THREE, **config)
    draft_always(engine, answers_of(expected), wrong)
    for _ in range(2 if "enable_prefix_caching" in config else 1):
        assert_same(run(engine, requests), expected)
        engine.assert_whole()
    if "enable_prefix_caching" in config:
        # Prompts that begin with the copies made while others decoded.
        longer = [
            request_of(700 + n, [*request.prompt_ids, *expected[request.id].tokens[:-1]], max_tokens=4)
            for n, request in enumerate(requests)
        ]
        right = run(plain, longer)
        draft_always(engine, answers_of(right), wrong)
        assert_same(run(engine, longer), right)
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.drafts > 30
    if wrong in (0.0, 1.0):
        assert stats.accepted == (stats.drafts if not wrong else 0)


def test_a_step_says_where_the_device_finds_what_the_host_does_not_know() -> None:
    """A request with two known drafts; one with a token to come; two after drafts, with a known draft and
    with two of a draft head; and a prompt."""
    sampled_rows = 10
    step = arrange(
        [5, -1, -1, -1, 20, 21, 22], [4, 5, 6, 7, 0], [5, 6, 7, 8, 3],
        [array("i", [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(5)],
        range(5), Variant.GREEDY, Draws(*(np.zeros(sampled_rows) for _ in Draws._fields)),
        num_decodes=4, hands_over=False, block_size=4, table_width=None, source_rows=[-1, 3, 4, 7, -1],
        drafts={0: Draft([6, 7], 2), 2: Draft([8, 9, 10], 1, 2), 3: Draft(None, 2, 1)},
        keys=np.zeros((sampled_rows, 4), np.int32), following={}, guessed=range(4), guesses=3,
    )  # fmt: skip
    assert step.source_rows.tolist() == [-1, -1, -1, 3, 4, -1, 7, -1, -1, -1, -1, -1]
    assert step.ahead.shift_rows.tolist() == [-1, -1, -1, -1, 4, 4, 7, 7, 7]
    assert step.ahead.guess_index.tolist() == [-1] * 7 + [21, 22]
    assert step.drafting.next_rows.tolist() == [*range(9), -1, -1, 9]
    assert step.drafting.next_ids[9:11].tolist() == [21, 22]
    # The step before sampled 100 + i in row i, accepted one draft in rows 4 and 7, and guessed 1000 + index.
    sampled = torch.stack((torch.arange(100, 112), torch.zeros(12, dtype=torch.int64)), dim=1)
    sampled[[4, 7], 1] = 1
    guesses, arrays = torch.arange(1000, 1036).view(12, 3), read_by_device(step)
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    found = follow(
        StepInputs(*(tensors[name] for name in StepInputs._fields)),
        Sources(tensors["source_rows"], *(tensors[f"ahead.{name}"] for name in Sources._fields[1:])),
        sampled,
        guesses,
        torch.zeros((2, 13), dtype=torch.int64),
    )
    assert found.token_ids.tolist() == [5, 6, 7, 103, 105, 9, 108, 1021, 1022, 20, 21, 22]
    assert (found.positions - tensors["positions"]).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    next_ids = with_sampled(tensors["drafting.next_ids"], tensors["drafting.next_rows"], sampled)
    assert next_ids.tolist() == [*range(100, 109), 21, 22, 109]


def lookup(tokens: Sequence[int], count: int, drafts: Sequence[int] = (), **config: Any) -> list[int]:
    live = LiveRequest(request_of(1, tokens), 1)
    return list(PromptLookup(SpeculativeConfig(**config)).propose(live, drafts, count))


def test_prompt_lookup() -> None:
    text = [1, 2, 3, 4, 5, 9, 2, 3, 7, 8]
    assert lookup([*text, 1, 2, 3], 3) == [4, 5, 9], "three tokens are more than two"
    assert lookup([*text, 6, 2, 3], 3) == [7, 8, 6], "of two places the last one"
    assert lookup([*text, 6, 2, 3], 5) == [7, 8, 6, 2, 3]
    assert lookup([4, 5, 6, 4, 5], 7) == [6, 4, 5, 6, 4, 5, 6], "what follows repeats"
    assert lookup([*text, 6, 3], 3) == [], "one token is too few"
    assert lookup([*text, 6, 3], 2, prompt_lookup_min=1) == [7, 8]
    assert lookup([*text, 6], 2, drafts=[2, 3]) == [7, 8], "drafts are as tokens"
    assert lookup([*text, 4, 5, 9, 2], 1, prompt_lookup_max=2) == [3]
    assert lookup([1], 3) == []
    assert lookup([2, 2], 3) == lookup([2, 2, 2], 3)[:0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "is not JSON"),
        ("[3]", "is not a JSON object"),
        ('{"n": 3}', "'n' is not one of method, num_speculative_tokens"),
        ('{"num_speculative_tokens": "3"}', "num_speculative_tokens must be of type int"),
        ('{"num_speculative_tokens": 8}', "num_speculative_tokens is 8; choose 1 to 7"),
        ('{"prompt_lookup_max": 2, "prompt_lookup_min": 3}', "prompt_lookup_min is 3; choose 1 to 2"),
        ('{"method": "medusa"}', "method 'medusa' is not one of ngram, mtp, eagle3"),
        ('{"method": "eagle3"}', "the method eagle3, and no other one, needs a model"),
        ('{"method": "mtp", "model": "m"}', "the method eagle3, and no other one, needs a model"),
    ],
)
def test_wrong_configurations(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of(text)


def costs_of(seconds: Sequence[float], sizes: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> StepCosts:
    costs = StepCosts(sizes)
    for _ in range(3):
        for size, each in zip(sizes, seconds, strict=True):
            costs.record(size, each)
    return costs


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_look_ahead_only_where_one_is_launched_before_the_tokens_of_the_last(
    tiny_engine: MakeEngine, overlap: bool
) -> None:
    """It costs each step time, also those without drafts."""
    engine = tiny_engine(speculative_config=THREE, overlap=overlap, device="cpu")
    assert engine.runner.ahead == (4 if overlap else 1)


def test_a_step_has_as_many_drafts_as_give_the_most_tokens_in_a_second() -> None:
    flat, steep = costs_of([1.0] * 6), costs_of([1, 2, 4, 8, 16, 32])
    assert draft_counts([0.7, 0.7], [3, 3], 2, flat) == [3, 3]
    assert draft_counts([0.9, 0.9], [3, 3], 2, steep) == [0, 0], "a row costs a token"
    assert draft_counts([0.9, 0.1], [3, 3], 2, costs_of([1, 1, 1.1, 1.5, 3, 6])) == [2, 0]
    assert draft_counts([0.5, 0.5], [7, 0], 2, flat) == [7, 0], "no more than a request may have"
    assert draft_counts([0.5] * 30, [3] * 30, 30, flat).count(1) == 2, "only the rows of the largest step"
    assert draft_counts([0.9] * 16, [3] * 16, 16, costs_of([1, 1, 1, 1, 1, 2])) == [0] * 16, "under load none"


def test_costs_that_are_not_known_are_tried_and_old_ones_tried_again() -> None:
    costs = StepCosts([1, 2, 4, 8])
    assert draft_counts([0.3], [7], 1, costs) == [0], "a step without drafts comes first"
    for _ in range(2):
        costs.record(1, 1.0)
    assert draft_counts([0.3], [7], 1, costs) == [7]
    for _ in range(2):
        costs.record(8, 4.0)
    assert draft_counts([0.3], [7], 1, costs) == [0], "a line between one row and eight"
    for _ in range(500):
        costs.record(1, 1.0)
    assert draft_counts([0.8], [7], 1, costs) == [3], "it once took long"
    for _ in range(65):
        costs.record(4, 1.0)
    assert draft_counts([0.8], [7], 1, costs) == [0], "a step without drafts comes now and then"


def test_drafts_behind_a_wrong_one_say_nothing_of_the_drafter() -> None:
    speculation, live = Speculation(None, 3, [1, 8]), add(make(), 1, 1)
    speculation.record(live, 3, 1)
    assert (live.guesses.tested, live.guesses.accepted) == (2, 1)
    speculation.record(live, 3, 3)
    assert (live.guesses.tested, live.guesses.accepted) == (5, 4)
    assert speculation.stats == SpeculationStats(2, 6, 4)


@pytest.mark.all
def test_a_drafter_that_was_always_wrong_is_asked_rarely_and_again_when_it_is_right(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft costs a tenth of a step."""
    engine = tiny_engine(speculative_config=THREE)
    request = request_of(1, PROMPT, max_tokens=100, ignore_eos=True)
    draft_always(engine, {request.id: [0] * 200}, 1.0)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    speculation.costs = costs_of([1.0, 1.1, 1.3, 1.7, 2, 3])
    monkeypatch.setattr(speculation.costs, "record", lambda rows, seconds: None)
    assert len(run(engine, [request])[request.id].tokens) == 100
    wrong = speculation.stats.drafts
    assert 0 < wrong < 25
    other = request_of(2, PROMPT, max_tokens=100, ignore_eos=True, temperature=1.0)
    draft_always(engine, answers_of(run(tiny_engine(), [other])), 0.0)
    speculation.costs = costs_of([1.0, 1.1, 1.3, 1.7, 2, 3])
    monkeypatch.setattr(speculation.costs, "record", lambda rows, seconds: None)
    run(engine, [other])
    assert speculation.stats.accepted > 40, "it is asked again"
