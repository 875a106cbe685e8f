"""The process that makes the calls with the admin key to the workers, for the supervisor of a router.

gRPC starts threads, and a process with threads must not fork: a thread may hold a lock, for which the new
process then waits. The supervisor forks router processes as long as it lives. So its admin port forwards
these calls.

Life of the process: the first call starts it, or the next one after its death → SIGTERM: it ends.
"""

import asyncio
import os
import signal
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import setproctitle
from aiohttp import web

from baton.processes.children import process_end
from baton.router.config import RouterConfig
from baton.router.endpoints import http_adapters, http_pause, http_weight_transfer, http_weights
from baton.router.endpoints.http_admin import AdminCalls
from baton.router.endpoints.http_connections import ADMINS, HttpServer, refusal
from baton.router.errors import Failed
from baton.router.processes.process import fork
from baton.system.connections import Connections

_MODULES = http_weights, http_pause, http_weight_transfer, http_adapters
_FORWARDED = "Authorization", "Content-Type"
"""The headers that these calls read."""
_OF_CONNECTION = "Connection", "Content-Length", "Date", "Keep-Alive", "Server", "Transfer-Encoding"
"""Headers of an answer that this process writes itself."""
_ANY_TIME = aiohttp.ClientTimeout(total=None)


class AdminProcess:
    """The supervisor's side. It owns the process.

    Attributes:
        url: of the admin port, from which the process reads `/status`.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.url = ""
        self._config = config
        self._pid: int | None = None
        self._session: aiohttp.ClientSession | None = None

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", path, self._forward) for module in _MODULES for path in module.PATHS]

    async def close(self) -> None:
        """Waits until the calls that run have ended."""
        if self._session is not None:
            await self._session.close()
        if self._is_alive() and self._pid is not None:
            os.kill(self._pid, signal.SIGTERM)
            await process_end(self._pid)
            os.waitpid(self._pid, 0)  # noqa: ASYNC222  (it is dead)

    async def _forward(self, request: web.Request) -> web.Response:
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        body = request.content if request.body_exists else None
        try:
            session = await self._started()
            async with session.request(request.method, request.path_qs, headers=headers, data=body) as answer:
                kept = answer.headers.copy()
                for name in _OF_CONNECTION:
                    kept.popall(name, None)
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)
        except (aiohttp.ClientError, OSError) as error:
            text = f"the process that calls the workers failed: {error}. Look at `baton status`"
            return refusal(Failed(text))

    async def _started(self) -> aiohttp.ClientSession:
        if self._session is not None and self._is_alive():
            return self._session
        name = f"\0baton-{os.urandom(16).hex()}"  # the kernel forgets it with its socket
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(name)
            listening.listen(ADMINS)
            config = replace(self._config, ready_fd=None, control_fd=listening.fileno())
            self._pid = fork(config, partial(_run, self.url))
        before = self._session
        connector = aiohttp.UnixConnector(name, force_close=True)
        self._session = aiohttp.ClientSession(
            "http://calls", connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=_ANY_TIME
        )
        if before is not None:
            await before.close()
        return self._session

    def _is_alive(self) -> bool:
        if self._pid is not None and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = None
        return self._pid is not None


def _run(url: str, config: RouterConfig) -> int:
    """What the process does."""
    setproctitle.setproctitle(f"{config.process_title} calls")
    asyncio.run(_serve(url, config))
    return 0


async def _serve(url: str, config: RouterConfig) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is for the supervisor, which then ends this
    assert config.control_fd is not None, "the socket"
    listening = socket.socket(fileno=config.control_fd)
    app = web.Application()
    async with aiohttp.ClientSession(url) as http:

        async def status() -> dict[str, Any]:
            async with http.get("/status") as answer:
                return await answer.json()

        calls = AdminCalls(config, status)
        transfer = http_weight_transfer.HttpWeightTransfer(calls)
        app.on_cleanup.append(transfer.close)
        for handlers in (
            http_weights.HttpWeights(calls),
            http_pause.HttpPause(calls),
            transfer,
            http_adapters.HttpAdapters(calls),
        ):
            app.add_routes(handlers.routes())
        async with HttpServer(
            app, client_timeout=config.client_timeout, keep_alive=config.keep_alive
        ) as server:
            server.serve(listening, Connections("calls to workers", ADMINS))
            await stopping.wait()
