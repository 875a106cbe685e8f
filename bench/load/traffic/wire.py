"""The messages between parent and client processes: length-prefixed msgpack over stdin and stdout."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from baton.bench.load.target.record import Record
from baton.bench.load.traffic.client import ClientConfig

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, tag=True):
    at: float  # time.monotonic(), which all processes of a machine share


class Stop(msgspec.Struct, tag=True):
    """End now. Requests in flight get the failure `interrupted`."""


class Ready(msgspec.Struct, tag=True):
    pass


class Progress(msgspec.Struct, tag=True):
    sent: int
    in_flight: int


class Finished(msgspec.Struct, tag=True):
    record: Record


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


Command = ClientConfig | Start | Stop
Message = Ready | Progress | Finished | ClientUsage

commands = msgspec.msgpack.Decoder(Command)
messages = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Command | Message) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """None at the end of the stream."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        return None
