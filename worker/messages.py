"""The typed messages between a service process and its engine process (msgpack over the local socket).

What routers say, and what they are told, goes as the bytes of proto/worker.proto (`FromRouter`, `ToRouter`).
The others embed messages of that file, and types of `engine` and `kv_transfer`. A *stream* is the number
that the service process gives to one attached router. Numbers are never used again, so a late message for a
detached router reaches no other router. An attempt id is a prefill id or a decode id.
"""

from typing import Any

import msgspec
from google.protobuf.message import Message
from msgspec import Struct

from baton.engine import EngineStats
from baton.kv_names import Tier
from baton.kv_transfer import InjectStats, KVLayout
from baton.rpc import worker_pb2 as pb
from baton.vision.images import ImageSettings
from baton.worker.stats import RequestCounts, StoreStats


class _Message(Struct, tag=True, array_like=True):
    pass


class Answer(_Message):
    """Of the engine, to a question of the service."""

    question: int


class Origin(_Message, tag=False):
    """How logs and traces name an attempt. The service process makes it, and gets it back in reports."""

    attempt_id: bytes
    name: str  # of the request
    traceparent: str  # of the attempt; empty if the attempt is not traced
    accepted_at: float  # time.monotonic(), which all processes of a host share
    resumed: bool = False
    """An engine process that has ended had it, too, and no token came. Routers are told that nothing of its
    prompt was cached, since that may be its own."""


# ---------------------------------------------------------------- service to engine


class FromRouter(_Message):
    """A message of a router. The service process has checked it."""

    stream: int
    data: bytes  # of a `RouterMessage` of proto/worker.proto
    origin: Origin | None = None  # of what it submits. None: it submits nothing
    pixels: list[bytes] = []  # of each image of that; empty bytes: they did not come


class Detached(_Message):
    """The stream of a router has ended, and with it all that was submitted on it."""

    stream: int


class AskStatus(_Message):
    question: int  # the EngineStatus that answers repeats it


class StageWeights(_Message):
    """Read and check other weights. WeightsStaged answers."""

    question: int
    path: str


class LoadAdapter(_Message):
    """Load an adapter (LoRA), so that requests can name it. AdapterLoaded answers."""

    question: int
    adapter: pb.Adapter  # without its fingerprint


class UnloadAdapter(_Message):
    """No request will name this adapter any more. Those that do go on."""

    fingerprint: bytes


class HandBack(_Message):
    """Fail every attempt with DRAINING, and end it."""

    reason: str
    but_decodes: bool = False  # those that decode stay


class ReplaceWeights(_Message):
    """Compute with the weights that are staged. The engine is idle, or has `only_decodes`. WeightsReplaced
    answers."""

    question: int
    version: str


class DropWeights(_Message):
    """The weights that are staged, if any, are not wanted."""


class Pause(_Message):
    """Launch no step from now on, or go on. Paused answers."""

    question: int
    frozen: bool
    abort: str  # why all attempts end with ABORTED first; empty: they stay


class SetMemory(_Message):
    """Give memory back to the device, or take it again. The engine is frozen. MemorySet answers."""

    question: int
    release: bool
    tags: list[str]  # of MEMORY_TAGS


class TakeOver(_Message):
    """The engine process before this one has ended: map the memory of KV, and go on. EngineReady answers."""


class Stop(_Message):
    """Fail every attempt with DRAINING, then answer with Stopped."""


class Exit(_Message):
    """Free everything and exit with 0. Sent after Stopped, when the transfer process has closed its lanes."""


OfWeights = StageWeights | ReplaceWeights | DropWeights
ToEngine = (
    FromRouter
    | Detached
    | AskStatus
    | OfWeights
    | LoadAdapter
    | UnloadAdapter
    | HandBack
    | Pause
    | SetMemory
    | TakeOver
    | Stop
    | Exit
)

# ---------------------------------------------------------------- engine to service


class Progress(_Message):
    stage: str
    fraction: float


class StandsBy(_Message):
    """The engine has all but the memory of KV. It leaves that alone until TakeOver."""


class StartFailed(_Message):
    """The user's configuration is wrong (model, device, sizes). The engine process then exits.

    `message` is for the user.
    """

    message: str
    alone: bool = False  # of a standby: the same process can start when no other one is there


