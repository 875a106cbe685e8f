"""A client process: `python -m baton.bench.load.traffic.client_process`, started by `fleet`.

Life: read the configuration from stdin → write Progress → read when to start → write a record for each
request that ends → write ClientUsage → exit. When stdin ends, the process ends its requests and exits.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from baton.bench.load.traffic.client import Client, ClientConfig
from baton.bench.load.traffic.wire import ClientUsage, Progress, frame, read_frame

STALL_PERIOD = 0.01
_PROGRESS_PERIOD = 0.25


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    # The transport buffers without bound: a parent that reads slowly must not delay the load.
    transport, output = await loop.connect_write_pipe(_Output, sys.stdout.buffer)

    told = await read_frame(reader)
    assert told is not None, "the parent died at once"
    config = msgspec.msgpack.decode(told, type=ClientConfig)
    client = Client(config, lambda record: transport.write(frame(record)))
    # A long pause of the garbage collector would count as the server's. So collect often and briefly.
    gc.collect()
    gc.freeze()
    gc.set_threshold(150, 1000, 100)
    transport.write(frame(Progress(0, 0)))
    if (told := await read_frame(reader)) is None:
        return  # stopped before it began, or the parent has died
    start: float = msgspec.msgpack.decode(told, type=float)

    stop = asyncio.Event()
    stalls: list[float] = []
    helpers = [
        asyncio.create_task(_stop_when_told(reader, stop)),
        asyncio.create_task(_watch_stalls(stalls)),
        asyncio.create_task(_tell_progress(client, transport)),
    ]
    began, cpu, waited = time.monotonic(), time.process_time(), _waited()
    await client.run(start, stop)
    load = ClientUsage(
        elapsed=time.monotonic() - began,
        cpu=time.process_time() - cpu,
        waited=_waited() - waited,
        stalls=stalls,
    )
    for helper in helpers:
        helper.cancel()
    transport.write(frame(Progress(client.sent, client.in_flight)))
    transport.write(frame(load))
    transport.write_eof()
    await output.closed.wait()


class _Output(asyncio.Protocol):
    def __init__(self) -> None:
        self.closed = asyncio.Event()

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


async def _tell_progress(client: Client, transport: asyncio.WriteTransport) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_PERIOD)
        transport.write(frame(Progress(client.sent, client.in_flight)))


def _waited() -> float:
    """Seconds for which this process was ready to run and had no core (the scheduler's run delay)."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (FileNotFoundError, IndexError):
        return 0.0


if __name__ == "__main__":
    # The parent handles Ctrl-C and sends Stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(main())
