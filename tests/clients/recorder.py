"""A proxy between a client and a router that records requests."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

HOP = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding", "content-encoding"}
MAX_BODY = 64 << 20


@dataclass
class Exchange:
    """A request and its answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    answer: str = ""


@dataclass
class Recorder:
    """Passes requests on to `upstream`."""

    upstream: str
    http: aiohttp.ClientSession
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        headers = {key.lower(): value for key, value in request.headers.items()}
        body = None
        with contextlib.suppress(ValueError):
            body = json.loads(raw)
        exchange = Exchange(request.method, request.path_qs, headers, body)
        self.exchanges.append(exchange)
        sent = {key: value for key, value in headers.items() if key not in HOP}
        url = self.upstream + request.path_qs
        async with self.http.request(request.method, url, data=raw, headers=sent) as answer:
            exchange.status = answer.status
            passed = {key: value for key, value in answer.headers.items() if key.lower() not in HOP}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                exchange.answer += piece.decode(errors="replace")
                await response.write(piece)
            await response.write_eof()
            return response


@contextlib.asynccontextmanager
async def recording(upstream: str) -> AsyncIterator[Recorder]:
    """A proxy on a port of its own."""
    async with aiohttp.ClientSession() as http:
        recorder = Recorder(upstream, http)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", recorder.handle)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        recorder.url = site.name
        host, port = runner.addresses[0][:2]
        recorder.url = f"http://{host}:{port}"
        try:
            yield recorder
        finally:
            await runner.cleanup()
