"""Asks the workers which model they serve, for a router that is started without a model."""

import asyncio
import contextlib
import logging
import logging.config
import signal
from typing import Any

import grpc
import grpc.aio

from baton.router.workers.checks import explain
from baton.router.workers.discovery import Discovery
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.tls import TlsFiles
from baton.rpc.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

CALL_TIMEOUT = 5.0
RETRY_SECONDS = 0.5


class _Asker:
    """Asks every worker that discovery finds, until the first one answers."""

    def __init__(self, discovery: Discovery, secret: bytes, tls: TlsFiles | None) -> None:
        self._discovery = discovery
        self._secret = secret
        self._tls = tls
        self._addresses: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._logged: dict[str, str] = {}  # address → the last logged reason

    async def first_description(self) -> pb.WorkerDescription:
        log.info("asking the workers which model they serve")
        following = asyncio.create_task(self._follow())
        try:
            while True:
                calls = [asyncio.create_task(self._describe(address)) for address in self._addresses]
                try:
                    for call in asyncio.as_completed(calls):
                        if (description := await call) is not None:
                            return description
                finally:
                    for task in calls:
                        task.cancel()
                if following.done():
                    following.result()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), RETRY_SECONDS)
                self._changed.clear()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self) -> None:
        async for addresses in self._discovery.watch():
            self._addresses = addresses
            self._changed.set()

    async def _describe(self, address: str) -> pb.WorkerDescription | None:
        try:
            async with connect(address, self._secret, self._tls) as channel:
                return await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            reason, remedy = explain(error, files=self._tls is not None)
            if self._logged.get(address) != reason:
                self._logged[address] = reason
                log.warning("worker at %s: %s. %s", address, reason, remedy)
            return None


async def first_description(
    discovery: Discovery, secret: bytes, tls: TlsFiles | None
) -> pb.WorkerDescription:
    """Waits until a worker answers, and returns its description."""
    return await _Asker(discovery, secret, tls).first_description()


def ask_workers(
    discovery: Discovery,
    secret: bytes,
    tls: TlsFiles | None,
    logging_config: dict[str, Any],
    runner: asyncio.Runner,
) -> pb.WorkerDescription | None:
    """Runs `first_description`. None: SIGTERM came first. `runner`: the router's, since gRPC has one queue of
    events for all loops of a process. It would bring late events of these calls to a loop that is closed."""

    async def ask() -> pb.WorkerDescription | None:
        asking = asyncio.create_task(first_description(discovery, secret, tls))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asking.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            return await asking
        return None

    logging.config.dictConfig(logging_config)
    return runner.run(ask())
