"""A client process: `python -m baton.bench.load.traffic.client_process`, started by `fleet`.

Messages are lines of JSON over stdin and stdout. Life: read the `ClientConfig` → write `Progress` →
read when to start → write a `Record` for each request that ends, and `Progress` every so often → write
`ClientUsage` → exit. When stdin ends, the process ends its requests and exits.
"""

import asyncio
import gc
import os
import signal
import sys
import time
from typing import Any, cast

import msgspec
import uvloop

from baton.bench.load.target.answer import Record
from baton.bench.load.traffic.client import Client, ClientConfig
from baton.processes.liveness import waited_for_cpu

STALL_PERIOD = 0.01
_PROGRESS_PERIOD = 0.25


class Progress(msgspec.Struct, tag=True):
    """Requests under way, and how many of them have had a token."""

    in_flight: int
    answering: int = 0


class ClientUsage(msgspec.Struct, tag=True):
    """How busy a client process was during the run, in seconds.

    Attributes:
        waited: the process was ready to run and had no core (Linux only, otherwise 0).
        stalls: how late a timer of the event loop was, every `STALL_PERIOD`.
    """

    elapsed: float
    cpu: float
    waited: float
    stalls: list[float]


MAX_LINE = 1 << 30  # bytes: a configuration holds all sessions of a trace
messages = msgspec.json.Decoder(Record | Progress | ClientUsage)
_encoder = msgspec.json.Encoder()


def line_of(message: Any) -> bytes:
    return _encoder.encode(message) + b"\n"


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    # The transport buffers without bound: a parent that reads slowly must not delay the load.
    transport, output = await loop.connect_write_pipe(_Output, sys.stdout.buffer)

    config = msgspec.json.decode(await reader.readline(), type=ClientConfig)
    client = Client(config, output.tell)
    # A long pause of the garbage collector would count as the server's. So collect often and briefly.
    gc.collect()
    gc.freeze()
    gc.set_threshold(150, 1000, 100)
    output.tell(Progress(0))
    if not (line := await reader.readline()):
        return  # stopped before it began, or the parent has died
    start = msgspec.json.decode(line, type=float)

    stop = asyncio.Event()
    stalls: list[float] = []
    helpers = [
        asyncio.create_task(_stop_when_told(reader, stop)),
        asyncio.create_task(_watch_stalls(stalls)),
        asyncio.create_task(_tell_progress(client, output)),
    ]
    began, cpu, waited = time.monotonic(), time.process_time(), waited_for_cpu(os.getpid())
    await client.run(start, stop)
    load = ClientUsage(
        elapsed=time.monotonic() - began,
        cpu=time.process_time() - cpu,
        waited=waited_for_cpu(os.getpid()) - waited,
        stalls=stalls,
    )
    for helper in helpers:
        helper.cancel()
    output.tell(Progress(client.in_flight, client.answering))
    output.tell(load)
    transport.close()  # when all of it is written
    await output.closed.wait()


class _Output(asyncio.Protocol):
    """What the parent reads. If it has died, nothing is written any more."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def tell(self, message: Record | Progress | ClientUsage) -> None:
        if not self._transport.is_closing():
            self._transport.write(line_of(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


async def _stop_when_told(reader: asyncio.StreamReader, stop: asyncio.Event) -> None:
    await reader.read()  # nothing comes until the end
    stop.set()


async def _watch_stalls(stalls: list[float]) -> None:
    while True:
        due = time.monotonic() + STALL_PERIOD
        await asyncio.sleep(STALL_PERIOD)
        stalls.append(max(0.0, time.monotonic() - due))


async def _tell_progress(client: Client, output: _Output) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_PERIOD)
        output.tell(Progress(client.in_flight, client.answering))


if __name__ == "__main__":
    # The parent handles Ctrl-C and sends Stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(main())
