"""The process of an endpoint picker: its configuration; starts, serves until a signal, and stops."""

import asyncio
import contextlib
import logging.config
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import setproctitle
import uvloop
from google.protobuf.message import DecodeError
from grpc import StatusCode
from grpc.aio import ServicerContext
from grpc_health.v1.health_pb2 import HealthCheckResponse

from baton.endpoint_picker.exchange import Exchange
from baton.endpoint_picker.routers import Routers
from baton.router.discovery import Discovery
from baton.rpc import ext_proc_pb2 as pb
from baton.rpc.channel import create_public_server
from baton.rpc.health import HealthServicer
from baton.rpc.port import Server
from baton.rpc.stubs import EXTERNAL_PROCESSOR, add_service
from baton.rpc.tls import TlsFiles, add_port
from baton.system import logs
from baton.system.addresses import cannot_listen, url_host
from baton.system.role_config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class PickerConfig(ServerConfig):
    """The configuration of one endpoint picker."""

    routers: Discovery
    """Yields the HTTP addresses of routers, as the gateway names them."""
    metrics_port: int | None = None
    """Port of `/metrics` of each router. None: that of its address."""
    tls: TlsFiles | None = None
    """For the gateway's connections."""


log = logging.getLogger(__name__)

SERVICE = EXTERNAL_PROCESSOR.full_name
MAX_MESSAGE_BYTES = 17 << 20
"""A buffered body is one message, and routers take bodies of 16 MiB by default."""
_MESSAGE_SECONDS = 5.0
"""Of a health check. The messages of a stream come when the client sends."""


class Picker:
    """Owns the streams of gateways."""

    def __init__(self, routers: Routers, server: Server) -> None:
        self._routers = routers
        self._server = server

    async def Process(
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: ServicerContext
    ) -> AsyncIterator[pb.ProcessingResponse]:
        exchange = Exchange(self._routers)
        try:
            with self._server.call(context, busy=False):
                async for message in request_iterator:
                    for answer in exchange.answers(message):
                        yield answer
                    if exchange.ended:
                        return
        except (ValueError, DecodeError) as error:
            await context.abort(StatusCode.INVALID_ARGUMENT, str(error))


@contextlib.asynccontextmanager
async def running(config: PickerConfig) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Listens while the context is open. At its end, open streams have `config.drain_timeout` to finish.

    Yields the address, and the task that follows discovery, which ends only with an error. Raises ValueError
    when the port cannot be had.
    """
    health = HealthServicer()
    # The names that the protocol asks for. "" and "liveness": the process serves.
    health.set("liveness", HealthCheckResponse.SERVING)

    def tell(serves: bool) -> None:
        for name in ("readiness", SERVICE):
            health.set(name, HealthCheckResponse.SERVING if serves else HealthCheckResponse.NOT_SERVING)

    tell(serves=False)
    routers = Routers(config.routers, config.metrics_port, on_found=lambda: tell(serves=True))
    server = create_public_server(
        MAX_MESSAGE_BYTES, health, [SERVICE], message_timeout=_MESSAGE_SECONDS, share=False
    )
    add_service(server, EXTERNAL_PROCESSOR, Picker(routers, server))
    try:
        pems = None if config.tls is None else config.tls.pems()
        port = add_port(server, config.host, config.port, pems)
    except OSError as error:
        raise ValueError(cannot_listen("--port", config.host, config.port, error)) from error
    await server.start()
    following = asyncio.create_task(routers.run(), name="routers")
    try:
        yield f"{url_host(config.host)}:{port}", following
    finally:
        health.stop()
        await server.stop(config.drain_timeout)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def serve(config: PickerConfig) -> None:
    """Serves until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with running(config) as (address, following):
        log.info("listening on %s", address)
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait({stopped, following}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
        log.info("draining")


def main(config: PickerConfig) -> int:
    """Runs the picker until SIGTERM or SIGINT. Raises ValueError for a mistake of the user."""
    setproctitle.setproctitle("baton: picker")
    lines = logs.log_config(config.log_format, config.log_level, {"role": "picker"}, exception_text=False)
    logging.config.dictConfig(lines)
    uvloop.run(serve(config))
    return 0
