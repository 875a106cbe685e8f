"""Each endpoint takes the bodies that its own schema in /openapi.json allows, and refuses others with 400.

Schemathesis makes the bodies: first the bounds of each field (its coverage phase), then random ones.
"""

import collections
import functools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from jsonschema import Draft202012Validator

from baton.router.api.openapi import OPERATIONS, description

from .conftest import Cluster

BODIES = {
    operation.path: operation.body.__name__
    for operation in OPERATIONS
    if operation.body
    # They name files, which only tests that make them have, or need the admin key, which this router lacks.
    and not (operation.path == "/v1/batches" or operation.admin)
}
NAMED = {"there is no model": "model", "Response with id": "previous_response_id", "within": "timeout"}
"""Errors of values that depend on the router or on time, and the fields with such values."""
DOCUMENTED = "|".join([
    r"must be at most max_tokens|context length is|out of vocabulary|a token id below",
    # What several fields may be together.
    r"needs|excludes|has a name$|has a schema$|can only be used when|unless echo or prompt_logprobs is set",
    r"structured_outputs: must have one",
    r"no text can follow them|must not be empty$",  # a text may have no token
    r"No tool call found for|unexpected `tool_use_id`",  # the result of a call that is not there
    r"at least 1 item, not \[\]$",  # instructions or earlier messages count as well
    r"(tools|functions) has .* twice|must have each token once|not found in tools list|must begin with resp_",
    # Grammars, and the arguments of a call, in fields that are text.
    r"^(structured_outputs|response_format|text\.format|output_config\.format)",
    r"definition is not a lark grammar",
    r"tools\[\d+\]\.(function\.parameters|input_schema|parameters): ",
    r"is not supported",  # fields that are refused by name
    r"this model takes no images|of role user or tool have images",
])  # fmt: skip
"""Why else a body may be refused that the schema allows."""
NEEDED = {
    "messages": [{"role": "user", "content": "Hi"}], "prompt": "x", "input": "x", "tokens": [5],
    "max_tokens": 5,
}  # fmt: skip


def operation_of(path: str) -> Any:
    import schemathesis  # here, since it takes a second in every process of a test run

    return schemathesis.openapi.from_dict(description("", keys=False, admin=True))[path]["POST"]


def bodies_of(path: str, random_ones: int) -> Iterator[Any]:
    from schemathesis import GenerationMode

    operation = operation_of(path)
    modes, config = list(GenerationMode), operation.schema.config.generation_for(operation=operation)
    cases = operation.schema.iter_coverage_cases(operation, generation_modes=modes, generation_config=config)
    yield from (case.body for case in cases if case.method == "POST")
    for mode in modes if random_ones else ():
        yield from (case.body for case in drawn(operation.as_strategy(generation_mode=mode), random_ones))


@functools.cache
def validator_of(name: str) -> Draft202012Validator:
    components = description("", keys=False, admin=True)["components"]
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


@functools.cache
def chosen(name: str, count: int, random_ones: int) -> list[tuple[bool, Any]]:
    """So many bodies for that schema, and whether it allows each. Most bodies of some schemas are allowed, so
    a quarter of these are not. Endpoints with the same schema get the same bodies."""
    validator, path = validator_of(name), next(path for path, of in BODIES.items() if of == name)
    shuffled = [*bodies_of(path, random_ones)]
    random.Random(1).shuffle(shuffled)
    enough = {False: count // 4, True: count - count // 4}
    found: dict[bool, list[Any]] = {False: [], True: []}
    for body in shuffled:
        if all(len(found[kind]) >= enough[kind] for kind in enough):
            break
        found[validator.is_valid(body)].append(body)
    refused, allowed = ([(kind, body) for body in found[kind]] for kind in (False, True))
    return [*refused[: enough[False]], *allowed, *refused[enough[False] :]][:count]


def drawn(cases: SearchStrategy[Any], count: int) -> list[Any]:
    found: list[Any] = []

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases)
    def keep(case: Any) -> None:
        found.append(case)

    keep()
    return found


async def post(cluster: Cluster, path: str, body: Any) -> tuple[int, str]:
    try:
        raw = json.dumps(body).encode()
    except TypeError:  # bytes that are not JSON, or no body
        raw = body if isinstance(body, bytes) else b""
    headers = {"Content-Type": "application/json"}
    async with cluster.http.post(cluster.url + path, data=raw, headers=headers) as response:
        return response.status, (await response.read()).decode()


def documented_field(said: str) -> str | None:
    """The field of a body that was refused for a documented reason."""
    error = json.loads(said)["error"]
    for reason, field in NAMED.items():
        if reason in error["message"]:
            return field
    named = error.get("param") or error["message"]  # Anthropic's errors have no param
    return re.split(r"[.:\[ ]", named)[0] if re.search(DOCUMENTED, error["message"]) else None


@pytest.mark.all
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("count", "random_ones"), [(60, 0), pytest.param(1_000_000, 150, marks=pytest.mark.long)]
)
async def test_bodies_of_the_own_schema(
    thinking: Cluster, caplog: pytest.LogCaptureFixture, path: str, count: int, random_ones: int
):
    validator = validator_of(BODIES[path])
    wrong, statuses = [], collections.Counter()
    for allowed, body in chosen(BODIES[path], count, random_ones):
        status, said = await post(thinking, path, body)
        while (
            (allowed or "Response with id" in said)  # which is looked for before the body is validated
            and status in (400, 404, 504)
            and (field := documented_field(said)) is not None
        ):
            # The rest of the body must be taken, if the schema allows it.
            changed = {name: value for name, value in body.items() if name != field}
            if field in NEEDED and (body.get(field) is None or not validator.is_valid(changed)):
                changed[field] = NEEDED[field]
            if body == changed:
                break
            body = changed
            allowed = allowed or validator.is_valid(body)
            status, said = await post(thinking, path, body)
        statuses[allowed, status] += 1
        if status != (200 if allowed else 400):
            wrong.append((allowed, status, body, said))
    assert wrong == []
    assert min(statuses[True, 200], statuses[False, 400]) >= 5, statuses
    assert not [record for record in caplog.records if record.exc_info]
