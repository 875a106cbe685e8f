"""Control messages between transfer processes: what a lane carries beside KV. docs/protocol.md lists them.

Every payload is the msgpack of one fixed type: an array of its fields in this order. Its size is bounded
before it is read, and its fields are validated while it is decoded. Nothing else from a lane is decoded.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from baton.kv_transfer.layout import U32, Dtypes, Piece
from baton.kv_transfer.protocol.frame import FrameType, Refusal

MAX_CONTROL_BYTES = 64 << 10
MAX_RANGES = 1024
MAX_TOP = 1024
MAX_CHUNKS = 2048
MAX_SLICES = 1024
MAX_HANDLE_BYTES = 4096
MAX_HANDLES = 64

U8 = Annotated[int, Meta(ge=0, lt=1 << 8)]
Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
U64 = Annotated[int, Meta(ge=0)]  # msgpack has nothing larger
Text = Annotated[str, Meta(max_length=512)]
Handle = Annotated[bytes, Meta(max_length=MAX_HANDLE_BYTES)]
Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]
Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]

# Why a transfer or a prefill ended. These eight travel; `kv_transfer` adds local ones for its callers.
Reason = Literal[
    "finished", "cancelled", "superseded", "gone", "busy", "deadline", "integrity", "unsupported"
]  # fmt: skip


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

    def defect(self, vocabulary: int) -> str:
        """Why an engine with so many tokens cannot take it. Empty: it can. The ids come from a peer, and one
        out of range would crash the engine or the router."""
        largest = max(self.token_id, *self.top_ids, 0)
        if largest < vocabulary:
            return ""
        return f"COMMIT names token {largest}, beyond the vocabulary of {vocabulary}"


Side = Literal["sender", "receiver"]
"""Of a session, as KV flows. The receiver connects. A worker may be both, in different sessions."""


class Identity(Message):
    """The process that speaks, the model that it serves and the frames that it can take."""

    side: Side
    name: Text
    incarnation: U64
    model_fingerprint: Text
    layout_fingerprint: Text
    dtypes: Dtypes
    slot_bytes: U32
    memory: Text = ""  # that peers read, and of which it reads that of peers: see `hello.why_lanes`
    sums: bool = False  # its GPUs sum slices of plain lanes. On both sides: `protocol.frame`


class HelloOpen(Message, tag="open"):
    """First message on a lane, from the side that connected."""

    session_id: Id
    lane: U8
    lanes: U8
    nonce: Nonce
    identity: bytes  # msgpack of Identity, as signed


class HelloOpenEncrypted(HelloOpen, tag="open_encrypted"):
    """The same, for a lane that is encrypted after the handshake. Both nonces are X25519 public keys then."""


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


Hello = HelloOpen | HelloOpenEncrypted | HelloReply | HelloProof | HelloRefused


class Fetch(Message):
    """receiver → sender: send these positions of that prefill, under the transfer id in the header."""

    prefill_id: Id
    attempt: U64  # of decode: a FETCH of a newer attempt ends the transfers of older ones
    ranges: Annotated[tuple[tuple[U32, U32], ...], Meta(max_length=MAX_RANGES)]  # [start, stop), ascending
    next_positions: Annotated[tuple[U32, ...], Meta(max_length=MAX_RANGES)] = ()
    """Where the receiver goes on, ascending: of an array with a window, what is read there. Empty: all."""


class FetchContent(Message):
    """receiver → sender: send the KV of these chunks of 64 tokens, under the transfer id in the header.

    HAVE answers with how many of them, from the first on, the sender has.
    """

    chunks: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    first_chunk: U32  # its position in the prompt, in chunks


class Have(Message):
    """sender → receiver: the sender pins so many chunks of FETCH_CONTENT and streams them."""

    chunks: U32


class Credit(Message):
    """receiver → sender: frames that the session may carry, ever. `recall`: return what is not used yet."""

    total: U63
    recall: bool = False


class CreditReturned(Message):
    """sender → receiver: answers the recall of `total`: `sent` frames left or are leaving, no more will."""

    total: U63
    sent: U63


class Commit(Message):
    """sender → receiver: the first token, and how many frames and bytes the sender sends in all."""

    first_token: FirstToken
    frames: U32
    bytes: U63


class Ack(Message):
    """receiver → sender: injected; the prefill may be released."""


class Abort(Message):
    """receiver → sender: ends the transfer, not the prefill."""

    reason: Reason


class Aborted(Message):
    """sender → receiver: answers ABORT, refuses a FETCH, or announces the sender's own end of a transfer."""

    reason: Reason
    frames: U32  # ever sent under this transfer id


