"""`baton chat`: a chat in the terminal with any server of the OpenAI API."""

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

import aiohttp

from baton.cluster.options.clients import ChatOptions, EndpointOptions
from baton.cluster.tools.http import checked, fetch, session

_DIM = "\x1b[2m{}\x1b[0m" if sys.stdout.isatty() else "{}"
MAX_TOKENS = 2048  # some models go on until their context is full
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)


def run(endpoint: EndpointOptions, options: ChatOptions) -> int:
    card: dict[str, Any] = {"id": options.model}
    if not options.model:
        card = asyncio.run(fetch(endpoint, "v1/models"))["data"][0]
    request: dict[str, Any] = {
        "model": card["id"],
        "messages": [] if options.system is None else [{"role": "system", "content": options.system}],
        "max_tokens": options.max_tokens or min(MAX_TOKENS, card.get("max_model_len") or MAX_TOKENS),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.temperature is not None:
        request["temperature"] = options.temperature
    if options.message is not None:
        turn(endpoint, request, options.message)
        return 0
    print(f"{card['id']} at {endpoint.url}. Ctrl-C interrupts an answer, Ctrl-D ends the chat.")
    if defaults := card.get("default_sampling_params"):
        print(f"Sampling defaults of the server: {', '.join(f'{n} {v:g}' for n, v in defaults.items())}.")
    try:
        while True:
            if question := input("\n> ").strip():
                try:
                    turn(endpoint, request, question)
                except ValueError as error:
                    print(f"Error: {error}", file=sys.stderr)
    except (EOFError, KeyboardInterrupt):
        print()
        return 0


def turn(endpoint: EndpointOptions, request: dict[str, Any], question: str) -> None:
    """Asks one question, and prints the answer. The messages of the request get both, of an interrupted
    answer the part that has come."""
    messages, pieces = [*request["messages"], {"role": "user", "content": question}], list[str]()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(stream(endpoint, request | {"messages": messages}, pieces))
    request["messages"] = [*messages, {"role": "assistant", "content": "".join(pieces)}]
    print(flush=True)


async def stream(endpoint: EndpointOptions, request: dict[str, Any], pieces: list[str]) -> None:
    """Prints the answer as it arrives, and then its figures. Raises ValueError if the server reports an
    error."""
    sent, first, last, tokens, cut = time.perf_counter(), 0.0, 0.0, 0, False
    async with (
        session(endpoint, TIMEOUT) as client,
        client.post("v1/chat/completions", json=request) as response,
    ):
        async for line in (await checked(response)).content:
            data = line.removeprefix(b"data:").strip()
            if not data.startswith(b"{"):
                continue  # between events, or [DONE]
            event = json.loads(data)
            if "error" in event:
                raise ValueError(event["error"]["message"])
            if usage := event.get("usage"):
                tokens = usage["completion_tokens"]
            for choice in event.get("choices", ()):
                cut |= choice.get("finish_reason") == "length"
                content, reasoning = (choice["delta"].get(name) or "" for name in ("content", "reasoning"))
                if content or reasoning:
                    last = time.perf_counter()
                    first = first or last
                pieces.append(content)
                print(_DIM.format(reasoning) if reasoning else "", content, sep="", end="", flush=True)
    figures = f"first token after {(first - sent) * 1000:.0f} ms" if first else "no answer"
    if tokens > 1 and last > first:
        figures += f", {tokens} tokens, then {(tokens - 1) / (last - first):.1f} tokens/s"
    print(f"\n({figures}{', cut for length: --advanced.max-tokens' if cut else ''})", end="", file=sys.stderr)
