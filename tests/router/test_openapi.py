"""`/openapi.json` is valid and complete, and describes the real responses."""

import threading
from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest

from baton.router.admission.keys import api_keys
from baton.router.api import openapi, responses
from baton.router.api.openapi import OPERATIONS
from baton.router.text.tokenizer import ModelTokenizer
from tests.browser import browser

from .conftest import Cluster, make_cluster

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


async def described(cluster: Cluster) -> dict[str, Any]:
    return await cluster.get("/openapi.json")


@pytest.mark.all
async def test_the_document_is_valid_and_complete(
    cluster: Cluster, tokenizer: ModelTokenizer, tmp_path: Path
):
    document = await described(cluster)
    shown = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert shown == {(operation.method, operation.path) for operation in OPERATIONS}
    prompt = document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]
    assert {kind["type"] for kind in prompt["anyOf"]} == {"string", "array"}
    async with make_cluster(tokenizer, tmp_path, api_keys=api_keys(["k"], None)) as guarded:
        guarded_document = await described(guarded)
    openapi_spec_validator.validate(guarded_document)  # pyrefly: ignore[bad-argument-type]
    assert guarded_document["paths"]["/v1/models"]["get"]["security"]
    assert "security" not in guarded_document["paths"]["/health"]["get"]
    # What is optional is the only difference, so the other document is valid, too. To validate takes seconds.
    for path in guarded_document["paths"].values():
        for operation in path.values():
            if operation.pop("security", None):
                del operation["responses"]["401"]
    del guarded_document["components"]["securitySchemes"]
    assert document == guarded_document


async def test_the_document_is_not_made_on_the_event_loop(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    made_in: list[threading.Thread] = []

    def description(*_: Any, **__: Any) -> dict[str, Any]:
        made_in.append(threading.current_thread())
        return {}

    monkeypatch.setattr(openapi, "description", description)
    await described(cluster)
    assert made_in != []
    assert threading.current_thread() not in made_in


async def test_every_described_endpoint_exists(cluster: Cluster):
    """Each responds. A POST without a body, and an id that is unknown, get a described error."""
    for operation in OPERATIONS:
        path = operation.path.replace("{id}", "fake")
        json_type = {"Content-Type": "application/json"}
        async with cluster.http.request(operation.method, cluster.url + path, headers=json_type) as response:
            reads_body = 413 in operation.errors
            # This router keeps no files and batches, and has no admin key.
            unknown = (
                "/responses/fake",
                "/requests/fake",
                "/v1/files",
                "/v1/batches",
            )
            missing = operation.admin == "key" or any(each in path for each in unknown)
            expected = 404 if missing else 400 if reads_body else 200
            assert response.status == expected, operation
            if expected != 200:
                operation.error.model_validate_json(await response.read())
            elif isinstance(operation.response, type):
                operation.response.model_validate_json(await response.read())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 1}),
        ("/v1/completions", {"prompt": "x"}),
        (
            "/v1/chat/completions",
            {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        ),
        ("/v1/chat/completions", CHAT),
    ],
)
async def test_generated_responses_are_as_described(cluster: Cluster, path: str, body: Any):
    """The fields of the events are those of the whole response, and fit the types of OpenAI's client."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletionChunk

    chat = path == "/v1/chat/completions"
    reply = responses.ChatResponse if chat else responses.CompletionResponse
    choice = responses.ChatChoice if chat else responses.CompletionChoice
    status, whole = await cluster.post(path, **body)
    assert status == 200
    reply.model_validate(whole)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await cluster.events(path, **body, stream_options=options)
    for event in events:
        assert event.keys() <= reply.model_fields.keys()
        responses.Usage.model_validate(event["usage"])
        for each in event["choices"]:
            assert each.keys() - {"delta"} <= choice.model_fields.keys()
            if not chat:  # OpenAI's type of a choice is that of a whole completion
                each["finish_reason"] = each["finish_reason"] or "stop"
        (ChatCompletionChunk if chat else Completion).model_validate(event)
    assert [event["choices"] for event in events[-1:]] == [[]]
    assert whole["usage"] == events[-1]["usage"]


async def test_other_responses_are_as_described(cluster: Cluster):
    status, result = await cluster.post("/tokenize", prompt="Hello")
    assert status == 200
    assert result == {"count": 1, "max_model_len": 8192, "tokens": result["tokens"], "token_strs": None}
    _, spelled = await cluster.post("/tokenize", prompt="Hello there", return_token_strs=True)
    assert spelled["token_strs"] == ["Hello", "Ġthere"]
    tokens = [1, *result["tokens"]]
    for skip, text in ((None, "<|im_start|>Hello"), (True, "Hello")):
        status, result = await cluster.post("/detokenize", tokens=tokens, skip_special_tokens=skip)
        assert status == 200
        assert result == {"prompt": text}


@pytest.mark.all
async def test_a_page_shows_the_document_in_a_browser(cluster: Cluster, tmp_path: Path):
    async with browser(f"{cluster.url}/docs", tmp_path / "profile") as page:
        await page.until("document.querySelector('#about')?.textContent.startsWith('Baton ')")
        shown = await page.run("[...document.querySelectorAll('summary')].map(each => each.textContent)")
        assert [text.split()[0] for text in shown] == [f"{o.method}{o.path}" for o in OPERATIONS]
        rows = await page.run(
            "[...document.querySelector('details').querySelectorAll('tr')].map(each => each.textContent)"
        )
        assert any(row.startswith("temperature") for row in rows), "the fields of the first one"
