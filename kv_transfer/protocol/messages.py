"""Control messages between transfer processes: what a lane carries beside KV. docs/protocol.md lists them.

Every payload is the msgpack of one fixed type (an array of its fields in this order), bounded in size before
it is read and validated field by field while it is decoded. Nothing else is ever decoded from the network.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kv_transfer.protocol.frame import FrameType

MAX_CONTROL_BYTES = 64 << 10
MAX_RANGES = 1024
MAX_TOP = 1024

Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
U8 = Annotated[int, Meta(ge=0, lt=1 << 8)]
U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
U64 = Annotated[int, Meta(ge=0)]  # msgpack has nothing larger
Text = Annotated[str, Meta(max_length=512)]
Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]
Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]

# Why a transfer or a prefill ended. These seven travel; `kv_transfer` adds local ones for its callers.
Reason = Literal["finished", "cancelled", "superseded", "gone", "busy", "deadline", "integrity"]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all that is packed as an array of its fields."""


class FirstToken(Message):
    """The token that prefill sampled, with what the client may have asked about it."""

    token_id: U32
    logprob: float | None = None
    top_ids: Annotated[tuple[U32, ...], Meta(max_length=MAX_TOP)] = ()
    top_logprobs: Annotated[tuple[float, ...], Meta(max_length=MAX_TOP)] = ()

    @property
    def logprobs_valid(self) -> bool:
        """No +∞ and no NaN, which compares as false. −∞ is the logprob of a token that a grammar forbids."""
        return all(x is None or x < math.inf for x in (self.logprob, *self.top_logprobs))


class Identity(Message):
    """The process that speaks, the model that it serves and the frames that it can take."""

    role: Literal["prefill", "decode"]
    name: Text
    incarnation: U64
    model_fingerprint: Text
    layout_fingerprint: Text
    slot_bytes: U32


class HelloOpen(Message, tag="open"):
    """First message on a lane, from the side that connected."""

    session_id: Id
    lane: U8
    lanes: U8
    nonce: Nonce
    identity: bytes  # msgpack of Identity, as signed


class HelloReply(Message, tag="reply"):
    nonce: Nonce
    identity: bytes
    mac: Mac


class HelloProof(Message, tag="proof"):
    mac: Mac


class HelloRefused(Message, tag="refused"):
    """Says why before closing, so that both sides can log it. It proves nothing."""

    reason: Text
    detail: Text


Hello = HelloOpen | HelloReply | HelloProof | HelloRefused


class Fetch(Message):
    """decode → prefill: send these positions of that prefill, under the transfer id in the header."""

    prefill_id: Id
    ranges: Annotated[tuple[tuple[U32, U32], ...], Meta(max_length=MAX_RANGES)]  # [start, stop), ascending
    receiver_rank: U8
    head_start: U16  # the KV heads that this receiver rank holds
    head_count: U16


class Credit(Message):
    """decode → prefill: frames that the session may carry, ever. `recall`: return what is not used yet."""

    total: U63
    recall: bool = False


class CreditReturned(Message):
    """prefill → decode: answers the recall of `total`: `sent` frames left or are leaving, no more will."""

    total: U63
    sent: U63


class Commit(Message):
    """prefill → decode: the transfer is this many frames and bytes from this sender rank; the first token."""

    first_token: FirstToken
    frames: U32
    bytes: U63


class Ack(Message):
    """decode → prefill: injected; the prefill may be released."""


class Abort(Message):
    """decode → prefill: ends the transfer, not the prefill."""

    reason: Reason


class Aborted(Message):
    """prefill → decode: answers ABORT, refuses a FETCH, or announces the sender's own end of a transfer."""

    reason: Reason
    frames: U32  # ever sent under this transfer id


class Ping(Message):
    incarnation: U64
    tick_age_ms: U32  # since the engine last ticked; 0 before its first tick


Control = Fetch | Credit | CreditReturned | Commit | Ack | Abort | Aborted | Ping

_TYPES: dict[type[Message], FrameType] = {
    Fetch: FrameType.FETCH,
    Credit: FrameType.CREDIT,
    CreditReturned: FrameType.CREDIT,
    Commit: FrameType.COMMIT,
    Ack: FrameType.ACK,
    Abort: FrameType.ABORT,
    Aborted: FrameType.ABORTED,
    Ping: FrameType.PING,
}
# What each role may be sent. A type that is not here is a protocol error.
_TO_PREFILL = (Fetch, Credit, Ack, Abort, Ping)
_TO_DECODE = (CreditReturned, Commit, Aborted, Ping)
_encode = msgspec.msgpack.Encoder().encode
_decoders = {
    "prefill": {_TYPES[t]: msgspec.msgpack.Decoder(t).decode for t in _TO_PREFILL},
    "decode": {_TYPES[t]: msgspec.msgpack.Decoder(t).decode for t in _TO_DECODE},
}
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_identity = msgspec.msgpack.Decoder(Identity).decode


# What msgspec raises for bytes that are no such message; for a str that is not UTF-8 it is its own error.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MessageError(Exception):
    """The peer sent a control message that breaks the protocol: its session ends."""


def encode(message: Message) -> bytes:
    return _encode(message)


def frame_type(message: Control) -> FrameType:
    return _TYPES[type(message)]


def decode(role: Literal["prefill", "decode"], kind: FrameType, payload: memoryview) -> Control:
    """Decode what came to a process of `role`; MessageError for anything but one valid message of `kind`."""
    decoder = _decoders[role].get(kind)
    if decoder is None:
        raise MessageError(f"{kind.name} is never sent to a {role} worker")
    try:
        message = decoder(payload)
    except _UNREADABLE as e:
        raise MessageError(f"{kind.name}: {e}") from None
    if isinstance(message, Fetch):
        _check_fetch(message)
    elif isinstance(message, Commit):
        first = message.first_token
        if len(first.top_ids) != len(first.top_logprobs):
            raise MessageError(f"COMMIT: {len(first.top_ids)} top ids, {len(first.top_logprobs)} logprobs")
    return message


def decode_hello(payload: memoryview) -> Hello:
    try:
        return _decode_hello(payload)
    except _UNREADABLE as e:
        raise MessageError(f"HELLO: {e}") from None


def decode_identity(payload: bytes) -> Identity:
    try:
        return _decode_identity(payload)
    except _UNREADABLE as e:
        raise MessageError(f"HELLO identity: {e}") from None


def _check_fetch(message: Fetch) -> None:
    previous = 0
    for start, stop in message.ranges:
        if not previous <= start < stop:
            raise MessageError(f"FETCH: ranges must be ascending, disjoint and not empty: {start}, {stop}")
        previous = stop
    if message.head_count == 0:
        raise MessageError("FETCH: no heads asked for")
