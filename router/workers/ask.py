"""The model of the workers, for a router that was not told one."""

import asyncio
import contextlib
import logging
import logging.config
import signal

import grpc
import grpc.aio

import rpc
from router.config import RouterConfig
from router.workers.refusal import cause
from rpc import worker_pb2 as pb
from rpc.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

CALL_TIMEOUT = 5.0
RETRY_SECONDS = 0.5


async def first_description(config: RouterConfig) -> pb.WorkerDescription:
    """Of the first worker that answers; waits for one."""
    return await _Question(config).asked()


class _Question:
    """Asks every worker that discovery finds, again and again, until one has answered."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._addresses: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._reasons: dict[str, str] = {}  # that were logged

    async def asked(self) -> pb.WorkerDescription:
        log.info("asking the workers which model they serve")
        following = asyncio.create_task(self._follow())
        try:
            while True:
                asked = [asyncio.create_task(self._ask(address)) for address in self._addresses]
                try:
                    for answered in asyncio.as_completed(asked):
                        if (description := await answered) is not None:
                            return description
                finally:
                    for task in asked:
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
        async for addresses in self._config.discovered().watch():
            self._addresses = addresses
            self._changed.set()

    async def _ask(self, address: str) -> pb.WorkerDescription | None:
        config = self._config
        try:
            async with rpc.connect(address, config.secret, config.cluster_tls) as channel:
                return await WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            reason, remedy = cause(error, tls=config.cluster_tls is not None)
            if self._reasons.get(address) != reason:
                self._reasons[address] = reason
                log.warning("worker at %s: %s. %s", address, reason, remedy)
            return None


def ask_workers(config: RouterConfig) -> pb.WorkerDescription | None:
    """Runs `first_description` in a process that does nothing else. None: SIGTERM came before."""

    async def ask() -> pb.WorkerDescription | None:
        asking = asyncio.create_task(first_description(config))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asking.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            return await asking
        return None

    logging.config.dictConfig(config.logging())
    return asyncio.run(ask())
