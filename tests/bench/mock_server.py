"""An OpenAI-compatible server with known delays and with every kind of failure.

In a test: `async with MockServer(Behavior(ttft=0.02)) as server: …  server.url`. As a process: `python
tests/bench/mock_server.py --port 8199 --ttft-ms 200 --gaps-ms 30,30,90`. It records when it wrote each chunk,
on the monotonic clock that client and server share (`served`, or the file --truth, which it writes on
SIGTERM). So a test can tell errors of the client from delays of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import uvloop
from aiohttp import web

from baton.bench.load.target.tokenization import WORDS

Fault = Literal[
    "none", "429", "500", "reset", "half", "done_only", "garbage", "not_json", "error_event", "empty",
    "abort", "hang", "html", "bad_types",
]  # fmt: skip
BOS = 1  # tokens that the server adds to a prompt of completions
ANSWERED = 5000  # the token id of the first token of an answer
TEMPLATE = 7  # tokens that it adds to a prompt of chat


@dataclass
class Behavior:
    """Delays are in seconds. `gaps` and `faults` repeat. `gate` is awaited before each chunk with tokens. It
    gets the number of the request, and how many tokens were sent before."""

    ttft: float = 0.005
    gaps: Sequence[float] = (0.002,)
    tokens_per_chunk: int = 1
    gate: Callable[[int, int], Awaitable[object]] | None = None
    faults: Sequence[Fault] = ("none",)
    tokenize: bool = True
    takes_ids: bool = True  # prompts of token ids, and tells those of answers
    usage: bool = True
    running_usage: bool = True
    strict: bool = False  # refuses fields that OpenAI's API does not have
    max_model_len: int | None = 8192
    api_key: str | None = None


@dataclass
class Served:
    """One request as the server saw it. Times are time.monotonic()."""

    arrived: float
    prompt: Any
    prompt_tokens: int
    max_tokens: int
    session: str
    user: str
    name: str
    writes: list[float] = field(default_factory=list)


class MockServer:
    def __init__(self, behavior: Behavior, port: int = 0) -> None:
        self.behavior = behavior
        self.served: list[Served] = []
        self.url = ""
        self._port = port
        self._runner: web.AppRunner | None = None
        self._arrived = asyncio.Event()

    async def __aenter__(self) -> MockServer:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        # Several processes may share a port, to be no bottleneck.
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=4096, reuse_port=bool(self._port))
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def requests(self, count: int) -> None:
        """Until so many have arrived."""
        while len(self.served) < count:
            self._arrived.clear()
            await self._arrived.wait()

    def _authorized(self, request: web.Request) -> bool:
        key = self.behavior.api_key
        return key is None or request.headers.get("authorization") == f"Bearer {key}"

    async def _models(self, request: web.Request) -> web.Response:
        if not self._authorized(request):
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        model: dict[str, Any] = {"id": "mock", "object": "model"}
        if self.behavior.max_model_len is not None:
            model["max_model_len"] = self.behavior.max_model_len
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.behavior.tokenize:
            raise web.HTTPNotFound
        body = await request.json()
        words = body["prompt"].split() if "prompt" in body else ["a"] * count_tokens(body)
        ids = [100 + WORDS.index(word) for word in words for _ in range(_words(word)) if word in WORDS]
        ids = [BOS, *ids] if "prompt" in body else ids
        return web.json_response({"count": count_tokens(body), "tokens": ids, "max_model_len": 8192})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        body = await request.json()
        refusal = self._refusal(request, body)
        if refusal is not None:
            return refusal
        served = Served(
            arrived, body.get("prompt", body.get("messages")), count_tokens(body), _max_tokens(body),
            request.headers.get("x-session-id", ""), body.get("user", ""),
            request.headers.get("x-request-id", ""),
        )  # fmt: skip
        number = len(self.served)
        self.served.append(served)
        self._arrived.set()
        faults = self.behavior.faults
        fault: Fault = faults[number % len(faults)]
        match fault:
            case "429":
                return _error(429, "too many requests", {"retry-after": "1"})
            case "500":
                return _error(500, "engine died")
            case "html":
                return web.Response(text="<html>hello</html>", content_type="text/html")
            case "reset":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await self._stream(response, request, body, number, fault)
        return response

    def _refusal(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if not self._authorized(request):
            return _error(401, "wrong key")
        if isinstance(body.get("prompt"), list) and not self.behavior.takes_ids:
            return _error(400, "a prompt is a text")
        known = {"model", "prompt", "messages", "max_tokens", "stream", "temperature", "stream_options"}
        unknown = set(body) - known
        if "continuous_usage_stats" in body.get("stream_options", {}):
            unknown.add("continuous_usage_stats")
        if self.behavior.strict and unknown:
            return _error(400, f"unknown fields {sorted(unknown)}")
        return None

    async def _stream(
        self, response: web.StreamResponse, request: web.Request, body: dict[str, Any], number: int,
        fault: Fault,
    ) -> None:  # fmt: skip
        served = self.served[number]
        chat = "messages" in body
        if chat:
            role = {"role": "assistant", "content": ""}
            await response.write(_event({"choices": [{"index": 0, "delta": role}]}))
        count, per_chunk = served.max_tokens, self.behavior.tokens_per_chunk
        due = served.arrived + self.behavior.ttft
        gaps = itertools.cycle(self.behavior.gaps)
        options = body.get("stream_options", {})
        running = (
            options.get("continuous_usage_stats") and self.behavior.usage and self.behavior.running_usage
        )
        half = max(1, count // 2)
        for sent in range(0, count if fault not in ("empty", "done_only") else 0, per_chunk):
            if fault != "none" and sent >= half:
                await self._break(response, request, fault)
                if fault != "abort":
                    return
                break
            now = min(count, sent + per_chunk)
            text = "".join(f" t{i}" for i in range(sent, now))
            choice: dict[str, Any] = {"index": 0}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = [ANSWERED + i for i in range(sent, now)]
            chunk: dict[str, Any] = {"choices": [choice]}
            if running:
                chunk["usage"] = _usage(served, now)
            event = _event(chunk)
            await self._until(due)
            if self.behavior.gate is not None:
                await self.behavior.gate(number, sent)
            served.writes.append(time.monotonic())
            await response.write(event)
            due += next(gaps)
        if fault != "done_only":
            reason = "abort" if fault == "abort" else "length"
            last = {"index": 0, "finish_reason": reason} | ({"delta": {}} if chat else {"text": ""})
            await response.write(_event({"choices": [last]}))
        if options.get("include_usage") and self.behavior.usage:
            produced = count if fault == "none" else 0
            await response.write(_event({"choices": [], "usage": _usage(served, produced)}))
        await response.write(b"data: [DONE]\n\n")

    async def _break(self, response: web.StreamResponse, request: web.Request, fault: Fault) -> None:
        match fault:
            case "half":
                assert request.transport is not None
                request.transport.abort()
            case "garbage":
                await response.write(b"\x00\xff\x13 no event at all\n\n")
            case "not_json":
                await response.write(b'data: {"choices": [{"text": "cut\n\n')
            case "bad_types":
                await response.write(b'data: {"choices": [{"text": 7}]}\n\n')
            case "error_event":
                await response.write(_event({"error": {"message": "decode worker lost", "code": 500}}))
            case "hang":
                await asyncio.sleep(3600)

    async def _until(self, due: float) -> None:
        # Whole milliseconds, the resolution of the loop's timers: spinning would take a core from the client.
        while (remaining := due - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(max(0.001, remaining))


def _max_tokens(body: dict[str, Any]) -> int:
    return body.get("max_tokens") or body.get("max_completion_tokens") or 16


def count_tokens(body: dict[str, Any]) -> int:
    """A word is a token. A word of more than 5 letters is two, which the load generator has to find out."""
    if "messages" in body:
        return TEMPLATE + sum(_words(m["content"]) for m in body["messages"])
    if isinstance(body["prompt"], list):
        return len(body["prompt"])
    return BOS + _words(body["prompt"])


def _words(text: str) -> int:
    return sum(2 if len(word) > 5 else 1 for word in text.split())


def _usage(served: Served, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": served.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": served.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _event(chunk: dict[str, Any]) -> bytes:
    choices = chunk.get("choices") or [{}]
    kind = "chat.completion.chunk" if "delta" in choices[0] else "text_completion"
    event = {"id": "x", "object": kind, "created": 0, "model": "mock"} | chunk
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status, headers=headers)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--gaps-ms", default="30")
    parser.add_argument("--truth", type=Path)
    args = parser.parse_args()
    gaps = [float(gap) / 1e3 for gap in args.gaps_ms.split(",")]
    behavior = Behavior(ttft=args.ttft_ms / 1e3, gaps=gaps)
    gc.disable()  # a pause would be an unknown delay
    async with MockServer(behavior, args.port) as server:
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        print(server.url, flush=True)
        await told.wait()
        if args.truth is not None:
            args.truth.write_text(json.dumps([[s.arrived, *s.writes] for s in server.served]))


if __name__ == "__main__":
    uvloop.run(main())
