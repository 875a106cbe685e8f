"""Runs the client processes of one run and gathers what they report."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.bench.load.target.answer import Failure, Record
from baton.bench.load.traffic.client import ClientConfig
from baton.bench.load.traffic.client_process import MAX_LINE, ClientUsage, Progress, line_of, messages
from baton.system.python_path import python_path

_HEADSTART_SECONDS = 0.2  # so that all clients know the start before it
_STOP_SECONDS = 10.0
REFUSALS, REFUSED_SECONDS = 20, 1.0
_REFUSED = (Failure.REFUSED, Failure.UNREACHABLE, Failure.HTTP)


class Refusals:
    """Counts the requests of all clients that were refused since the last success."""

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0

    def are_hopeless(self, record: Record, answering: int) -> bool:
        """Whether `REFUSALS` requests in a row, over at least `REFUSED_SECONDS`, were refused, and the server
        is `answering` no other one.

        Then the server is down, or it needs another key, model or load. More requests would not help.
        """
        if answering or record.failure not in _REFUSED:
            self._count = 0
            return False
        if not self._count:
            self._since = record.ended
        self._count += 1
        return self._count >= REFUSALS and record.ended - self._since >= REFUSED_SECONDS


@dataclass(slots=True)
class Harvest:
    """What the client processes reported.

    Attributes:
        started, ended: time.monotonic().
        refused: the text of the last refusal, if refusals stopped the run.
        died: a line for each client process that ended early.
    """

    started: float = 0.0
    ended: float = 0.0
    records: list[Record] = field(default_factory=list)
    loads: list[ClientUsage] = field(default_factory=list)
    progress: dict[int, Progress] = field(default_factory=dict)  # by client
    interrupted: bool = False
    refused: str = ""
    died: list[str] = field(default_factory=list)


class Fleet:
    """One process for each configuration. `run` it once. A signal handler may call `stop`."""

    def __init__(self, configs: Sequence[ClientConfig]) -> None:
        self.harvest = Harvest()
        self._configs = configs
        self._processes: list[asyncio.subprocess.Process] = []
        self._stopping = False
        self._refusals = Refusals()

    async def run(self, on_record: Callable[[Record], None]) -> Harvest:
        try:
            for config in self._configs:
                self._processes.append(await _spawn(config))
            if self._stopping:
                self.stop()  # also those that were started since
            ready = [await _out(p).readline() for p in self._processes]
            if not self._stopping:
                assert all(ready), "a client process could not start; see its message above"
            self.harvest.started = time.monotonic() + _HEADSTART_SECONDS
            for process in self._processes:
                _in(process).write(line_of(self.harvest.started))
            readers = (self._read(i, p, on_record) for i, p in enumerate(self._processes))
            await asyncio.gather(*readers)
            self.harvest.ended = time.monotonic()
        finally:
            await self._end()
        return self.harvest

    def stop(self) -> None:
        self._stopping = True
        self.harvest.interrupted = True
        for process in self._processes:
            _in(process).close()

    async def _read(
        self, index: int, process: asyncio.subprocess.Process, on_record: Callable[[Record], None]
    ) -> None:
        harvest = self.harvest
        # A process that was killed may leave a part of a line.
        while (data := await _out(process).readline()).endswith(b"\n"):
            message = messages.decode(data)
            if isinstance(message, Record):
                harvest.records.append(message)
                on_record(message)
                answering = sum(each.answering for each in harvest.progress.values())
                if self._refusals.are_hopeless(message, answering) and not self._stopping:
                    harvest.refused = f"{message.error_class}, {message.detail!r}"
                    self.stop()
            elif isinstance(message, Progress):
                harvest.progress[index] = message
            elif isinstance(message, ClientUsage):
                harvest.loads.append(message)
                return
        # A client that was stopped before its start reports nothing.
        if not (self._stopping and index not in harvest.progress):
            harvest.died.append(f"client process {index} died ({await process.wait()})")

    async def _end(self) -> None:
        """Ends all processes. A process ends when its stdin does; later it is killed."""
        for process in self._processes:
            _in(process).close()
        for process in self._processes:
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _spawn(config: ClientConfig) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton.bench.load.traffic.client_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE,
        env=os.environ | python_path(),
        start_new_session=True,  # Ctrl-C at the terminal reaches only the parent
    )  # fmt: skip
    _in(process).write(line_of(config))
    return process


def _in(process: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    assert process.stdin is not None
    return process.stdin


def _out(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stdout is not None
    return process.stdout
