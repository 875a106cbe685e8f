"""The calling side of ReplaceWeights: one command, then its report."""

import asyncio
from collections.abc import AsyncIterator

from baton.rpc import worker_pb2 as pb
from baton.rpc.stubs import WorkerStub


class WeightsCall:
    """A call to one worker. It lives as long as its channel. Without `apply` the worker keeps its weights."""

    def __init__(self, stub: WorkerStub) -> None:
        self._commands = asyncio.Queue[pb.WeightsCommand]()
        self._reports = aiter(stub.ReplaceWeights(self._sent()))

    async def _sent(self) -> AsyncIterator[pb.WeightsCommand]:
        while True:
            yield await self._commands.get()

    async def report(self, command: pb.WeightsCommand) -> pb.WeightsReport:
        """Sends the command and waits for the worker's report. Raises `AioRpcError` with the worker's
        reason."""
        self._commands.put_nowait(command)
        return await anext(self._reports)


async def replace_weights(stub: WorkerStub, weights: pb.StageWeights) -> None:
    """Gives one worker these weights. Raises `AioRpcError`."""
    call = WeightsCall(stub)
    await call.report(pb.WeightsCommand(stage=weights))
    await call.report(pb.WeightsCommand(close=True))
    await call.report(pb.WeightsCommand(apply=True))
