"""The typed messages between a service process and its engine process (msgpack over the local socket).

A *stream* is the service's number for one attached router: it never comes back, so what is late for a router
that went away reaches nobody. Attempt ids are a prefill id or a decode id.
"""

from enum import IntEnum
from typing import Literal

import msgspec
from msgspec import Struct

from kv_transfer import InjectStats


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


class StructuredOutput(_Message, tag=False):
    """Field for field `engine.StructuredOutput`."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str


class Sampling(_Message, tag=False):
    """Field for field `engine.SamplingParams`, whose `__post_init__` checks the values in the engine
    process."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logit_bias: dict[int, float]
    logprobs: int | None
    structured_output: StructuredOutput | None = None


class Work(_Message, tag=False):
    """A request as a router sent it: ids in the vocabulary and a length that fits are checked already."""

    prompt_ids: list[int]
    output_ids: list[int]
    sampling: Sampling
    timeout: float  # seconds that remain of the request's deadline
    priority: int
    alone: bool  # in steps of its own, until it has a token
    retried: bool  # before those of its priority that are not
    cache_salt: bytes  # keeps prefixes of different tenants apart
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
    prefill_id: bytes
    work: Work
    handover: bool


class Decode(_Message):
    stream: int
    decode_id: bytes
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
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocabulary_fingerprint: str  # empty: the model comes without a tokenizer
    sliding_window: int  # that ends the context at max_model_len; 0: none does


class Logprobs(_Message, tag=False):
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Token(_Message, tag=False):
    attempt_id: bytes
    output_index: int
    token_id: int
    finish_reason: str  # "", "stop" or "length"
    cached_tokens: int
    logprobs: Logprobs | None


class Tokens(_Message):
    """All tokens of one engine step that belong to one router."""

    stream: int
    tokens: list[Token]


class Reserved(_Message):
    stream: int
    decode_id: bytes


class Failed(_Message):
    stream: int
    attempt_id: bytes
    code: Code
    message: str
    prefill_id: bytes = b""  # with KV_FAILED: whose KV did not come


class EngineStatus(_Message):
    """Load, pools and counters of the engine, read between two steps. Counters count since its start."""

    question: int
    running: int
    waiting: int
    tokens_waiting: int
    blocks_free: int
    blocks_total: int
    blocks_cached: int
    held: int
    reservations: int
    prefill_tokens_per_s: float
    step_seconds: float
    chunk_tokens: int
    chunk_seconds: float
    idle: bool  # nothing runs, waits, is held, reserved or still being read by the lanes: a drain may end
    prompt_tokens: int
    generation_tokens: int
    finished_stop: int
    finished_length: int
    no_room: int  # reservations refused
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int


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