class EngineReady(_Message):
    """What the loaded engine is, for the start of the transfer process and for Describe."""

    description: pb.WorkerDescription  # what the engine alone knows
    layout: KVLayout
    images: ImageSettings | None = None  # None: the model takes none
    image_layout: KVLayout | None = None  # of embeddings from encoders. None: it fetches none
    sums: bool = False  # as in `TransferConfig`


class ToRouter(_Message):
    """A message to routers. The service process does not read it, unless the engine may be replaced."""

    stream: int | None  # None: to all
    data: bytes  # of a `WorkerMessage` of proto/worker.proto


class EngineStatus(Answer):
    """Load, pools and counts of the engine, read between two steps."""

    stats: EngineStats
    counts: RequestCounts
    told: pb.WorkerStatus  # fields that only this process knows, and that no other field here has
    store: StoreStats | None = None  # None: there is none
    only_decodes: bool = False  # no step is under way, and it is idle but for attempts that decode
    waiting_of_streams: dict[int, int] = {}  # prompt tokens not yet computed, by the stream of their router


class WeightsStaged(Answer):
    nbytes: int
    error: str  # for the user; empty: they fit
    fingerprint: str = ""  # of the model with these weights, without a version


class WeightsReplaced(Answer):
    model_fingerprint: str
    content_root: bytes


class AdapterLoaded(Answer):
    fingerprint: bytes
    error: str  # for the user; empty: it is loaded


class Paused(Answer):
    computing: bool  # a step is under way
    error: str  # for the user, why the engine cannot pause; empty: it does


class MemorySet(Answer):
    released: list[str]  # what has no memory now
    lost_weights: bool  # as in proto/worker.proto
    busy: bool  # a request or a copy still uses it: nothing was done
    error: str  # for the user; empty: it is done


class CacheChanged(_Message):
    """Chunks that entered a tier of the prefix cache, or left all. One message per step, before the tokens of
    the step."""

    tiers: dict[int, Tier | None]  # chunk → its fastest tier now; None: it is not cached
    stored: dict[int, bool] = {}  # chunk → whether the shared store has it now, as far as known


class CacheEvents(_Message):
    """Changes of the prefix cache for routers of others, if the worker publishes them."""

    batch: bytes  # in vLLM's format (`engine_process.kv_events`)


class Stopped(_Message):
    """Answers Stop. It is the engine's last message; the engine then waits for Exit."""


class OfAttempt(_Message):
    """What metrics, logs and traces say of an attempt. Times are time.monotonic()."""

    origin: Origin


class KVInjected(OfAttempt):
    """The KV of a request is complete in the decode engine's blocks."""

    stats: InjectStats


class Prefilled(OfAttempt):
    """A prefill has sampled its token."""

    queued_at: float  # when the engine got it
    began_at: float  # start of the first step that computed a part of the prompt
    token_at: float
    prompt_tokens: int
    cached_tokens: int
    images_asked_at: float = 0.0  # when its first image was asked for; 0: none was
    images_encoded_at: float = 0.0  # when the last one was encoded


class SecondToken(OfAttempt):
    """A decode has sampled its first token, which follows that of the prefill."""

    handover: float  # seconds between the two


class Decoded(OfAttempt):
    """A request ended with its last token."""

    joined_at: float  # when the request joined the batch
    ended_at: float
    output_tokens: int  # tokens that this worker sampled


class Encoded(OfAttempt):
    """Workers can fetch the embeddings of an image."""

    began_at: float
    ended_at: float
    tokens: int


class Failed(OfAttempt):
    """Its router was told why."""

    code: int  # a `FailureCode` of proto/worker.proto
    message: str


class Cancelled(OfAttempt):
    """The router of an attempt cancelled it, or ended its stream."""


Report = KVInjected | Prefilled | SecondToken | Decoded | Encoded | Failed | Cancelled
FromEngine = (
    Progress
    | StandsBy
    | StartFailed
    | EngineReady
    | EngineStatus
    | WeightsStaged
    | WeightsReplaced
    | AdapterLoaded
    | Paused
    | MemorySet
    | ToRouter
    | CacheChanged
    | CacheEvents
    | Report
    | Stopped
)


def _bytes_of(message: Message) -> bytes:
    return message.SerializeToString()


def _message_of(kind: type[Message], data: Any) -> Message:
    return kind.FromString(data)


encode = msgspec.msgpack.Encoder(enc_hook=_bytes_of).encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=_message_of).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_message_of).decode