class Export(Message):
    """sender → receiver: memory that the receiver can read, as both said in HELLO. Slices may wait there.

    Behind its slots is a *mark* of each, two u64: its generation, and the checksum of the slice. Behind the
    marks is the token."""

    kind: Text  # "shared_memory" or "cuda_ipc"
    handles: Annotated[tuple[Handle, ...], Meta(min_length=1, max_length=MAX_HANDLES)]  # of each rank
    num_slots: Annotated[int, Meta(gt=0, le=1 << 16)]
    slot_bytes: U32
    token: Id  # a reader that finds it has opened this memory and no other


class Reach(Message):
    """receiver → sender: whether it reads the exported memory from now on, or slices go by lanes."""

    reached: bool
    why: Text


SliceAt = tuple[U32, U63, U32, U32, Piece]
"""Of a `Slice`: slot, sum, sequence number, bytes, and what it is."""


class Slices(Message):
    """sender → receiver: instead of KV frames, slices of the transfer in the header are in these slots."""

    slices: Annotated[tuple[SliceAt, ...], Meta(min_length=1, max_length=MAX_SLICES)]


class Taken(Message):
    """receiver → sender: it has read these slots."""

    slots: Annotated[tuple[U32, ...], Meta(max_length=1 << 16)]


class Ping(Message):
    tick_age_ms: U32  # since the engine last ticked; 0 before its first tick


Control = (
    Fetch | FetchContent | Have | Credit | CreditReturned | Commit | Ack | Abort | Aborted | Ping
    | Export | Reach | Slices | Taken
)  # fmt: skip

# Of each type: what the sender of KV may be sent, and what the receiver may be sent. None: the type is a
# protocol error there. docs/protocol.md has the same table.
MESSAGES: dict[FrameType, tuple[type[Control] | None, type[Control] | None]] = {
    FrameType.FETCH: (Fetch, None),
    FrameType.CREDIT: (Credit, CreditReturned),
    FrameType.COMMIT: (None, Commit),
    FrameType.ACK: (Ack, None),
    FrameType.ABORT: (Abort, None),
    FrameType.ABORTED: (None, Aborted),
    FrameType.PING: (Ping, Ping),
    FrameType.FETCH_CONTENT: (FetchContent, None),
    FrameType.HAVE: (None, Have),
    FrameType.EXPORT: (None, Export),
    FrameType.REACH: (Reach, None),
    FrameType.SLICES: (None, Slices),
    FrameType.TAKEN: (Taken, None),
}
_TYPES = {message: kind for kind, both in MESSAGES.items() for message in both if message}
encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Side, dict[FrameType, Any]] = {
    side: {kind: msgspec.msgpack.Decoder(both[i]).decode for kind, both in MESSAGES.items() if both[i]}
    for i, side in enumerate(get_args(Side))
}
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_identity = msgspec.msgpack.Decoder(Identity).decode
M = TypeVar("M")


class ProtocolError(Refusal):
    """The peer broke the protocol with a control message: its session ends."""


def frame_type(message: Control) -> FrameType:
    return _TYPES[type(message)]


def decode(side: Side, kind: FrameType, payload: memoryview) -> Control:
    """Decodes what came to this side of a session. Raises ProtocolError if it is no valid `kind`."""
    decoder = _decoders[side].get(kind)
    if decoder is None:
        raise ProtocolError("message", f"{kind.name} is never sent to the {side}")
    message = _read(decoder, payload, kind.name)
    if isinstance(message, Fetch):
        _check_ranges(message)
    elif isinstance(message, Commit):
        first = message.first_token
        if len(first.top_ids) != len(first.top_logprobs):
            text = f"COMMIT: {len(first.top_ids)} top ids, {len(first.top_logprobs)} logprobs"
            raise ProtocolError("message", text)
    return message


def decode_hello(payload: memoryview) -> Hello:
    return _read(_decode_hello, payload, "HELLO")


def decode_identity(payload: bytes) -> Identity:
    return _read(_decode_identity, payload, "HELLO identity")


def _read(decoder: Callable[[bytes | memoryview], M], payload: bytes | memoryview, what: str) -> M:
    # For bytes that are no such message; for a str that is not UTF-8 msgspec raises Python's own error.
    try:
        return decoder(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError("message", f"{what}: {e}") from None


def _check_ranges(message: Fetch) -> None:
    previous = 0
    for start, stop in message.ranges:
        if not previous <= start < stop:
            text = f"FETCH: ranges must be ascending, disjoint and not empty: {start}, {stop}"
            raise ProtocolError("message", text)
        previous = stop
    positions = message.next_positions
    if any(later <= earlier for earlier, later in pairwise(positions)):
        raise ProtocolError("message", f"FETCH: next positions must be ascending: {positions}")
