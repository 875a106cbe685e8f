"""A frame's 64-byte header and its trailer: packing and parsing. docs/protocol.md has the tables.

The header's own checksum is verified before any field is believed: a damaged length would make all that
follows on the lane unreadable, so a bad header ends the lane. The payload's checksum comes behind it, so that
it is computed while the payload leaves, and the reader verifies it. On an encrypted lane (`encryption`) the
payload is followed by a tag instead.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple, Protocol

import xxhash

from baton.kv_transfer.layout import WIRE_VERSION

MAGIC = b"BtKV"
HEADER_BYTES = 64
MAX_TRAILER_BYTES = 16
NO_TRANSFER = bytes(16)
KIND_KV = 0
KIND_STATE = 1  # of layers with states

_BODY = struct.Struct("<4sBBH16sHHHHIIIIBBB9s")  # the 60 bytes that the last field covers
_CHECK = struct.Struct("<I")
_ZEROS = bytes(9)
assert _BODY.size + _CHECK.size == HEADER_BYTES
_TRAILER = struct.Struct("<Q")


class FrameType(enum.IntEnum):
    HELLO = 1
    FETCH = 2
    CREDIT = 3
    KV = 4
    COMMIT = 5
    ACK = 6
    ABORT = 7
    ABORTED = 8
    PING = 9
    FETCH_CONTENT = 10
    HAVE = 11
    EXPORT = 12
    REACH = 13
    SLICE = 14
    TAKEN = 15
    STATE_SLICE = 16
    SLICES = 17


_TYPES = {int(t): t for t in FrameType}
_OF_TRANSFER = {
    FrameType.FETCH, FrameType.FETCH_CONTENT, FrameType.HAVE, FrameType.COMMIT, FrameType.ACK,
    FrameType.ABORT, FrameType.ABORTED, FrameType.SLICE, FrameType.STATE_SLICE,
    FrameType.SLICES,
}  # fmt: skip


class FrameError(Exception):
    """The lane can no longer be read. `kind` names the counter."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Header(NamedTuple):
    type: FrameType
    transfer_id: bytes = NO_TRANSFER
    layer: int = 0
    kind: int = KIND_KV
    head_start: int = 0
    head_count: int = 0
    token_start: int = 0
    token_count: int = 0
    seq: int = 0
    length: int = 0
    sender_rank: int = 0
    receiver_rank: int = 0
    state_type: int = 0  # of kind state: index into `KVLayout.states`

    @property
    def state(self) -> int | None:
        """As in `layout.Slice`."""
        return self.state_type if self.kind == KIND_STATE else None


def kind_of(state: int | None) -> tuple[int, int]:
    """Kind and state type of a frame with this `Header.state`."""
    return (KIND_KV, 0) if state is None else (KIND_STATE, state)


def pack(h: Header) -> bytes:
    body = _BODY.pack(
        MAGIC, WIRE_VERSION, h.type, 0, h.transfer_id, h.layer, h.kind, h.head_start, h.head_count,
        h.token_start, h.token_count, h.seq, h.length, h.sender_rank, h.receiver_rank,
        h.state_type, _ZEROS,
    )  # fmt: skip
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body) & 0xFFFF_FFFF)


def parse(buffer: bytearray | bytes | memoryview) -> Header:
    """Parse 64 bytes; FrameError if they are not a header of this version, whole and undamaged."""
    view = memoryview(buffer)
    if xxhash.xxh3_64_intdigest(view[: _BODY.size]) & 0xFFFF_FFFF != _CHECK.unpack_from(view, _BODY.size)[0]:
        raise FrameError("header", "header checksum does not match")
    magic, version, kind, flags, *fields, zeros = _BODY.unpack_from(view)
    if magic != MAGIC:
        raise FrameError("magic", f"magic is {magic!r}, not {MAGIC!r}")
    if version != WIRE_VERSION:
        raise FrameError("version", f"wire version {version}, here {WIRE_VERSION}")
    if kind not in _TYPES or flags or zeros != _ZEROS:
        raise FrameError("type", f"unknown frame type {kind}, flags {flags:#x} or reserved {zeros.hex()}")
    header = Header(_TYPES[kind], *fields)
    if kind != FrameType.KV:
        transfer_id, *of_kv, _, sender_rank, receiver_rank, state_type = fields
        is_plain = of_kv == _NO_SLICE and (transfer_id == NO_TRANSFER or header.type in _OF_TRANSFER)
        if not is_plain or receiver_rank or state_type or (sender_rank and kind != FrameType.COMMIT):
            raise FrameError("type", f"{header.type.name} with a field that this type does not use: {header}")
    return header


_NO_SLICE = list(Header(FrameType.PING)[2:9])  # from layer to sequence number


class FrameWriter(Protocol):
    """Protects the frames that leave by a lane, in the order in which they leave."""

    def message(self, header: bytes, payload: bytes) -> bytes:
        """What follows the header of a control message."""
        ...

    def begin(self, header: bytes) -> None:
        """A KV frame is next."""
        ...

    def piece(self, piece: memoryview) -> memoryview:
        """What to send for the next bytes of its payload: for as many of `piece` as the result has."""
        ...

    def end(self) -> bytes:
        """The trailer of the frame."""
        ...


class FrameReader(Protocol):
    """Verifies the frames that come on a lane, in order."""

    trailer_bytes: int

    def begin(self, header: memoryview) -> None: ...

    def piece(self, piece: memoryview) -> None:
        """The next bytes of the payload are there. They become plain text in place."""
        ...

    def whole(self, trailer: memoryview) -> bool:
        """Whether the frame came as it was sent."""
        ...


class ChecksumWriter:
    """Implements FrameWriter for a lane in plain text."""

    def message(self, header: bytes, payload: bytes) -> bytes:
        return payload + _trailer(xxhash.xxh3_64(payload))

    def begin(self, header: bytes) -> None:
        self._checksum = xxhash.xxh3_64()

    def piece(self, piece: memoryview) -> memoryview:
        self._checksum.update(piece)
        return piece

    def end(self) -> bytes:
        return _trailer(self._checksum)


class ChecksumReader:
    """Implements FrameReader for a lane in plain text."""

    trailer_bytes = _TRAILER.size

    def begin(self, header: memoryview) -> None:
        self._checksum = xxhash.xxh3_64()

    def piece(self, piece: memoryview) -> None:
        self._checksum.update(piece)

    def whole(self, trailer: memoryview) -> bool:
        return trailer == _trailer(self._checksum)


def _trailer(checksum: xxhash.xxh3_64) -> bytes:
    """What follows a payload that `checksum` has seen, from its first byte to its last."""
    return _TRAILER.pack(checksum.intdigest())
