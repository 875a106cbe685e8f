"""Each sampling parameter of the wire changes what an engine computes, in both kinds of worker.

A parameter that a worker drops would have no effect, and no other test would fail.
"""

from pathlib import Path
from typing import Any

import pytest

from baton.engine import Engine, EngineRequest
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.sampling import after_reasoning
from baton.vllm_worker.sampling import sampling as fields_of_vllm
from baton.worker.requests import engine_request
from baton.worker.service_process.validation import Limits, submission
from tests.cluster_helpers import request, sampling
from tests.engine.conftest import MakeEngine

EOS, FIRST, SECOND = 2, 5, 6
FEW = dict.fromkeys(range(FIRST, FIRST + 4), 90.0)
DRAWN = {"temperature": 1.0, "seed": 3}
OF_FEW = DRAWN | {"logit_bias": FEW}
STRUCTURED = DRAWN | {"structured_output": pb.StructuredOutput(regex="[a-f]{9}")}

PARAMETERS: dict[str, tuple[dict[str, Any], Any]] = {
    "temperature": ({}, 1.5),
    "top_k": (DRAWN, 1),
    "top_p": (DRAWN, 0.1),
    "min_p": (DRAWN, 0.9),
    "repetition_penalty": (OF_FEW, 20.0),
    "presence_penalty": (OF_FEW, -2.0),
    "frequency_penalty": (OF_FEW, 2.0),
    "seed": (DRAWN, 4),
    "max_tokens": ({}, 3),
    "min_tokens": ({"logit_bias": {EOS: 90.0}}, 4),
    "stop_token_ids": (OF_FEW, [FIRST]),
    "ignore_eos": ({"logit_bias": {EOS: 90.0}}, True),
    "logit_bias": ({}, {FIRST: 90.0}),
    "logprobs": ({}, 2),
    "prompt_logprobs": ({}, 1),
    "logprob_token_ids": ({"logprobs": 1}, [FIRST]),
    "allowed_token_ids": ({}, [FIRST, SECOND]),
    "bad_words": (OF_FEW, [pb.BadWord(token_ids=[FIRST])]),
    "structured_output": (DRAWN, pb.StructuredOutput(regex="[a-f]{9}")),
    "reasoning": (STRUCTURED, pb.Reasoning(end_id=FIRST, budget=2)),
}
"""By name, the other parameters of a request for which it has an effect, and its value."""


def test_the_table_has_each_parameter() -> None:
    assert PARAMETERS.keys() == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


def received(parameters: dict[str, Any]) -> EngineRequest:
    """The request as the engine process of a worker gets it."""
    asked = request([7, 8, 9], sampling(**parameters))
    checked = submission(b"a" * 16, asked, Limits(199, 256))
    return engine_request(checked.origin, asked, checked.pixels)


@pytest.fixture(scope="module")
def engine(tiny_engine: MakeEngine, spelled_path: Path) -> Engine:
    return tiny_engine(model=str(spelled_path))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", PARAMETERS)
def test_it_changes_what_batons_engine_answers(name: str, engine: Engine) -> None:
    def answer(parameters: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        engine.add(received(parameters))
        while engine.loop.has_work:
            step = engine.loop.step()
            assert not step.failed
            assert not step.refused
            found += [(output.token, output.logprobs, output.finish_reason) for output in step.outputs]
            found += step.prompt_logprobs
        return found

    others, value = PARAMETERS[name]
    expected = answer(others)
    assert answer(others) == expected
    assert answer(others | {name: value}) != expected
    engine.assert_whole()


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_changes_what_vllm_is_asked(name: str) -> None:
    """Or the worker refuses it by name."""

    def asked(parameters: dict[str, Any]) -> Any:
        try:
            request = received(parameters)
            fields = fields_of_vllm(request, only_first=False, scores_prompt=True)
            if (reasoning := request.sampling.reasoning) is not None:
                fields |= after_reasoning(fields["structured_outputs"], reasoning, [EOS])
            return fields
        except ValueError as error:
            return str(error)

    others, value = PARAMETERS[name]
    assert asked(others) != asked(others | {name: value})
