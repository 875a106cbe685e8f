"""The messages between parent and client processes: length-prefixed msgpack over stdin and stdout.

A client process gets its `ClientConfig`, then the time at which to start. When its stdin ends, it ends its
requests. It sends `Progress` when it is ready and every so often, a `Record` for each request that ends, and
`ClientUsage` at last.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec

from baton.bench.load.target.record import Record

_LENGTH = struct.Struct("<I")


class Progress(msgspec.Struct, tag=True):
    sent: int
    in_flight: int


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


messages = msgspec.msgpack.Decoder(Record | Progress | ClientUsage)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """None at the end of the stream."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        return None
