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

from baton.rpc import worker_pb2 as pb
from baton.rpc.all_workers import NotDone, answers, connected, to_the_end
from baton.rpc.stubs import WorkerStub
from baton.rpc.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Replaced:
    nbytes: int
    """Of the new weights, on the worker with the most."""
    read_seconds: float
    """The longest that a worker read and checked them."""
    pause: float
    """Seconds in which no worker served, or the most in which those that changed together did not."""
    at_once: int = 0
    """Workers that changed together; 0: all."""

    @property
    def outage(self) -> str:
        """For the user."""
        if self.at_once:
            return f"{self.at_once} at a time did not serve, for {self.pause:.2f} s at most"
        return f"no worker served for {self.pause:.2f} s"


def outcome_of(fault: NotDone) -> str:
    """Of new weights that not all workers took, for the user."""
    return "Some workers have the new weights: try again." if fault.changed else "No weights have changed."


def named(path: str, version: str, *, rolls: bool = False) -> pb.StageWeights:
    """The weights of a checkpoint, newer than all that were named before. `rolls`: workers get them some
    after others, and serve until then. Their calls end with this process or its host (keepalive of gRPC), and
    so does that."""
    now = time.time_ns()  # noqa: TID251 - coordinators on other hosts compare it
    return pb.StageWeights(path=path, version=version, named_at=now, rolls=rolls)


@contextlib.asynccontextmanager
async def replacement_at(
    addresses: Sequence[str], secret: bytes, tls: TlsFiles | None
) -> AsyncIterator["Replacement"]:
    """Of the weights of the workers at these addresses. Whatever ends the context before `apply` leaves all
    workers as they were."""
    async with connected(addresses, secret, tls) as stubs:
        calls = {address: _Call(stub) for address, stub in stubs.items()}
        try:
            yield Replacement(calls)
        finally:
            for call in calls.values():
                call.close()


class Replacement:
    """Of `replacement_at`."""

    def __init__(self, calls: "Mapping[str, _Call]") -> None:
        self._calls = calls

    async def stage(self, weights: pb.StageWeights) -> tuple[int, float]:
        """All workers read and check the weights. Returns their bytes and the seconds, of the worker with the
        most. Raises NotDone."""
        staged = await _all(self._calls, pb.WeightsCommand(stage=weights))
        return max(r.bytes for r in staged), max(r.seconds for r in staged)

    async def apply(self, version: str = "", at_once: int = 0) -> float:
        """All workers compute with the weights from now on. `version`: in place of that of `stage`.
        `at_once`: so many change at the same time, in the order of the addresses; 0: all. Returns the most
        seconds in which workers did not serve. Raises NotDone.

        A task that is cancelled in the last step waits for its end, so that these workers get the command."""
        longest, calls = 0.0, list(self._calls.items())
        for first in range(0, len(calls), at_once or len(calls)):
            some = dict(calls[first : first + (at_once or len(calls))])
            began = time.monotonic()
            try:
                await self._apply(some, version)
            except NotDone as error:
                raise NotDone(error.faults, changed=error.changed or first > 0) from error
            longest = max(longest, time.monotonic() - began)
        return longest

    async def _apply(self, calls: "Mapping[str, _Call]", version: str) -> None:
        await _all(calls, pb.WeightsCommand(close=True))
        command = pb.WeightsCommand(apply=True, version=version)
        await to_the_end(_all(calls, command))


async def replace_weights(
    addresses: Sequence[str],
    weights: pb.StageWeights,
    secret: bytes,
    tls: TlsFiles | None,
    at_once: int = 0,
) -> Replaced:
    """Gives the workers at these addresses the weights. `at_once`: as in `Replacement.apply`. Raises
    NotDone."""
    async with replacement_at(addresses, secret, tls) as replacement:
        nbytes, seconds = await replacement.stage(weights)
        return Replaced(nbytes, seconds, await replacement.apply(at_once=at_once), at_once)


class _Call:
    """To one worker. It lives until `close`. Without `apply` the worker keeps its weights."""

    def __init__(self, stub: WorkerStub) -> None:
        self._commands = asyncio.Queue[pb.WeightsCommand | None]()
        self._call = stub.ReplaceWeights(self._sent())
        self._reports = aiter(self._call)

    async def _sent(self) -> AsyncIterator[pb.WeightsCommand]:
        while (command := await self._commands.get()) is not None:
            yield command

    def close(self) -> None:
        """Ends the call, and gRPC's task that waits for commands. That task outlives the channel, and also a
        call that the worker has ended."""
        self._call.cancel()
        self._commands.put_nowait(None)

    async def report(self, command: pb.WeightsCommand) -> pb.WeightsReport | None:
        """Sends the command and waits for the worker's report. None: the worker ended the call. Raises
        `AioRpcError` with the worker's reason."""
        self._commands.put_nowait(command)
        return await anext(self._reports, None)


async def _all(calls: Mapping[str, _Call], command: pb.WeightsCommand) -> list[pb.WeightsReport]:
    """The reports of all workers. Raises NotDone."""
    replies = await answers({address: call.report(command) for address, call in calls.items()})
    reports = [reply for reply in replies.values() if isinstance(reply, pb.WeightsReport)]
    faults = {x: reply for x, reply in replies.items() if not isinstance(reply, pb.WeightsReport)}
    if faults:
        raise NotDone(faults, changed=command.apply and bool(reports))
    return reports
