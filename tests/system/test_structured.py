"""Structured output through a whole cluster: valid, and token for token what one engine gives."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import openai

from baton.cluster.model import EMBEDDED_NAME
from baton.engine import Engine, EngineRequest, SamplingParams, StructuredOutput

from .recovery import Broken

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
# What the client asks for, and the same for an engine.
ASKED: list[tuple[dict[str, Any], StructuredOutput | None]] = [
    ({"response_format": FORMAT}, StructuredOutput("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": REGEX}}, StructuredOutput("regex", REGEX)),
    ({"max_tokens": 12}, None),
]
PROMPT = "A person in one line of JSON, with name, age and tags:"
# Without these a model of few layers repeats spaces.
PENALTIES = {"frequency_penalty": 2.0, "repetition_penalty": 1.5}


async def test_output_is_valid_and_equals_one_engine(
    broken: Broken, client_of_broken: openai.AsyncOpenAI, one_engine: Engine
) -> None:
    await asyncio.to_thread(broken.all_back)

    async def ask(body: dict[str, Any], seed: int) -> Any:
        answer = await client_of_broken.completions.create(
            model=EMBEDDED_NAME, prompt=PROMPT, seed=seed, temperature=0.5 * seed,
            extra_body={"return_token_ids": True, "max_tokens": 100, **PENALTIES, **body},
        )  # fmt: skip
        return answer.choices[0]

    choices = await asyncio.gather(*(ask(body, seed) for seed, (body, _) in enumerate(ASKED)))
    expected: dict[bytes, list[int]] = {}
    for seed, (body, wanted) in enumerate(ASKED):
        limit = body.get("max_tokens", 100)
        params = SamplingParams(
            max_tokens=limit, seed=seed, temperature=0.5 * seed, structured_output=wanted, **PENALTIES
        )
        expected[seed.to_bytes(16)] = []
        one_engine.add(EngineRequest(seed.to_bytes(16), choices[seed].prompt_token_ids, [], params))
    while one_engine.has_work:
        for output in one_engine.step().outputs:
            expected[output.id].append(output.token)
    assert [choice.token_ids for choice in choices] == list(expected.values())
    assert [choice.finish_reason for choice in choices[:2]] == ["stop", "stop"]
    jsonschema.validate(json.loads(choices[0].text), SCHEMA)
    assert re.fullmatch(REGEX, choices[1].text)
    await broken.settled()
