"""One router as several processes on one port. Each process has its own event loop.

The supervisor serves no client. It reserves the ports, starts the processes, which all listen there with
SO_REUSEPORT (the kernel spreads the connections), and restarts one that dies or hangs. On the admin port it
serves `/dashboard`, `/metrics`, `/status`, `/health`, `/ready`, `/routable` and the calls with the admin key
for all of them. If the first start of a process fails, the router ends, because another try would fail too.
If a later start fails, the supervisor retries after a pause, and the other processes go on.
"""

import asyncio
import contextlib
import json
import logging
import logging.config
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import setproctitle
from aiohttp import web

from baton.processes.children import report
from baton.processes.forks import Forks, HelperEnded, fork_helper
from baton.processes.keep import keep
from baton.processes.restarts import RestartPolicy
from baton.processes.sandbox.client import ForkServer
from baton.router.admission.key_counts import KeyCounts
from baton.router.admission.keys import ANY_CLIENT, ApiKey, follow_keys, to_json
from baton.router.api.jobs import SamplingDefaults
from baton.router.config import RouterConfig
from baton.router.endpoints import pages
from baton.router.endpoints.admin_calls import add_admin_calls
from baton.router.endpoints.frontend import request_name
from baton.router.endpoints.http_connections import ADMINS, HttpServer, listen, refusal
from baton.router.errors import NotFound
from baton.router.preparation.child import fork_server
from baton.router.processes.merged_metrics import MergedMetrics
from baton.router.processes.process import RouterProcess, configured
from baton.router.processes.sockets import reserve
from baton.router.status import Condition, all_are, health, merged_status, pause_of, scrape_targets
from baton.router.text.tokenizer import ModelTokenizer
from baton.system.addresses import url_host
from baton.system.connections import Connections

log = logging.getLogger(__name__)

Loaded = tuple[ModelTokenizer, SamplingDefaults]

PING_SECONDS = 2.0
ANSWER_SECONDS = 0.5
"""For a process to reply to a probe or a scrape. After that its last reply counts."""
END_SECONDS = 15.0
"""For processes to end, after their drain."""
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 30.0
"""Seconds before another start."""


class _CannotServe(Exception):
    """The first start of a process failed, or no more can be started. The message is for the user."""


