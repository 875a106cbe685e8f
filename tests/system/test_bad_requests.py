"""Bad input is refused before any worker sees it: status, OpenAI's error shape, the field and the reason."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from .serve import Serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "now"}}

CASES: list[tuple[str, Any, int, str | None, str]] = [
    # path, body (bytes as they are, else JSON; model is filled in), status, param, part of the message
    (COMPLETIONS, b"{not json", 400, None, "JSON"),
    (COMPLETIONS, b"[1, 2]", 400, None, "object"),
    (COMPLETIONS, {"model": "gpt-17", "prompt": "x"}, 404, "model", "gpt-17"),
    (CHAT, {"model": "gpt-17", "messages": HELLO}, 404, "model", "gpt-17"),
    (COMPLETIONS, {}, 400, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", ""),
    (COMPLETIONS, {"prompt": [999_999]}, 400, "prompt", "999999"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 100_000}, 400, "max_tokens", "8192"),
    (COMPLETIONS, {"prompt": "word " * 9000}, 400, "prompt", "8192"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "0"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens", "integer"),
    (COMPLETIONS, {"prompt": "x", "temperature": -0.5}, 400, "temperature", "-0.5"),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, 400, "temperature", "number"),
    (COMPLETIONS, {"prompt": "x", "top_p": 1.5}, 400, "top_p", "1"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "n", "0"),
    (COMPLETIONS, {"prompt": "x", "stream": "perhaps"}, 400, "stream", "boolean"),
    (COMPLETIONS, {"prompt": "x", "best_of": 4}, 400, "best_of", "best_of"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "(a"}}, 400, "structured_outputs", "group"),
    (CHAT, {"messages": HELLO, "tools": [TOOL]}, 400, "tools", "tools is not supported"),
    (CHAT, {"messages": []}, 400, "messages", ""),
    (CHAT, {"messages": "hello"}, 400, "messages", "array"),
    (CHAT, {"messages": [{"content": "no role"}]}, 400, "messages", "role"),
    (CHAT, {"messages": HELLO, "max_tokens": -1}, 400, "max_tokens", "-1"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 99}, 400, "top_logprobs", "20"),
]


def post(url: str, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(("path", "body", "status", "param", "reason"), CASES)
def test_refused(
    server: Serve, model_id: str, path: str, body: Any, status: int, param: str | None, reason: str
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps({"model": model_id, **body}).encode()
    got_status, answer = post(server.url + path, raw)
    assert got_status == status, answer
    error = answer["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert reason in error["message"], error
    if param is not None:
        assert (error["param"] or "").split(".")[0].split("[")[0] == param, error


def test_unknown_path(server: Serve) -> None:
    status, answer = post(server.url + "/v1/embeddings", b"{}")
    assert status == 404
    assert "/v1/embeddings" in answer["error"]["message"]
