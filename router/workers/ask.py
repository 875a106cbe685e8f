"""Asks the workers which model they serve, for a router that is started without a model.

Meanwhile its ports answer every request with status 503 and the reason, in place of a refused connection.
"""

import asyncio
import contextlib
import json
import logging
import logging.config
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from itertools import islice
from typing import Any, BinaryIO, NoReturn

import grpc
import grpc.aio

from baton.machine.system import cannot_listen, describe_exit, die_with_parent, family
from baton.router.config import RouterConfig
from baton.router.errors import NoWorker
from baton.router.workers.checks import explain
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub

log = logging.getLogger(__name__)

CALL_TIMEOUT = 5.0
RETRY_SECONDS = 0.5
ANSWER_SECONDS = 5.0
"""For a client to send its request and to take the answer."""
SHOWN = 4  # workers whose reasons an answer has
_HEAD = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n"
)


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
    found: asyncio.Future[pb.WorkerDescription] = asyncio.get_running_loop().create_future()
    asking: dict[str, asyncio.Task[pb.WorkerDescription]] = {}
    reasons: dict[str, str] = {}

    def settle(task: asyncio.Task[Any]) -> None:
        if task.cancelled() or found.done():
            return
        if error := task.exception():
            found.set_exception(error)
        else:
            found.set_result(task.result())

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
            return await found
    finally:
        for task in (following, *asking.values()):
            task.cancel()
        await asyncio.gather(following, *asking.values(), return_exceptions=True)


@contextlib.asynccontextmanager
async def _explaining(config: RouterConfig, reasons: Mapping[str, str]) -> AsyncIterator[None]:
    """While it is open, the ports of the router say for what it waits. Raises ValueError if one is in use."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told = " ".join(islice(reasons.values(), SHOWN)) or "None is known yet."
        body = json.dumps(NoWorker(f"the router asks its workers which model they serve. {told}").body)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(_HEAD % len(body.encode()) + body.encode())
                await writer.drain()
            writer.close()
        except (OSError, EOFError, asyncio.LimitOverrunError):
            writer.transport.abort()  # the client is slow, gone, or does not speak HTTP

    context = None if config.tls is None else config.tls.server_context()
    ports = [("--port", config.host, config.port, context)]
    if config.admin_port:
        ports.append(("--admin-port", config.admin_host, config.admin_port, None))
    async with contextlib.AsyncExitStack() as servers:
        for flag, host, port, tls in ports:
            try:
                listening = socket.create_server((host, port), family=family(host))
            except OSError as error:
                raise ValueError(cannot_listen(flag, host, port, error)) from error
            await servers.enter_async_context(await asyncio.start_server(answer, sock=listening, ssl=tls))
        yield


def ask_workers(config: RouterConfig) -> pb.WorkerDescription | None:
    """Runs `first_description` in a child process. None: SIGTERM came first. gRPC starts threads, and from a
    process with threads no router processes can be forked."""
    logging.config.dictConfig(config.logging())
    reader, writer = os.pipe()
    with open(reader, "rb") as answer:
        child = os.fork()
        if not child:
            die_with_parent()
            with open(writer, "wb") as reply:
                _answer(config, reply)
        os.close(writer)
        before = signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
        try:
            described = answer.read()
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        finally:
            _, status = os.waitpid(child, 0)
            signal.signal(signal.SIGTERM, before)
    if status:
        raise ValueError(
            described.decode() or f"asking the workers: {describe_exit(os.waitstatus_to_exitcode(status))}"
        )
    return pb.WorkerDescription.FromString(described) if described else None


def _answer(config: RouterConfig, reply: BinaryIO) -> NoReturn:
    """Writes the description, or the mistake of the user with which it ends."""

    async def ask() -> bytes:
        asking = asyncio.create_task(first_description(config))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asking.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            return (await asking).SerializeToString()
        return b""

    code = 1
    try:
        reply.write(asyncio.run(ask()))
        code = 0
    except ValueError as error:
        reply.write(str(error).encode())
    except KeyboardInterrupt:
        log.info("interrupted while asking the workers")
    except BaseException:
        log.exception("asking the workers")
    reply.flush()
    os._exit(code)
