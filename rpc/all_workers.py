"""Calls to all workers at the same time, for what changes all of them: `adapters`, `pause`, `weights`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from grpc.aio import AioRpcError

from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.rpc.tls import TlsFiles

T = TypeVar("T")


class NotDone(Exception):
    """Workers have refused what all should do, or have not answered.

    Attributes:
        faults: the errors of these workers, by address. None: a worker ended the call without a reason.
            Empty: all have done it, with different outcomes.
        changed: other workers have done it.
    """

    def __init__(self, faults: Mapping[str, AioRpcError | None], *, changed: bool) -> None:
        super().__init__(f"not all workers do what was asked: {', '.join(faults)}")
        self.faults = faults
        self.changed = changed


@contextlib.asynccontextmanager
async def connected(
    addresses: Iterable[str], secret: bytes, tls: TlsFiles | None
) -> AsyncIterator[dict[str, WorkerStub]]:
    """Stubs by address, while the context is open."""
    async with contextlib.AsyncExitStack() as opened:
        channels = {each: await opened.enter_async_context(connect(each, secret, tls)) for each in addresses}
        yield {address: WorkerStub(channel) for address, channel in channels.items()}


async def answers(calls: Mapping[str, Awaitable[T]]) -> dict[str, T | AioRpcError]:
    """What each call returns, or its error, by address. Raises what no worker has caused, when all calls have
    ended."""
    outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
    replies = dict[str, T | AioRpcError]()
    for address, reply in zip(calls, outcomes, strict=True):
        if isinstance(reply, BaseException) and not isinstance(reply, AioRpcError):
            raise reply
        replies[address] = reply
    return replies


async def to_the_end(change: Coroutine[Any, Any, T]) -> T:
    """Waits for the change, also in a task that is cancelled: no worker is left behind the others."""
    changing = asyncio.create_task(change)
    try:
        return await asyncio.shield(changing)
    except asyncio.CancelledError:
        await asyncio.wait([changing])
        raise
