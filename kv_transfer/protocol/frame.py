"""A frame's 64-byte header and its trailer: packing and parsing. docs/protocol.md has the tables.

The header's own checksum is verified before any field is believed: a damaged length would make all that
follows on the lane unreadable, so a bad header ends the lane. The payload's checksum comes behind it, so that
it is computed while the payload leaves, and the reader verifies it. On an encrypted lane (`encryption`) the
payload is followed by a tag instead. On a *summed* lane a slice is followed by the sum of the sender's GPU,
which the receiver's GPU verifies.
"""

import enum
import hashlib
import hmac
import struct
from typing import NamedTuple

import msgspec
import xxhash

from baton.kv_transfer.layout import WIRE_VERSION, Piece
from baton.kv_transfer.slices import NO_TRANSFER, Slice

MAGIC = b"BtKV"
HEADER_BYTES = 64
MAX_TRAILER_BYTES = 16

_BODY = struct.Struct("<4sBBH16sHHHHIIII12s")  # the 60 bytes that the last field covers
_CHECK = struct.Struct("<I")
_ZEROS = bytes(12)
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
    SLICES = 14
    TAKEN = 15


_TYPES = {int(t): t for t in FrameType}
_OF_TRANSFER = {
    FrameType.FETCH, FrameType.FETCH_CONTENT, FrameType.HAVE, FrameType.COMMIT, FrameType.ACK,
    FrameType.ABORT, FrameType.ABORTED, FrameType.SLICES,
}  # fmt: skip


class Refusal(Exception):
    """What a peer sent is refused. `kind` names the counter."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FrameError(Refusal):
    """The lane can no longer be read."""


class Header(NamedTuple):
    """Of a control message."""

    type: FrameType
    transfer_id: bytes = NO_TRANSFER
    length: int = 0


def pack(frame: Header | Slice) -> bytes:
    """The 64 bytes before the payload of a control message, or of a slice."""
    if isinstance(frame, Slice):
        piece = frame.piece
        body = _BODY.pack(
            MAGIC, WIRE_VERSION, FrameType.KV, 0, frame.transfer_id, piece.layer, piece.array,
            piece.head_start, piece.head_count, piece.token_start, piece.token_count, frame.seq, frame.size,
            _ZEROS,
        )  # fmt: skip
    else:
        of_slice = (0, 0, 0, 0, 0, 0, 0)
        body = _BODY.pack(
            MAGIC, WIRE_VERSION, frame.type, 0, frame.transfer_id, *of_slice, frame.length, _ZEROS
        )
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body) & 0xFFFF_FFFF)


def parse(buffer: bytearray | bytes | memoryview) -> Header | Slice:
    """Parse 64 bytes; FrameError if they are not a header of this version, whole and undamaged. Of a KV frame
    the slice is returned, without a place."""
    view = memoryview(buffer)
    if xxhash.xxh3_64_intdigest(view[: _BODY.size]) & 0xFFFF_FFFF != _CHECK.unpack_from(view, _BODY.size)[0]:
        raise FrameError("header", "header checksum does not match")
    magic, version, number, flags, transfer_id, *of_slice, length, zeros = _BODY.unpack_from(view)
    if magic != MAGIC:
        raise FrameError("magic", f"magic is {magic!r}, not {MAGIC!r}")
    if version != WIRE_VERSION:
        raise FrameError("version", f"the peer speaks wire version {version}, this side {WIRE_VERSION}")
    if number not in _TYPES or flags or zeros != _ZEROS:
        raise FrameError("type", f"unknown frame type {number}, flags {flags:#x} or reserved {zeros.hex()}")
    if number == FrameType.KV:
        layer, array, head_start, head_count, token_start, token_count, seq = of_slice
        piece = Piece(layer, head_start, head_count, token_start, token_count, array)
        return Slice(piece, transfer_id, seq, length)
    if any(of_slice) or (transfer_id != NO_TRANSFER and _TYPES[number] not in _OF_TRANSFER):
        name = _TYPES[number].name
        raise FrameError(
            "type", f"{name} with a field that this type does not use: {transfer_id}, {of_slice}"
        )
    return Header(_TYPES[number], transfer_id, length)


FRAMES_OF_A_KEY = 1 << 20


class DirectionKey(msgspec.Struct, array_like=True):
    """The key of one direction of an encrypted lane, and how many frames have used it."""

    key: bytes
    frames: int = 0

    def next(self) -> tuple[bytes, bytes]:
        """The key and the nonce of the next frame."""
        if self.frames == FRAMES_OF_A_KEY:  # so that no key encrypts too many bytes
            self.key, self.frames = hmac.digest(self.key, b"baton kv next key", hashlib.sha256), 0
        nonce = self.frames.to_bytes(12, "little")
        self.frames += 1
        return self.key, nonce


class LaneKeys(msgspec.Struct, array_like=True):
    """Of one lane, as one of its ends sees it. They move with the lane to another process."""

    outgoing: DirectionKey
    incoming: DirectionKey


class FrameWriter:
    """Protects the frames that leave by a lane, in their order: by checksums, on a lane in plain text."""

    def message(self, header: bytes, payload: bytes) -> bytes:
        """What follows the header of a control message."""
        return payload + _TRAILER.pack(xxhash.xxh3_64_intdigest(payload))

    def trailer(self, header: bytes, payload: memoryview, known: int | None = None) -> bytes:
        """What follows the payload of a KV frame. The payload becomes what is sent, in place. `known`: its
        sum, on a summed lane."""
        return _TRAILER.pack(xxhash.xxh3_64_intdigest(payload) if known is None else known)


def sum_of(trailer: memoryview) -> int:
    """Of the slice before it, on a summed lane."""
    return _TRAILER.unpack(trailer)[0]


class FrameReader:
    """Verifies the frames that come on a lane, in order."""

    trailer_bytes = _TRAILER.size

    def begin(self, header: memoryview, *, summed: bool = False) -> None:
        """`summed`: a slice on a summed lane, which counts as intact here."""
        self._checksum = None if summed else xxhash.xxh3_64()

    def piece(self, piece: memoryview) -> None:
        """The next bytes of the payload are there. They become plain text in place."""
        if self._checksum is not None:
            self._checksum.update(piece)

    def is_intact(self, trailer: memoryview) -> bool:
        """Whether the frame came as it was sent."""
        return self._checksum is None or trailer == _TRAILER.pack(self._checksum.intdigest())
