"""The calling side of SetPause and SetMemory: pauses all workers, or none; gives their memory back.

abort: steps of all workers end, and their attempts ─▶ paused
wait:  all workers get no new request ─ none has an attempt any more ─▶ their steps end ─▶ paused
keep:  steps of all workers end ─▶ paused
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Literal

import grpc
from grpc.aio import AioRpcError

from baton.rpc import worker_pb2 as pb
from baton.rpc.all_workers import NotDone, answers, connected
from baton.rpc.stubs import WorkerStub
from baton.rpc.tls import TlsFiles

Mode = Literal["abort", "wait", "keep"]
"""What becomes of the requests that workers have."""
ANSWER_WITHIN = 30.0
"""Seconds for a worker: its step ends first."""
CONNECT_WITHIN = 5.0
"""For one that may be down."""
IDLE_CHECK = 0.02
_NO_ANSWER = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


@contextlib.asynccontextmanager
async def workers_at(
    addresses: Sequence[str], secret: bytes, tls: TlsFiles | None, *, may_lack: Collection[str] = ()
) -> AsyncIterator["Workers"]:
    """Connections to these workers, while the context is open. `may_lack`: these may be down. One that does
    not answer is left out."""
    async with connected(addresses, secret, tls) as stubs:
        yield Workers(stubs, may_lack)


class Workers:
    """Of `workers_at`."""

    def __init__(self, stubs: dict[str, WorkerStub], may_lack: Collection[str]) -> None:
        self._stubs, self._may_lack = stubs, may_lack

    async def pause(self, mode: Mode, seconds: float, *, keep_kv: bool = False) -> None:
        """Returns when no worker computes. The pause ends after so many seconds, also that of `wait` which
        still waits. Raises NotDone, and TimeoutError if requests run as long as that. If it ends before its
        time, for whatever reason, the workers go on. `keep_kv`: as in `PauseRequest`."""
        done = False
        try:
            if mode == "wait":
                async with asyncio.timeout(seconds):
                    await self._set(pb.PauseRequest(pause=pb.PAUSE_NEW, seconds=seconds))
                    while not all(status.idle for status in await self._statuses()):  # noqa: ASYNC110
                        await asyncio.sleep(IDLE_CHECK)
            steps = pb.PauseRequest(pause=pb.PAUSE_STEPS, seconds=seconds, keep_kv=keep_kv)
            steps.abort = mode == "abort"
            await self._set(steps)
            done = True
        finally:
            if not done:
                resuming = asyncio.create_task(self.resume())
                await asyncio.wait([resuming])
                resuming.exception()  # the first error is the one to tell

    async def resume(self) -> None:
        """Raises NotDone."""
        await self._set(pb.PauseRequest(pause=pb.PAUSE_NONE))

    async def release(self, tags: Sequence[str]) -> None:
        """All workers give this memory back, and compute nothing from then on. `tags`: as in MemoryRequest.
        Raises NotDone. Then some may have released it: `release` again, or `take_again`."""
        await self._set_memory(pb.MemoryRequest(release=True, tags=tags))

    async def take_again(self, tags: Sequence[str]) -> list[pb.WorkerStatus]:
        """All workers have this memory again. Returns what they lack then. Raises NotDone. Then some may
        have it: `take_again` again."""
        return await self._set_memory(pb.MemoryRequest(tags=tags))

    async def _set_memory(self, request: pb.MemoryRequest) -> list[pb.WorkerStatus]:
        return await self._all(lambda stub, timeout: stub.SetMemory(request, timeout=timeout))

    async def busy(self) -> int:
        """Workers with requests whose steps are not paused."""
        return sum(s.pause != pb.PAUSE_STEPS and not s.idle for s in await self._statuses())

    async def _set(self, request: pb.PauseRequest) -> None:
        await self._all(lambda stub, timeout: stub.SetPause(request, timeout=timeout))

    async def _statuses(self) -> list[pb.WorkerStatus]:
        return await self._all(lambda stub, timeout: stub.GetStatus(pb.StatusRequest(), timeout=timeout))

    async def _all(
        self, call: Callable[[WorkerStub, float], Awaitable[pb.WorkerStatus]]
    ) -> list[pb.WorkerStatus]:
        calls = {
            address: call(stub, CONNECT_WITHIN if address in self._may_lack else ANSWER_WITHIN)
            for address, stub in self._stubs.items()
        }
        faults, statuses = dict[str, AioRpcError](), list[pb.WorkerStatus]()
        for address, status in (await answers(calls)).items():
            if not isinstance(status, AioRpcError):
                statuses.append(status)
            elif address in self._may_lack and status.code() in _NO_ANSWER:
                del self._stubs[address]
            else:
                faults[address] = status
        if faults:
            raise NotDone(faults, changed=bool(statuses))
        return statuses
