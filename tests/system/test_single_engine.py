"""The cluster gives the tokens of one engine, in float32: greedy, seeded, structured, mixed, chunked."""

import asyncio
import json
import random
import re
from typing import Any

import jsonschema
import openai
import pytest

from baton.cluster.model import EMBEDDED_NAME
from baton.engine import Engine, EngineRequest, SamplingParams, StructuredOutput
from tests.shallow import VOCABULARY

from .recovery import Broken

pytestmark = pytest.mark.all

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"(yes|no), [a-z]{3,8}\."
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
PERSON = "A person in one line of JSON, with name, age and tags:"
# Without the penalties a model of few layers repeats spaces.
STRUCTURED = {"max_tokens": 100, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
PLAIN = {"max_tokens": 8, "ignore_eos": True}
DRAW = random.Random(5)


def prompt(length: int) -> list[int]:
    """Ordinary tokens (no special ones)."""
    return [DRAW.randrange(100, VOCABULARY) for _ in range(length)]


# Prompt, sampling, what only the client's request has, and the same for an engine. The step budget is 64.
WORK: list[tuple[list[int] | str, dict[str, Any], dict[str, Any], StructuredOutput | None]] = [
    (
        PERSON,
        STRUCTURED | {"temperature": 0.0, "seed": 0},
        {"response_format": FORMAT},
        StructuredOutput("json_schema", json.dumps(SCHEMA)),
    ),
    (
        PERSON,
        STRUCTURED | {"temperature": 0.5, "seed": 1},
        {"structured_outputs": {"regex": REGEX}},
        StructuredOutput("regex", REGEX),
    ),
    (PERSON, STRUCTURED | {"temperature": 1.0, "seed": 2, "max_tokens": 12}, {}, None),
    (prompt(1), PLAIN | {"temperature": 0.0}, {}, None),
    (prompt(17), PLAIN | {"temperature": 0.8, "seed": 11}, {}, None),
    (prompt(63), PLAIN | {"temperature": 1.0, "seed": 12, "top_k": 40, "top_p": 0.9}, {}, None),
    (
        prompt(300),
        PLAIN
        | {"temperature": 1.2, "seed": 13, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {},
        None,
    ),
]


async def test_equals_one_engine(
    broken: Broken, client_of_broken: openai.AsyncOpenAI, one_engine: Engine
) -> None:
    await asyncio.to_thread(broken.all_back)

    async def ask(prompt: list[int] | str, body: dict[str, Any]) -> Any:
        body = {"return_token_ids": True} | body
        answer = await client_of_broken.completions.create(
            model=EMBEDDED_NAME, prompt=prompt, extra_body=body
        )
        return answer.choices[0]

    choices = await asyncio.gather(*(ask(text, sampling | more) for text, sampling, more, _ in WORK))
    expected: dict[bytes, list[int]] = {}
    for i, (_, sampling, _, wanted) in enumerate(WORK):
        expected[i.to_bytes(16)] = []
        params = SamplingParams(structured_output=wanted, **sampling)
        one_engine.add(EngineRequest(i.to_bytes(16), choices[i].prompt_token_ids, [], params))
    while one_engine.loop.has_work:
        for output in one_engine.loop.step().outputs:
            expected[output.id].append(output.token)
    one_engine.assert_whole()
    for choice, tokens, work in zip(choices, expected.values(), WORK, strict=True):
        assert choice.token_ids == tokens, work
        assert isinstance(work[0], str) or choice.prompt_token_ids == work[0]
    assert [choice.finish_reason for choice in choices[:2]] == ["stop", "stop"]
    jsonschema.validate(json.loads(choices[0].text), SCHEMA)
    assert re.fullmatch(REGEX, choices[1].text)
    await broken.settled()
