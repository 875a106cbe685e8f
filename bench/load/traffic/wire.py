"""What parent and client processes say to each other: length-prefixed msgpack over stdin and stdout."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from bench.load.target.record import Record
from bench.load.traffic.client import ClientConfig

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, tag=True):
    at: float  # time.monotonic(), which all processes of a machine share


class Stop(msgspec.Struct, tag=True):
    """End now; requests in flight are `interrupted`."""


class Ready(msgspec.Struct, tag=True):
    pass


class Progress(msgspec.Struct, tag=True):
    sent: int
    in_flight: int


class Finished(msgspec.Struct, tag=True):
    record: Record


class Load(msgspec.Struct, tag=True):
    """How busy a client process was while the run lasted. Seconds.

    `stalls` are the latenesses of the event loop's timer, one every `STALL_PERIOD`; `waited` the time the
    process was ready to run but had no core (Linux only, otherwise 0).
    """

    elapsed: float
    cpu: float
    waited: float
    stalls: list[float]


Command = ClientConfig | Start | Stop
Message = Ready | Progress | Finished | Load

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
