"""CORS, and the small endpoints of vLLM."""

from pathlib import Path

import pytest

from baton.router.admission.keys import api_keys
from baton.router.config import RouterConfig
from baton.router.text.tokenizer import ModelTokenizer

from .conftest import Cluster, make_cluster

PAGE, OTHER = "https://chat.example", "https://other.example"
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-y"}


async def headers(cluster: Cluster, method: str, path: str, **sent: str) -> tuple[int, dict[str, str]]:
    async with cluster.http.request(method, cluster.url + path, headers=sent) as response:
        await response.read()
        return response.status, dict(response.headers)


async def test_pages_of_allowed_origins_may_use_the_api(tokenizer: ModelTokenizer, tmp_path: Path):
    keys = api_keys(["k"], None)
    async with make_cluster(tokenizer, tmp_path, api_keys=keys, allowed_origins=(PAGE,)) as cluster:
        path = "/v1/chat/completions"
        status, got = await headers(cluster, "OPTIONS", path, Origin=PAGE, **ASKED)
        assert (status, got["Access-Control-Allow-Origin"]) == (204, PAGE)
        assert got["Access-Control-Allow-Headers"] == "authorization,x-y"
        assert "POST" in got["Access-Control-Allow-Methods"]
        assert got["Vary"] == "Origin"
        status, got = await headers(cluster, "POST", path, Origin=PAGE)
        assert (status, got["Access-Control-Allow-Origin"]) == (401, PAGE), "the page can read the error"
        body = {"prompt": "Hi", "stream": True, "max_tokens": 2}
        sent = {"Origin": PAGE, "Authorization": "Bearer k"}
        async with cluster.http.post(cluster.url + "/v1/completions", json=body, headers=sent) as response:
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert (await response.read()).endswith(b"[DONE]\n\n")
        status, got = await headers(cluster, "OPTIONS", path, Origin=OTHER, **ASKED)
        assert status == 401
        assert "Access-Control-Allow-Origin" not in got


async def test_no_other_origin_is_allowed_by_default(cluster: Cluster):
    status, got = await headers(cluster, "OPTIONS", "/v1/models", Origin=PAGE, **ASKED)
    assert status == 405
    assert not any(name.startswith("Access-Control") or name == "Vary" for name in got)


async def test_any_origin_may_be_allowed(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0, allowed_origins=("*",)) as cluster:
        _, got = await headers(cluster, "GET", "/health", Origin=OTHER)
        assert got["Access-Control-Allow-Origin"] == "*"


def test_an_origin_has_no_path():
    for origin in ("chat.example", "https://chat.example/", "https://"):
        with pytest.raises(ValueError, match="--allowed-origins"):
            RouterConfig(model="m", secret=b"s", allowed_origins=(origin,))


async def test_the_small_endpoints_of_vllm(cluster: Cluster):
    async def get(path: str) -> dict[str, object]:
        async with cluster.http.get(cluster.url + path) as response:
            assert response.status == 200
            return await response.json()

    assert await get("/load") == {"server_load": 0}
    assert (await get("/version")).keys() == {"version"}
    info = await get("/server_info")
    assert info.keys() == {
        "version", "model", "max_model_len", "tool_call_parser", "reasoning_parser",
        "default_sampling_params",
    }  # fmt: skip
    assert (info["model"], info["max_model_len"], info["reasoning_parser"]) == ("fake", 8192, None)
    template = await get("/tokenizer_info")
    assert template.keys() == {
        "chat_template", "bos_token", "eos_token", "tokenizer_class", "vocab_size", "model_max_length",
    }  # fmt: skip
    assert "<|im_start|>" in str(template["chat_template"])
    assert template["eos_token"] == "<|im_end|>"
    async with cluster.http.post(cluster.url + "/ping") as response:
        assert response.status == 200
    for body in ({"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Hi"}):
        status, answer = await cluster.post("/invocations", **body, max_tokens=2)
        assert status == 200
        assert answer["object"] == ("chat.completion" if "messages" in body else "text_completion")
    status, answer = await cluster.post("/invocations", max_tokens=2)
    assert (status, answer["error"]["param"]) == (400, "prompt")
