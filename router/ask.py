"""Asks the workers which model they serve, for a router that is started without a model.

Meanwhile its ports answer every request with status 503 and the reason, in place of a refused connection.
"""

import asyncio
import contextlib
import logging
import logging.config
import signal
from collections.abc import AsyncIterator, Mapping
from itertools import islice
from typing import Any

import grpc.aio
from aiohttp import web

from baton.router.config import RouterConfig
from baton.router.endpoints.http_connections import HttpServer, listen, refusal
from baton.router.errors import NoWorker
from baton.router.workers.checks import explain
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.system.connections import Connections

log = logging.getLogger(__name__)

CALL_TIMEOUT = 5.0
RETRY_SECONDS = 0.5
SHOWN = 4  # workers whose reasons an answer has
_CLIENTS = 256
"""Connections to a port."""


async def _ask(address: str, config: RouterConfig, reasons: dict[str, str]) -> pb.WorkerDescription:
    """Asks one worker until it answers. `reasons` get why it does not, and the remedy, under its address."""
    logged = ""
    while True:
        try:
            async with connect(address, config.secret, config.cluster_tls) as channel:
                return await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            reason, remedy = explain(error, files=config.cluster_tls is not None)
            if reason != logged:  # not with each try
                logged = reason
                log.warning("worker at %s: %s. %s", address, reason, remedy)
                reasons[address] = f"worker at {address}: {reason}. {remedy}"
        await asyncio.sleep(RETRY_SECONDS)


async def first_description(config: RouterConfig) -> pb.WorkerDescription:
    """Asks all workers that discovery finds, until one answers. Returns its description."""
    log.info("asking the workers which model they serve")
    description: asyncio.Future[pb.WorkerDescription] = asyncio.get_running_loop().create_future()
    asking: dict[str, asyncio.Task[pb.WorkerDescription]] = {}
    reasons: dict[str, str] = {}

    def settle(task: asyncio.Task[Any]) -> None:
        if task.cancelled() or description.done():
            return
        if error := task.exception():
            description.set_exception(error)
        else:
            description.set_result(task.result())

    async def follow() -> None:
        async for addresses in config.discovered().watch():
            for gone in asking.keys() - addresses:
                asking.pop(gone).cancel()
                reasons.pop(gone, None)
            for address in addresses - asking.keys():
                asking[address] = asyncio.create_task(_ask(address, config, reasons))
                asking[address].add_done_callback(settle)
        await asyncio.Event().wait()

    following = asyncio.create_task(follow())
    following.add_done_callback(settle)
    try:
        async with _explaining(config, reasons):
            return await description
    finally:
        for task in (following, *asking.values()):
            task.cancel()
        await asyncio.gather(following, *asking.values(), return_exceptions=True)


@contextlib.asynccontextmanager
async def _explaining(config: RouterConfig, reasons: Mapping[str, str]) -> AsyncIterator[None]:
    """While it is open, the ports of the router say for what it waits. Raises ValueError if one is in use."""

    @web.middleware
    async def answer(request: web.Request, handler: object) -> web.Response:
        causes = " ".join(islice(reasons.values(), SHOWN)) or "None is known yet."
        text = f"the router asks its workers which model they serve. {causes}"
        return refusal(NoWorker(text, retry_after=1))

    ports = [
        ("--port", config.host, config.port, None if config.tls is None else config.tls.server_context())
    ]
    if config.admin_port:
        ports.append(("--admin-port", config.admin_host, config.admin_port, None))
    app = web.Application(middlewares=[answer])
    http = HttpServer(app, client_timeout=config.client_timeout, keep_alive=config.keep_alive)
    async with http as server:
        for flag, host, port, tls in ports:
            server.serve(listen(flag, host, port), Connections(flag, _CLIENTS), tls)
        yield


def ask_workers(config: RouterConfig) -> pb.WorkerDescription | None:
    """Runs `first_description`. None: SIGTERM came first. Raises ValueError for a mistake of the user."""
    logging.config.dictConfig(config.logging())

    async def asked() -> pb.WorkerDescription | None:
        asking = asyncio.create_task(first_description(config))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asking.cancel)
        await asyncio.wait({asking})
        return None if asking.cancelled() else asking.result()

    try:
        return asyncio.run(asked())
    except KeyboardInterrupt:
        log.info("interrupted while asking the workers")
        raise
