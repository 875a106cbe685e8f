"""A plugin of pytest: tests of vLLM and SGLang find the cluster at BATON_URL where they would start a server.

Modules of the other project are replaced by mocks. A test that needs their values fails.
"""

import base64
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import socket
import sys
import types
import unittest
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

URL = os.environ["BATON_URL"].rstrip("/")
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["BATON_API_KEY"]}
with urllib.request.urlopen(urllib.request.Request(URL + "/v1/models", headers=HEADERS)) as _page:
    MODEL = json.load(_page)["data"][0]["id"]
MOCKED = ("vllm", "sglang", "model_hosting_container_standards", "xgrammar")
ALIKE = {"regex": re, "pybase64": base64}
"""Modules of the standard library that do for others."""


class _Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds each module below `MOCKED`, also where it is installed: the cluster is what the tests are for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in MOCKED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _mock(spec.name, name)  # pyrefly: ignore[bad-assignment]
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _mock(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.startswith("DEFAULT_") and name.endswith("_FOR_TEST") and "MODEL" in name:
        return MODEL
    return KNOWN[name] if name in KNOWN else MagicMock(name=f"{module}.{name}")


class Tokenizer:
    """The cluster's tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return _post("/tokenize", prompt=text, add_special_tokens=add_special_tokens)["tokens"]

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return _post("/detokenize", tokens=list(ids), skip_special_tokens=skip_special_tokens)["prompt"]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        strings = [_post("/tokenize", prompt=self.decode([i]), return_token_strs=True) for i in ids]
        return [string["token_strs"][0] for string in strings]

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **more: Any) -> Any:
        taken = ("add_generation_prompt", "continue_final_message", "tools")
        more = {name: value for name, value in more.items() if name in taken}
        ids = _post("/tokenize", messages=conversation, **more)["tokens"]
        return ids if tokenize else self.decode(ids)


def _post(path: str, **body: Any) -> Any:
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), HEADERS)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


class ModelConfig:
    """Takes the place of vLLM's class of this name."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        try:
            Tokenizer().decode([2**31 - 1])
        except urllib.error.HTTPError as error:  # it says how many tokens there are
            return int(json.load(error)["error"]["message"].rpartition("has ")[2].split()[0])
        raise AssertionError("the cluster has a token of every id")


class RemoteOpenAIServer:
    """Takes the place of vLLM's class of this name, which starts a server."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, args: list[str] = [], **_: Any) -> None:  # noqa: B006
        if "--watermark-config" in args:
            pytest.skip("Baton has no watermarks")
        self.model = model
        self.host, _colon, port = URL.rpartition("//")[2].partition(":")
        self.port = int(port)
        self.url_root = URL

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return URL + "/" + "/".join(parts)

    def get_client(self, **more: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **more)

    def get_async_client(self, **more: Any) -> Any:
        import openai

        url = self.url_for("v1")
        return openai.AsyncOpenAI(base_url=url, api_key=self.DUMMY_API_KEY, max_retries=0, **more)

    def get_client_anthropic(self, **more: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=URL, api_key=self.DUMMY_API_KEY, max_retries=0, **more)

    def get_async_client_anthropic(self, **more: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=URL, api_key=self.DUMMY_API_KEY, max_retries=0, **more)


class CustomTestCase(unittest.TestCase):
    """Takes the place of SGLang's class of this name, which tries a failed test again."""


KIT = Path("python/sglang/test/kits/matched_stop_kit.py")
KNOWN: dict[str, Any] = {
    "RemoteOpenAIServer": RemoteOpenAIServer,
    "CustomTestCase": CustomTestCase,
    "ModelConfig": ModelConfig,
    "ROCM_EXTRA_ARGS": [],
    "download_weights_from_hf": lambda *_, **__: MODEL,
    "get_tokenizer": lambda *_, **__: Tokenizer(),
    "popen_launch_server": lambda *_, **__: MagicMock(),
    "DEFAULT_URL_FOR_TEST": URL,
    "kill_process_tree": lambda *_, **__: None,
}


sent = 0
"""Calls that sent bytes to the cluster since the test began."""


def _counted(name: str) -> None:
    """Counts the calls of this method of sockets."""
    send = getattr(socket.socket, name)

    def counting(self: socket.socket, *arguments: Any) -> Any:
        global sent
        if self.family != socket.AF_UNIX and self.getpeername()[1] == urllib.parse.urlsplit(URL).port:
            sent += 1
        return send(self, *arguments)

    setattr(socket.socket, name, counting)


def _install() -> None:
    """Runs before any conftest of the other project is imported."""
    for name in ("send", "sendall", "sendmsg"):
        _counted(name)
    sys.meta_path.insert(0, _Mocks())
    for name, module in ALIKE.items():
        sys.modules.setdefault(name, module)
    utils = types.ModuleType("tests.utils")
    utils.__getattr__ = lambda name: _mock("tests.utils", name)  # pyrefly: ignore[bad-assignment]
    sys.modules["tests.utils"] = utils
    if KIT.exists():  # of SGLang; a base class of tests, which imports nothing of it
        spec = importlib.util.spec_from_file_location("sglang.test.kits.matched_stop_kit", KIT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)


_install()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported counts as one test."""
    if report.failed:
        _write(report, asked=False)


def pytest_runtest_logstart() -> None:
    global sent
    sent = 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (report.when == "call" or report.outcome != "passed") and not report.skipped:
        _write(report, asked=sent > 0)


def _write(report: pytest.TestReport | pytest.CollectReport, *, asked: bool) -> None:
    """Writes one line of JSON: the test, its outcome, whether it asked the cluster, and why it failed."""
    reason = "" if report.passed else str(report.longrepr).strip().rpartition("\n")[2]
    with Path(os.environ["BATON_OUTCOMES"]).open("a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, asked, reason[:300]]) + "\n")
