"""What the router knows of one worker, its open attempts there, and the messages to it.

    connecting ─ Attach, description, accept ─▶ ready ⇄ draining ─ the stream ends ─▶ connecting
        └─ the worker does not fit this router ─▶ refused ─ later ─▶ connecting

`stream` opens the stream and receives. All open attempts are lost with the stream, and the worker cancels
them too. A worker that discovery no longer lists is retired: it gets nothing new, and its stream closes after
its last attempt.

A status may name another pool. From then on the worker gets the new work of that pool, over the same stream.
The attempts that it has go on to their end: pools only decide which worker is chosen.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import grpc.aio

from baton.router.errors import ApiError
from baton.router.policy.desk import Desk
from baton.router.policy.fleet import Seen
from baton.router.policy.plan import Plan
from baton.router.policy.prefill_loads import PrefillWork
from baton.router.workers.breaker import CircuitBreaker
from baton.router.workers.checks import clear_invalid_rates, step_model
from baton.rpc import worker_pb2 as pb
from baton.rpc.stubs import WorkerStub
from baton.system.logs import of_request
from baton.system.tracing import Span
from baton.vision.images import Image

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_TIMEOUT = 5.0
STATUS_TIMEOUT = 2.0
MAX_UNSENT_BYTES, UNREAD_SECONDS = 8 << 20, 5.0
MOST_UNSENT_BYTES = 256 << 20
"""128 choices with the longest schema are 64 MiB."""
MOST_UNSENT_PIXELS = 1 << 30
"""Bytes. The images of a request are 48 MiB."""
MOST_PHASES = 64
"""Of one request and worker that are shown."""
OF_WEIGHTS = "weights", "model_fingerprint", "content_root"
CHANGING = *OF_WEIGHTS, "adapters", "adapters_revision"
"""What a worker may describe again while it is attached."""
POOL_NAMES: dict["pb.Pool", str] = {pb.POOL_PREFILL: "prefill", pb.POOL_DECODE: "decode"}


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"  # finishes its attempts and takes no new ones
    REFUSED = "refused"  # another model, or an invalid description


PIXELS_SENT = 256 << 10
"""Bytes of pixels in one message. For larger pieces malloc would map memory anew each time (`server`): a MiB
at a time, half of the time of 6 MB was that of new pages."""
Unsent = pb.RouterMessage | memoryview
"""A message, or a part of pixels that becomes one."""


class SendQueue:
    """The messages to one worker that its stream has not sent yet, in order. The stream reads `messages`.

    `on_full` is called if the worker does not read: more than MAX_UNSENT_BYTES wait, and the stream takes no
    message for UNREAD_SECONDS. The choices of one request may be more, and come before it can take any. It is
    called at once if more than MOST_UNSENT_BYTES wait, without pixels, or more than MOST_UNSENT_PIXELS.
    """

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._queue: asyncio.Queue[tuple[Unsent, int] | None] = asyncio.Queue()
        self._bytes = self._pixel_bytes = 0
        self._on_full = on_full
        self._timer: asyncio.TimerHandle | None = None  # while more than MAX_UNSENT_BYTES wait

    def put(self, message: pb.RouterMessage) -> None:
        self._put(message, message.ByteSize())  # once: it encodes the message

    def put_pixels(self, pixels: bytes | memoryview) -> None:
        """Each part is copied into a message when the stream takes it: 48 MiB at once would block the loop.
        `pixels` must not change."""
        all_pixels = memoryview(pixels)
        for begin in range(0, len(all_pixels), PIXELS_SENT):
            part = all_pixels[begin : begin + PIXELS_SENT]
            self._put(part, len(part))

    def _put(self, unsent: Unsent, size: int) -> None:
        self._queue.put_nowait((unsent, size))
        self._count(unsent, size)
        if self._timer is None:
            self._set_timer()
        if self._bytes > MOST_UNSENT_BYTES or self._pixel_bytes > MOST_UNSENT_PIXELS:
            self._on_full()

    def _count(self, unsent: Unsent, size: int) -> None:
        if isinstance(unsent, memoryview):
            self._pixel_bytes += size
        else:
            self._bytes += size

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._bytes + self._pixel_bytes > MAX_UNSENT_BYTES:
            self._timer = asyncio.get_running_loop().call_later(UNREAD_SECONDS, self._on_full)

    def close(self) -> None:
        """Ends `messages`. gRPC waits for that before it ends the stream."""
        self._bytes = self._pixel_bytes = 0
        self._set_timer()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[pb.RouterMessage]:
        while (entry := await self._queue.get()) is not None:
            unsent, size = entry
            self._count(unsent, -size)
            self._set_timer()
            if isinstance(unsent, memoryview):
                unsent = pb.RouterMessage(pixels=pb.Pixels(data=unsent.tobytes()))
            yield unsent


class NotEncoded(NamedTuple):
    """An image of the attempt cannot be encoded, and the client is told why."""

    error: ApiError


AttemptEvent = (
    pb.TokenEvent | pb.PromptLogprobs | pb.Reserved | pb.PrefillStarted | pb.AttemptFailed | NotEncoded
)


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """submitted ─▶ first token (prefill work is over) ─▶ ended
    └─ failed, cancelled, or lost with the stream ─▶ ended
    """

    worker: "Worker"
    name: str
    """The request id that the client knows."""
    tenant: bytes = b""
    on_event: Callable[["Attempt", AttemptEvent | None], None]
    """Tells the generation what happened. None: the stream ended. Called on the event loop; must not wait."""
    id: bytes = field(default_factory=lambda: os.urandom(16))
    plan: Plan
    """By which it was submitted."""
    span: Span = field(init=False)
    """Begins when the attempt is submitted."""
    weights_version: str = field(init=False)
    """Of its worker. Empty: the weights of `--model`."""
    tokens: int = 0
    """KV positions that a decode reserves. 0 for a prefill."""
    work: PrefillWork | None = None
    """The prompt that the worker still computes. None after the first token, and if it fetches the KV."""
    scores: list[pb.PromptLogprobs] = field(default_factory=list)
    """The log probabilities of the prompt that came."""
    images: Sequence[Image[memoryview]] = ()
    """Those of the prompt. The worker may ask for them."""
    lost_images: Counter[bytes] = field(default_factory=Counter)
    """Times that embeddings did not come from the encoder that had them, by image."""
    on_end: list[Callable[["Attempt"], None]] = field(default_factory=list)
    """Called when it has ended here."""

    def ended(self, failure: str = "") -> None:
        self.span.end(failure)
        for call in self.on_end:
            call(self)


@dataclass(eq=False, repr=False)
class Worker(Seen):
    """The connection to one worker, without the task that keeps it open.

    Attributes:
        retired: discovery no longer lists it.
    """

    desk: Desk
    on_load: Callable[[], None]
    """Called when the worker may have capacity for another decode."""
    on_breaker: Callable[["Worker"], None]
    """Called when the breaker opens, closes, or lets a probe through."""
    on_end: Callable[[], None] = lambda: None
    """Called when an attempt has ended."""
    state: WorkerState = WorkerState.CONNECTING
    reason: str = ""
    """Why the worker is not ready. Empty if it is. Likewise `remedy`: what to do."""
    remedy: str = ""
    reported_at: float = 0.0
    """The time.monotonic() at which this process got the last report."""
    attempts: dict[bytes, Attempt] = field(default_factory=dict)
    """The open attempts, by id."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    """Decides whether the worker fails too often to get work."""
    send_queue: SendQueue | None = None
    """Of its stream, as is `stub`. None without a stream."""
    stub: WorkerStub | None = None
    shown_tokens: int = 0
    """Of all `shown_images`."""
    outdated_since: float | None = None
    """The time.monotonic() at which another worker got newer weights. It takes no new work until it has
    them."""
    staged_version: str = ""
    """Of the weights that it gets next. It may serve until then, if workers get them some after others."""
    _invalid_rates: bool = False  # in `status`

    def __str__(self) -> str:
        first = "encode" if self.encodes else POOL_NAMES.get(self.description.first_pool)
        return f"{f'{first} {self.description.index}' if first else 'worker'} at {self.address}"

    @property
    def weights_version(self) -> str:
        """Empty: it has the weights of `--model`."""
        return self.description.weights.version

    @property
    def encodes(self) -> bool:
        """Whether it is an encoder of images, which takes no requests."""
        return self.description.first_pool == pb.POOL_ENCODE

    @property
    def ready(self) -> bool:
        """Whether the worker takes new work."""
        return self.state is WorkerState.READY and not self.retired and self.outdated_since is None

    @property
    def attached(self) -> bool:
        return self.send_queue is not None

    def described(self, description: pb.WorkerDescription) -> None:
        """Applies the description of a new incarnation."""
        self.description, self.pool = description, description.first_pool
        self.outdated_since = None

    def redescribed(self, description: pb.WorkerDescription) -> bool:
        """It has other adapters or weights, and its attempts go on with them. Nothing else may change.
        Returns whether the weights are others."""
        before, described = self.description, pb.WorkerDescription()
        described.CopyFrom(before)
        for name in CHANGING:
            described.ClearField(name)
        for each, _ in description.ListFields():
            if each.name not in CHANGING:
                description.ClearField(each.name)
        described.MergeFrom(description)
        self.description = described
        if all(getattr(described, name) == getattr(before, name) for name in OF_WEIGHTS):
            return False
        self.outdated_since = None
        for attempt in self.attempts.values():
            attempt.weights_version = described.weights.version
        return True

    def report(self, status: pb.WorkerStatus) -> bool:
        """Stores a status report. Returns whether the worker's state, pool or pause changed."""
        invalid = clear_invalid_rates(status)
        if status.step_model != self.status.step_model:
            self.step_model = step_model(status.step_model, self.step_model)
        if self.step_model is None and status.HasField("step_model"):
            status.ClearField("step_model")
            invalid.append("step_model")
        if invalid and not self._invalid_rates:  # not with each report
            log.warning("%s reports impossible rates, which count as unknown: %s", self, ", ".join(invalid))
        before = self.state, self.pool, self.status.pause
        self.status, self.reported_at = status, time.monotonic()
        self._invalid_rates = bool(invalid)
        self.prefix_links = {(link.incarnation, link.tier): link for link in status.prefix_links}
        serving = status.health == pb.WorkerStatus.HEALTH_SERVING
        self.state = WorkerState.READY if serving else WorkerState.DRAINING
        self.pool = status.pool
        if self.attached and self.pool != before[1]:
            log.info("%s gets the work of the %s pool", self, POOL_NAMES.get(self.pool, self.pool))
        return (self.state, self.pool, status.pause) != before

    async def ask(self) -> pb.WorkerStatus | None:
        """Asks the worker for its status. None: it does not answer in time."""
        status = await self._answer(lambda stub: stub.GetStatus(pb.StatusRequest(), timeout=STATUS_TIMEOUT))
        if status is not None:
            clear_invalid_rates(status)
            if step_model(status.step_model) is None:
                status.ClearField("step_model")
        return status

    async def phases(self, name: str) -> Sequence[pb.Phase]:
        """The phases of a request that the worker remembers. Empty: none, or it does not answer in time."""
        query = pb.PhasesRequest(name=name)
        answer = await self._answer(lambda stub: stub.GetPhases(query, timeout=STATUS_TIMEOUT))
        return () if answer is None else answer.phases[:MOST_PHASES]

    async def _answer(self, call: Callable[[WorkerStub], Awaitable[T]]) -> T | None:
        if self.stub is None:
            return None
        try:
            return await call(self.stub)
        except grpc.aio.AioRpcError:
            return None
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            return None  # the stream ended and closed the channel during the call

    # ------------------------------------------------------------ messages

    def submit(self, attempt: Attempt, message: pb.RouterMessage, request: Span) -> None:
        """Sends a SubmitPrefill or a SubmitDecode. `request`: the span of the request."""
        assert self.ready, "work goes to ready workers only"
        kind = message.WhichOneof("kind")
        generation = message.prefill.request if kind == "prefill" else message.decode.request
        described: dict[str, Any] = {}
        if request.exported:
            described = {"baton.worker": str(self), "baton.output_tokens": len(generation.output_ids)}
            described |= attempt.plan.attributes()
        attempt.span = request.child(f"{kind} attempt", described, "client")
        generation.traceparent = attempt.span.traceparent
        attempt.weights_version = self.description.weights.version
        self.attempts[attempt.id] = attempt
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request %s, attempt %s: %s at %s",
                attempt.name, attempt.id.hex(), kind, self, extra=of_request(attempt.name, attempt.id),
            )  # fmt: skip
        if self.breaker.attempt_sent(time.monotonic()):
            self.on_breaker(self)
        self.send(message)
        if attempt.work is not None:
            self.desk.sent(attempt.id, self.row, attempt.work)
        if attempt.tokens:
            self.desk.reserved(self.row, attempt.tokens)
            self.on_load()

    def cancel(self, attempt_id: bytes, failure: str = "", *, holds_kv: bool = False) -> None:
        """Ends an attempt here and at the worker. Does nothing if it has ended here.

        `holds_kv`: a prefill that was handed over has ended here. If its decode worker died before it
        acknowledged the KV, the prefill worker would keep that until its hold deadline."""
        if self.forget(attempt_id, failure) or holds_kv:
            self.send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=attempt_id)))

    def forget(self, attempt_id: bytes, failure: str = "", *, full: bool = False) -> bool:
        """Ends an attempt here. False: it had ended before. `failure` goes into its span. `full`: the worker
        refused the reservation."""
        attempt = self.attempts.pop(attempt_id, None)
        if attempt is None:
            return False
        attempt.ended(failure)
        self.prefilled(attempt, computed=False)
        if attempt.tokens:
            self.desk.released(self.row, attempt.tokens, full=full)
            self.on_load()
        self.on_end()
        return True

    def fail(self, failure: pb.AttemptFailed) -> Attempt | None:
        """Applies a failure that the worker reported. None if the attempt is not open.

        After KV_FAILED the attempt stays: the worker keeps its reservation. All other failures end it. An
        unknown code becomes UNSPECIFIED.
        """
        attempt = self.attempts.get(failure.attempt_id)
        if attempt is None:
            return None
        if failure.code not in pb.FailureCode.values():
            failure.message = f"{failure.message} (unknown failure code {failure.code})"
            failure.code = pb.FAILURE_CODE_UNSPECIFIED
        if failure.code != pb.FAILURE_CODE_KV_FAILED:
            text = f"{pb.FailureCode.Name(failure.code)}: {failure.message}"
            self.forget(failure.attempt_id, text, full=failure.code == pb.FAILURE_CODE_NO_ROOM)
        return attempt

    def lose_all(self) -> list[Attempt]:
        """Forgets all attempts when the stream ends. Returns what was open."""
        lost, self.attempts = list(self.attempts.values()), {}
        self.shown_images.clear()  # another process may answer next
        self.shown_tokens = 0
        for attempt in lost:
            attempt.ended("the worker was lost")
        return lost

    def prefilled(self, attempt: Attempt, *, computed: bool) -> None:
        """The first token came (`computed`), or the prompt is not computed any more."""
        work, attempt.work = attempt.work, None
        if work is None:
            return
        if not attempt.tokens:
            attempt.span.end()
        self.desk.ended(attempt.id, computed=computed)

    def lacks_pixels(self, image: Image[memoryview], cached: int) -> bool:
        """Whether the worker may have neither the embeddings of an image nor its KV. If it seems to have
        them, it asks for pixels that it needs. `cached`: tokens of the prompt of which it has KV."""
        if image.name in self.shown_images:
            self.shown_images.move_to_end(image.name)
            return False
        asks = self.description.kept_image_tokens > 0
        return not asks or image.span.stop > cached

    def send_pixels(self, image: Image[memoryview]) -> None:
        """Sends those of an image of the attempt, or of the `SubmitEncode`, that comes next."""
        if self.send_queue is not None:
            self.send_queue.put_pixels(image.pixels)
            self.shown_tokens += image.tokens - self.shown_images.get(image.name, 0)
            self.shown_images[image.name] = image.tokens
            self.shown_images.move_to_end(image.name)
            while self.shown_tokens > self.description.kept_image_tokens:
                self.shown_tokens -= self.shown_images.popitem(last=False)[1]
            if self.attached and not self.encodes:
                self.desk.shown(self.row, self.shown_images)

    def send(self, message: pb.RouterMessage) -> None:
        if self.send_queue is not None:
            self.send_queue.put(message)

    def attempt_succeeded(self) -> None:
        if self.breaker.attempt_succeeded():
            log.info("%s works again", self)
            self.on_breaker(self)

    def attempt_failed(self) -> None:
        """Counts a failed attempt, or a lost stream, against the worker."""
        if self.breaker.attempt_failed(time.monotonic()):
            log.warning("%s failed repeatedly and gets no requests for a while", self)
            self.on_breaker(self)


def cancelled_from_outside() -> bool:
    """Distinguishes a cancelled task from a cancelled gRPC call. Both raise CancelledError."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())
