"""The HTTP face of fake workers, for routers that want HTTP: what vLLM's and SGLang's servers have of it.

The same model as behind gRPC: output token i is `answer[i]`, the first at once, each other with a step.
Tokens are events of about the size that a real server sends. Nothing is tokenized.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from aiohttp import web

_DONE = b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def http_face(answer: list[int], next_step: Callable[[], Awaitable[None]]) -> AsyncIterator[str]:
    """Listens on a free port while open; gives its URL."""

    async def complete(request: web.Request) -> web.StreamResponse:
        max_tokens = msgspec.json.decode(await request.read())["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(max_tokens):
            if i:
                await next_step()
            await response.write(_event(answer[i % len(answer)], last=i + 1 == max_tokens))
        await response.write(_DONE)
        return response

    async def healthy(request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def models(request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "vllm"}]}
        )

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    app.add_routes([web.get(path, healthy) for path in ("/health", "/health_generate")])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def _event(token_id: int, *, last: bool) -> bytes:
    choice = {
        "index": 0, "text": f" {token_id}", "logprobs": None,
        "finish_reason": "length" if last else None, "stop_reason": None,
    }  # fmt: skip
    event = {
        "id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1_700_000_000,
        "model": "fake", "choices": [choice],
    }  # fmt: skip
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
