"""`baton chat`: a chat in the terminal with any server of the OpenAI API."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from baton.cluster.options.clients import ChatOptions, EndpointOptions
from baton.cluster.tools.http import checked, session

_DIM = "\x1b[2m{}\x1b[0m" if sys.stdout.isatty() else "{}"
MAX_TOKENS = 2048  # some models go on until their context is full
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)


def run(endpoint: EndpointOptions, options: ChatOptions) -> int:
    card: dict[str, Any] = {"id": options.model} if options.model else asyncio.run(first_model(endpoint))
    model = card["id"]
    chat = Chat(endpoint, options, card)
    if options.message is not None:
        chat.turn(options.message)
        return 0
    print(f"{model} at {endpoint.url}. Ctrl-C interrupts an answer, Ctrl-D ends the chat.")
    if defaults := card.get("default_sampling_params"):
        print(f"Sampling defaults of the server: {', '.join(f'{n} {v:g}' for n, v in defaults.items())}.")
    try:
        while True:
            if question := input("\n> ").strip():
                try:
                    chat.turn(question)
                except ValueError as error:
                    print(f"Error: {error}", file=sys.stderr)
    except (EOFError, KeyboardInterrupt):
        print()
        return 0


class Chat:
    """One conversation. Owns its messages."""

    def __init__(self, endpoint: EndpointOptions, options: ChatOptions, card: dict[str, Any]) -> None:
        self._endpoint = endpoint
        self._options = options
        self._model = card["id"]
        longest = card.get("max_model_len") or MAX_TOKENS
        self._max_tokens = options.max_tokens or min(MAX_TOKENS, longest)
        self._messages: list[dict[str, str]] = []
        if options.system is not None:
            self._messages.append({"role": "system", "content": options.system})

    def turn(self, question: str) -> None:
        """Asks one question and prints the streamed answer. Keeps the received part of an interrupted one."""
        answer = Answer()
        asked = {"role": "user", "content": question}
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(answer.stream(self._endpoint, self._request([*self._messages, asked])))
        self._messages += [asked, {"role": "assistant", "content": answer.text}]
        print(flush=True)
        print(answer.figures(), file=sys.stderr)

    def _request(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.temperature is not None:
            request["temperature"] = self._options.temperature
        return request


class Answer:
    """A streamed answer: its text and the times of its tokens."""

    def __init__(self) -> None:
        self.text = ""
        self._asked = time.perf_counter()
        self._first: float | None = None
        self._last = self._asked
        self._tokens: int | None = None  # the server's count, from the usage of the last event
        self._cut = False  # at max_tokens

    async def stream(self, endpoint: EndpointOptions, request: dict[str, Any]) -> None:
        """Prints the answer as it arrives. Raises ValueError if the server reports an error."""
        async with (
            session(endpoint, TIMEOUT) as client,
            client.post("v1/chat/completions", json=request) as response,
        ):
            async for event in events(await checked(response)):
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise ValueError(event["error"]["message"])
        if usage := event.get("usage"):
            self._tokens = usage["completion_tokens"]
        for choice in event.get("choices", ()):
            self._cut |= choice.get("finish_reason") == "length"
            content, reasoning = (choice["delta"].get(name) or "" for name in ("content", "reasoning"))
            if not content and not reasoning:
                continue
            self._last = time.perf_counter()
            self._first = self._first or self._last
            self.text += content
            print(_DIM.format(reasoning) if reasoning else "", content, sep="", end="", flush=True)

    def figures(self) -> str:
        """Time to the first token, and tokens per second after it."""
        if self._first is None:
            return "(no answer)"
        shown = f"(first token after {(self._first - self._asked) * 1000:.0f} ms"
        if self._tokens is not None and self._tokens > 1 and self._last > self._first:
            rate = (self._tokens - 1) / (self._last - self._first)
            shown += f", {self._tokens} tokens, then {rate:.1f} tokens/s"
        return shown + (", cut for length: --max-tokens)" if self._cut else ")")


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON bodies of a stream of server-sent events, up to [DONE]."""
    async for line in response.content:
        if line.startswith(b"data:"):
            body = line.removeprefix(b"data:").strip()
            if body == b"[DONE]":
                return
            yield json.loads(body)


async def first_model(endpoint: EndpointOptions) -> dict[str, Any]:
    """The card of the first model that the server has."""
    async with session(endpoint, TIMEOUT) as client, client.get("v1/models") as response:
        return (await (await checked(response)).json())["data"][0]
