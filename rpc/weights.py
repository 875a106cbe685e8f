"""The calling side of ReplaceWeights: gives workers new weights, all of them or none.

All workers stage the new weights, then all are closed, then all apply them
(`worker.service_process.weights`). A fault before the last step ends all calls, which leaves the workers as
they were.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from grpc.aio import AioRpcError

from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.rpc.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Replaced:
    nbytes: int
    """Of the new weights, on the worker with the most."""
    read_seconds: float
    """The longest that a worker read and checked them."""
    pause: float
    """Seconds in which no worker served."""


class NotReplaced(Exception):
    """Workers have refused a step, or have ended their calls.

    Attributes:
        faults: the errors of these workers, by address. None: a worker ended the call without a reason.
        changed: the other workers have the new weights. False: all workers have those of before.
    """

    def __init__(self, faults: Mapping[str, AioRpcError | None], *, changed: bool) -> None:
        super().__init__(f"the weights are not those of all workers: {', '.join(faults)}")
        self.faults = faults
        self.changed = changed

    @property
    def outcome(self) -> str:
        """For the user."""
        return (
            "Other workers have the new weights: try again." if self.changed else "No weights have changed."
        )


async def replace_weights(
    addresses: Sequence[str], weights: pb.StageWeights, secret: bytes, tls: TlsFiles | None
) -> Replaced:
    """Gives the workers at these addresses the weights. Raises NotReplaced.

    A task that is cancelled in the last step waits for its end, so that all workers get the command."""
    async with contextlib.AsyncExitStack() as until_the_end:
        calls = dict[str, _Call]()
        for address in addresses:
            channel = await until_the_end.enter_async_context(connect(address, secret, tls))
            calls[address] = _Call(WorkerStub(channel))
        staged = await _all(calls, pb.WeightsCommand(stage=weights))
        began = time.monotonic()
        await _all(calls, pb.WeightsCommand(close=True))
        applying = asyncio.create_task(_all(calls, pb.WeightsCommand(apply=True)))
        try:
            await asyncio.shield(applying)
        except asyncio.CancelledError:
            await asyncio.wait([applying])
            raise
        pause = time.monotonic() - began
    return Replaced(max(r.bytes for r in staged), max(r.seconds for r in staged), pause)


class _Call:
    """To one worker. It lives as long as its channel. Without `apply` the worker keeps its weights."""

    def __init__(self, stub: WorkerStub) -> None:
        self._commands = asyncio.Queue[pb.WeightsCommand]()
        self._reports = aiter(stub.ReplaceWeights(self._sent()))

    async def _sent(self) -> AsyncIterator[pb.WeightsCommand]:
        while True:
            yield await self._commands.get()

    async def report(self, command: pb.WeightsCommand) -> pb.WeightsReport | None:
        """Sends the command and waits for the worker's report. None: the worker ended the call. Raises
        `AioRpcError` with the worker's reason."""
        self._commands.put_nowait(command)
        return await anext(self._reports, None)


async def _all(calls: Mapping[str, _Call], command: pb.WeightsCommand) -> list[pb.WeightsReport]:
    """The reports of all workers. Raises NotReplaced."""
    sent = [call.report(command) for call in calls.values()]
    found = await asyncio.gather(*sent, return_exceptions=True)
    faults = dict[str, AioRpcError | None]()
    for address, report in zip(calls, found, strict=True):
        if report is None or isinstance(report, AioRpcError):
            faults[address] = report
        elif isinstance(report, BaseException):
            raise report
    if faults:
        raise NotReplaced(faults, changed=command.apply and len(calls) > len(faults))
    return [report for report in found if isinstance(report, pb.WeightsReport)]