class Supervisor:
    """Owns the processes, the reserved ports, the admin port, and the memory that the processes share."""

    def __init__(self, config: RouterConfig, processes: Forks, children: ForkServer) -> None:
        """`processes`: starts these. `children`: starts the children of all."""
        keys_fd = os.memfd_create("baton API keys")
        self._forks, self._children = processes, children
        self._config = replace(config, keys_fd=keys_fd, forks_fd=children.fd)
        self._reported = False  # to the parent, that all listen
        self._metrics = MergedMetrics()
        self._key_counts = KeyCounts(keys_fd, config.processes)
        self._key_counts.add(key.account for key in (ANY_CLIENT, *config.api_keys))
        self._processes: dict[int, RouterProcess] = {}
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._signalled = asyncio.Event()  # to read the API keys
        self._admin_url = ""
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit code. Raises ValueError for a mistake of the user."""
        config = self._config
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        if config.api_key_file is not None:
            loop.add_signal_handler(signal.SIGHUP, self._signalled.set)
        with contextlib.ExitStack() as reserved:

            def held(flag: str, port: int) -> int:
                return reserved.enter_context(reserve(flag, config.host, port)).getsockname()[1]

            port = held("--port", config.port)
            grpc_port = None if config.grpc_port is None else held("--grpc-port", config.grpc_port)
            async with self._admin() as self._admin_url:
                admin_port = int(self._admin_url.rpartition(":")[2])
                self._config = replace(config, port=port, grpc_port=grpc_port, admin_port=admin_port)
                return await self._serve()

    async def _serve(self) -> int:
        self._children.start()
        lives = [asyncio.create_task(self._keep(n)) for n in range(self._config.processes)]
        keys = asyncio.create_task(self._follow_keys())
        stopped = asyncio.create_task(self._signals.get())
        try:
            await asyncio.wait({stopped, *lives}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await self._stop(stopped.result(), lives)
                return 0
            error = next(life for life in lives if life.done()).exception()
            assert isinstance(error, _CannotServe), error
            if not self._reported:
                raise ValueError(str(error))
            log.error("%s", error)
            return 1
        finally:
            self._stopping.set()
            keys.cancel()
            stopped.cancel()
            for process in self._processes.values():
                process.kill()
            await asyncio.gather(*lives, return_exceptions=True)
            await self._children.close()
            self._forks.close()

    async def _stop(self, signum: int, lives: list[asyncio.Task[None]]) -> None:
        """Sends the processes the command for this signal, and for later ones, until all have ended."""
        self._stopping.set()
        all_ended = asyncio.gather(*lives, return_exceptions=True)
        drain = self._config.drain_timeout if signum == signal.SIGTERM else 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain + END_SECONDS):
                while not all_ended.done():
                    command = "drain" if signum == signal.SIGTERM else "stop"
                    await asyncio.gather(*(p.send_or_kill(command) for p in list(self._processes.values())))
                    next_signal = asyncio.create_task(self._signals.get())
                    await asyncio.wait({all_ended, next_signal}, return_when=asyncio.FIRST_COMPLETED)
                    signum = next_signal.result() if next_signal.done() else signum
                    next_signal.cancel()

    async def _keep(self, number: int) -> None:
        """Keeps process `number` running. Raises _CannotServe when its first start fails, or the helper has
        ended."""
        ready_fd = self._config.ready_fd if number == 0 else None
        has_listened = False

        async def live() -> tuple[float, str]:
            nonlocal ready_fd, has_listened
            process = RouterProcess(number, self._config)
            try:
                await process.start(self._forks)
            except HelperEnded as error:
                raise _CannotServe(f"process {number} cannot be started: {error}") from error
            fd, ready_fd = ready_fd, None
            listened, why = await self._live(process, fd)
            has_listened |= listened
            return (math.inf if listened else 0.0), why

        def ended(why: str, delay: float) -> None:
            if not has_listened:
                raise _CannotServe(why)
            log.error("process %d %s; restarting it in %g s", number, why, delay)

        await keep(live, RestartPolicy(FIRST_BACKOFF, LAST_BACKOFF), self._stopping, ended)

    async def _live(self, process: RouterProcess, ready_fd: int | None) -> tuple[bool, str]:
        """Waits for the end of the process. Returns whether it listened, and why it ended."""
        number = process.number
        self._processes[number] = process
        if self._stopping.is_set():  # while it was started: the others were told
            process.kill()
        following = asyncio.create_task(self._follow(process, ready_fd))
        pinging = asyncio.create_task(self._ping(process))
        try:
            code = await process.ended()
            await following
        finally:
            pinging.cancel()
            following.cancel()
            process.kill()  # if it could not be watched
            process.close()
            del self._processes[number]
            self._metrics.ended(str(number))
            self._key_counts.ended(number)
        if process.ready is not None:
            return True, process.error or f"ended with {code}"
        return False, process.error or f"router process {number} ended with {code} before it listened"

    async def _follow(self, process: RouterProcess, ready_fd: int | None) -> None:
        await process.follow(ready_fd)
        self._report_ready()
        await self._give_keys(process)  # they may have changed since its start

    async def _ping(self, process: RouterProcess) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            await process.asked("ping")

    async def _follow_keys(self) -> None:
        config = self._config
        if config.api_key_file is not None:
            await follow_keys(config.read_api_keys, config.api_key_file, self._use_keys, self._signalled)

    async def _use_keys(self, keys: tuple[ApiKey, ...]) -> None:
        """Gives these keys to all processes, present and later. Raises ValueError for too many keys."""
        self._key_counts.add(key.account for key in keys)
        self._config = replace(self._config, api_keys=keys)
        await asyncio.gather(*map(self._give_keys, list(self._processes.values())))

    async def _give_keys(self, process: RouterProcess) -> None:
        """Gives a process the present keys, unless it has them. One that does not listen yet gets them
        then."""
        keys = self._config.api_keys
        if process.ready is not None and process.keys != keys:
            process.keys = keys
            await process.send_or_kill(f"keys {to_json(keys).decode()}")

    def _report_ready(self) -> None:
        """Tells the parent once that all processes listen."""
        if not self._reported and (ready := self._all_ready()):
            self._reported = True
            addresses = {**ready, "admin_url": self._admin_url, "pid": os.getpid()}
            listen = "%d processes listen on %s; admin: %s"
            log.info(listen, self._config.processes, addresses["url"], self._admin_url)
            report(self._config.ready_fd, {"ready": addresses}, last=True)

    def _all_ready(self) -> Mapping[str, Any] | None:
        ready = [process.ready for process in self._processes.values() if process.ready is not None]
        return ready[0] if len(ready) == self._config.processes else None

    # ------------------------------------------------------------ the admin port

    @contextlib.asynccontextmanager
    async def _admin(self) -> AsyncIterator[str]:
        """Listens on the admin port, and yields its URL."""
        config = self._config
        app = web.Application()
        add_admin_calls(app, config, self._status)
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/metrics/targets", self._get_targets),
                web.get("/status", self._get_status),
                web.get("/status/requests/{id}", self._get_timeline),
                web.get("/health", self._get_health),
                web.get("/ready", partial(self._get_condition, "ready")),
                web.get("/routable", partial(self._get_condition, "routable")),
                *pages.routes(("home", "dashboard")),
            ]
        )
        http = HttpServer(app, client_timeout=config.client_timeout, keep_alive=config.keep_alive)
        async with http as server:
            server.serve_unix(config.admin_socket)
            listening = listen("--admin-port", config.admin_host, config.admin_port or 0)
            server.serve(listening, Connections("--admin-port", ADMINS))
            yield f"http://{url_host(config.admin_host)}:{listening.getsockname()[1]}"

    async def _known(self, command: str) -> dict[int, bytes]:
        """Returns the reply of each process, or its last one if it takes longer than `ANSWER_SECONDS`."""
        tasks = {process: process.asked(command) for process in self._processes.values()}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=ANSWER_SECONDS)
        running = sorted(self._processes.items())  # others have ended meanwhile
        return {number: p.replies[command] for number, p in running if p in tasks and command in p.replies}

    async def _get_metrics(self, request: web.Request) -> web.Response:
        pages = await self._known("metrics")
        text = self._metrics.page({str(number): page for number, page in pages.items()})
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _get_targets(self, request: web.Request) -> web.Response:
        return web.json_response(scrape_targets(await self._status()))

    async def _get_status(self, request: web.Request) -> web.Response:
        return web.json_response(await self._status())

    async def _get_timeline(self, request: web.Request) -> web.Response:
        """The process that served the request knows it. A hung one is left to its pings."""
        name = request.match_info["id"]
        valid = request_name(name) == name  # a line of the socket
        processes = list(self._processes.values()) if valid else []
        answers = await asyncio.gather(*(_ask(process, f"request {name}") for process in processes))
        timelines = [answer for answer in answers if answer]
        if not timelines:
            return refusal(NotFound(f"no request {name[:128]!r} is among the last that have ended here"))
        return web.Response(body=timelines[0], content_type="application/json")

    async def _status(self) -> dict[str, Any]:
        statuses = {number: json.loads(text) for number, text in (await self._known("status")).items()}
        return merged_status(statuses, self._config)

    async def _get_health(self, request: web.Request) -> web.Response:
        statuses = [json.loads(text) for text in (await self._known("ping")).values()]
        state = "draining" if any(router["state"] == "draining" for router in statuses) else "serving"
        return web.json_response(health(state, pause_of(statuses)), status=200 if statuses else 503)

    async def _get_condition(self, condition: Condition, request: web.Request) -> web.Response:
        statuses = [json.loads(text) for text in (await self._known("ping")).values()]
        return web.Response(status=200 if all_are(condition, statuses) else 503)


async def _ask(process: RouterProcess, command: str) -> bytes:
    """Returns the reply; nothing from a process that does not listen."""
    try:
        return await process.send(command)
    except ConnectionError:
        return b""


def supervise(
    config: RouterConfig,
    load: Callable[[RouterConfig], Loaded],
    serve: Callable[[RouterConfig, Loaded], int],
) -> int:
    """Runs the processes until SIGTERM or SIGINT. Raises ValueError for a mistake of the user.

    `load`: gives what all processes have. `serve`: runs one of them. Returns its exit code."""
    setproctitle.setproctitle(config.process_title)
    logging.config.dictConfig(config.logging())
    loaded = load(config)

    def run(given: bytes, fds: Sequence[int]) -> int:
        own = configured(config, given, fds)
        try:
            return serve(own, loaded)
        except ValueError as error:  # a mistake of the user
            report(own.ready_fd, {"error": str(error)})
        except BaseException:
            log.exception("process %s", own.process_number)
        return 1

    of_supervisor = () if config.ready_fd is None else (config.ready_fd,)
    processes = fork_helper(f"{config.process_title} processes", run, of_supervisor)
    children = fork_server(config.process_title, loaded[0], processes=config.processes)
    return asyncio.run(Supervisor(config, processes, children).run())
