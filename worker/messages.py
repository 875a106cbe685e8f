"""The typed messages between a service process and its engine process (msgpack over the local socket).

They embed the types of `engine` and `kv_transfer`, which msgspec encodes as they are.

A *stream* is the service's number for one attached router: it never comes back, so what is late for a router
that went away reaches nobody. Attempt ids are a prefill id or a decode id.
"""

from dataclasses import dataclass
from enum import IntEnum

import msgspec
from msgspec import Struct

from engine import EngineRequest, EngineStats, Output
from kv_transfer import InjectStats, KVLayout


class Code(IntEnum):
    """Why an attempt ended without a finish; the numbers are those of `FailureCode` in proto/worker.proto."""

    NO_ROOM = 1
    KV_FAILED = 2
    HANDED_BACK = 3
    DRAINING = 4
    DROPPED = 5
    INVALID = 6
    ENGINE = 7
    FINISHED = 8


class _Message(Struct, tag=True, array_like=True):
    pass


class Work(_Message, tag=False):
    """A request as a router sent it. The service process has checked it (`worker.validation`)."""

    request: EngineRequest  # its id is the attempt's
    timeout: float  # seconds that remain of the request's deadline
    name: str  # what logs call the request
    traceparent: str  # of the attempt; empty: it is not traced


class Source(_Message, tag=False):
    """Where the KV of a request comes from."""

    prefill_id: bytes
    kv_address: str
    incarnation: int


# ---------------------------------------------------------------- service to engine


class Prefill(_Message):
    stream: int
    work: Work
    handover: bool


class Decode(_Message):
    stream: int
    work: Work
    source: Source | None  # None: prefill it here


class Retarget(_Message):
    stream: int
    decode_id: bytes
    source: Source
    output_ids: list[int]


class Cancel(_Message):
    stream: int
    attempt_id: bytes


class CancelStream(_Message):
    """The router's stream ended: cancel all that was submitted on it."""

    stream: int


class AskStatus(_Message):
    question: int  # comes back in the answer


class Stop(_Message):
    """Give up what is left: each attempt fails as DRAINING. Answered by Stopped."""


class Exit(_Message):
    """After Stopped, once the transfer process has closed its lanes: release everything, exit with 0."""


ToEngine = Prefill | Decode | Retarget | Cancel | CancelStream | AskStatus | Stop | Exit

# ---------------------------------------------------------------- engine to service


class Progress(_Message):
    stage: str
    fraction: float


class StartFailed(_Message):
    """The user's mistake (model, device, sizes), in words for the user. The engine process then exits."""

    message: str


class EngineReady(_Message):
    """What the engine turned out to be; the service needs it for Describe and to start the transfer
    process."""

    model_fingerprint: str
    layout: KVLayout
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocabulary_fingerprint: str  # empty: the model comes without a tokenizer
    sliding_window: int  # that ends the context at max_model_len; 0: none does


class Tokens(_Message):
    """All tokens of one engine step that belong to one router."""

    stream: int
    tokens: list[Output]


class Reserved(_Message):
    stream: int
    decode_id: bytes


class Failed(_Message):
    stream: int
    attempt_id: bytes
    code: Code
    message: str
    prefill_id: bytes = b""  # with KV_FAILED: whose KV did not come


@dataclass(slots=True)
class RequestCounts:
    """Counts since the start of an engine process."""

    prompt_tokens: int = 0
    """Prefilled here."""
    generation_tokens: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    no_room: int = 0
    """Reservations refused."""

    def count(self, output: Output) -> None:
        self.generation_tokens += 1
        self.finished_stop += output.finish_reason == "stop"
        self.finished_length += output.finish_reason == "length"


class EngineStatus(_Message):
    """Load, pools and counts of the engine, read between two steps."""

    question: int
    stats: EngineStats
    counts: RequestCounts
    idle: bool  # no request in any phase, and the lanes read or write no block: a drain may end


class CacheChanged(_Message):
    """Chunks that entered and left the prefix cache: one message for a step, before its tokens."""

    added: list[int]
    evicted: list[int]


class Stopped(_Message):
    """Answers Stop. The engine's last message: from here on it only waits for Exit."""


class Injected(_Message):
    """One transfer, as the decode engine saw it."""

    decode_id: bytes
    stats: InjectStats


class Prefilled(_Message):
    """A prefill has its token. Times are time.monotonic(), which all processes of a host share."""

    attempt_id: bytes
    accepted_at: float
    began_at: float  # the first step that computed some of it
    token_at: float
    prompt_tokens: int
    cached_tokens: int


class Decoded(_Message):
    """A request ended with its last token; times as in Prefilled."""

    decode_id: bytes
    joined_at: float  # the batch
    ended_at: float
    output_tokens: int  # sampled here


class SecondToken(_Message):
    """The gap between prefill's first token and decode's second, in seconds."""

    handover: float


FromEngine = (
    Progress
    | StartFailed
    | EngineReady
    | Tokens
    | Reserved
    | Failed
    | EngineStatus
    | Injected
    | Prefilled
    | Decoded
    | SecondToken
    | CacheChanged
    | Stopped
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
