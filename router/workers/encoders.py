"""The encoders that a router knows, and the images that it wants from them.

    a prompt is submitted ─▶ an encoder has the image ───────────────────────────▶ its worker is told
                             └─ else: pixels to the encoder with the least wait ─ Encoded ─▶ ┘

The prompt is submitted at once: its worker computes the text before the image meanwhile. An image that
several prompts want at the same time is encoded once, in the first of the turns of their keys. If its encoder
is lost, another one gets it. A worker that misses embeddings asks for them (ImageWanted): those that the
router believed to be in its prefix cache, and those that did not come from the encoder. A worker that encodes
asks for the pixels that it lacks.
"""

import asyncio
import logging
import os
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.router.errors import ApiError, Failed, NoWorker
from baton.router.workers.worker import Attempt, NotEncoded, Worker
from baton.rpc import worker_pb2 as pb
from baton.system.logs import of_request
from baton.vision.images import Image

log = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Of an image, and of its fetches for an attempt, before the request fails."""
MOST_KEPT = 4096
"""Images that a router remembers of each encoder."""


@dataclass(slots=True, eq=False)
class ImageEncode:
    """An image that is being encoded, or waits for an encoder."""

    image: Image[memoryview]
    fingerprint: str
    """Of the encoders that may have it."""
    attempts: dict[Attempt, None] = field(default_factory=dict)
    """Those that wait for it."""
    worker: Worker | None = None
    """None: there is no encoder."""
    id: bytes = b""
    tenants: set[bytes] = field(default_factory=set)
    """Those in whose turns the encoder may encode it."""
    failures: int = 0
    avoid: set[str] = field(default_factory=set)
    """Addresses of encoders that failed."""
    timer: asyncio.TimerHandle | None = None
    """While there is no encoder."""

    @property
    def tokens(self) -> int:
        return self.image.tokens


class Encoders:
    """Streams call it with what encoders and workers report."""

    def __init__(self, worker_wait: float) -> None:
        """`worker_wait`: seconds that an image waits for an encoder."""
        self.ready: dict[Worker, None] = {}
        """Those that take images."""
        self.had_encoder = False
        """This router was connected to an encoder once."""
        self._worker_wait = worker_wait
        self._cached: dict[Worker, OrderedDict[bytes, None]] = {}
        self._under_way: dict[tuple[str, bytes], ImageEncode] = {}  # by fingerprint and name
        self._by_id: dict[bytes, ImageEncode] = {}
        self._sent = Counter[Worker]()
        """Tokens of the images that each encoder encodes for this router."""

    # ------------------------------------------------------------ prompts

    def expected(self, images: Sequence[Image[memoryview]]) -> list[float]:
        """Seconds until each of these images is encoded, if they are sent now. Empty: there is no encoder."""
        if not images or not self.ready:
            return []
        waits = {worker: wait for worker, (wait, _) in self._waits(self.ready).items()}
        seconds = list[float]()
        for image in images:
            if any(image.name in self._cached[worker] for worker in waits):
                seconds.append(0.0)
                continue
            worker = min(waits, key=waits.__getitem__)
            waits[worker] += image.tokens * worker.status.encode_token_seconds
            seconds.append(waits[worker])
        return seconds

    def want(self, attempt: Attempt, image: Image[memoryview]) -> None:
        """The worker of an open attempt needs the embeddings of an image. Tells it which encoder has them,
        now or when they are made."""
        target = attempt.worker
        key = target.description.image_fingerprint, image.name
        for worker in self._fitting(key[0]):
            if image.name in self._cached[worker]:
                self._cached[worker].move_to_end(image.name)
                _tell(target, image.name, worker)
                return
        encode = self._under_way.get(key)
        if encode is not None and attempt in encode.attempts:
            return
        attempt.on_end.append(lambda ended: self._left(key, ended))
        if encode is not None:
            encode.attempts[attempt] = None
            if encode.worker is not None and attempt.tenant not in encode.tenants:
                encode.tenants.add(attempt.tenant)
                _submit(encode.worker, encode.id, image, attempt, with_pixels=False)
            return
        encode = self._under_way[key] = ImageEncode(image, key[0], {attempt: None})
        self._place(encode)

    def wanted(self, worker: Worker, message: pb.ImageWanted) -> None:
        """A worker misses embeddings that prompts there need."""
        waiting = {
            attempt: image
            for attempt in worker.attempts.values()
            for image in attempt.images
            if image.name == message.name
        }
        if waiting and not worker.description.image_fingerprint:
            attempt, image = next(iter(waiting.items()))
            _submit(worker, os.urandom(16), image, attempt)
            return
        if message.lost and waiting:
            for cached in self._cached.values():
                cached.pop(message.name, None)
        for attempt, image in waiting.items():
            attempt.lost_images[image.name] += message.lost
            if (times := attempt.lost_images[image.name]) > MOST_FAILURES:
                text = f"request {attempt.name}: {worker} could not fetch an image from the encoders"
                attempt.on_event(attempt, NotEncoded(Failed(f"{text}, {times} times")))
            else:
                self.want(attempt, image)

    def _left(self, key: tuple[str, bytes], attempt: Attempt) -> None:
        """An attempt has ended. An image that no other one wants is not encoded."""
        encode = self._under_way.get(key)
        if encode is None or encode.attempts.pop(attempt, attempt) is attempt or encode.attempts:
            return
        if encode.worker is not None:
            encode.worker.send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=encode.id)))
        self._end(encode)

    # ------------------------------------------------------------ encoders

    def availability_changed(self, worker: Worker) -> None:
        """An encoder came, went, or drains."""
        if worker.ready and worker.attached:
            self.ready[worker] = None
            self.had_encoder = True
            self._cached.setdefault(worker, OrderedDict())
        else:
            self.ready.pop(worker, None)
        if not worker.attached:
            self._cached.pop(worker, None)
        for encode in list(self._under_way.values()):
            if encode.worker is worker and not worker.attached:
                log.info("%s was lost with an image, which goes to another encoder", worker)
                self._place(encode)
            elif encode.worker is None and worker in self.ready:
                self._place(encode)

    def encoded(self, worker: Worker, encode_id: bytes) -> None:
        """An encoder has made embeddings."""
        encode = self._by_id.get(encode_id)
        if encode is None or encode.worker is not worker:
            return
        cached, name = self._cached[worker], encode.image.name
        cached[name] = None
        cached.move_to_end(name)
        if len(cached) > MOST_KEPT:
            cached.popitem(last=False)
        worker.attempt_succeeded()
        self._end(encode)
        for target in dict.fromkeys(attempt.worker for attempt in encode.attempts):
            _tell(target, name, worker)

    def failed(self, worker: Worker, failure: pb.AttemptFailed) -> None:
        """An encoder cannot encode an image, or drains."""
        encode = self._by_id.get(failure.attempt_id)
        if encode is None or encode.worker is not worker:
            return
        encode.avoid.add(worker.address)
        if failure.code != pb.FAILURE_CODE_DRAINING:
            encode.failures += 1
            log.warning("%s cannot encode an image: %s", worker, failure.message)
        if encode.failures < MOST_FAILURES:
            self._place(encode)
        else:
            text = f"an image cannot be encoded, after {encode.failures} tries: {failure.message}"
            self._fail(encode, lambda attempt: Failed(f"request {attempt.name}: {text}"))

    def _fitting(self, fingerprint: str) -> list[Worker]:
        return [worker for worker in self.ready if worker.description.model_fingerprint == fingerprint]

    def _place(self, encode: ImageEncode) -> None:
        """Sends the image to the encoder that should have it first."""
        self._withdraw(encode)
        encode.worker = None
        fitting = self._fitting(encode.fingerprint)
        fitting = [worker for worker in fitting if worker.address not in encode.avoid] or fitting
        if not fitting:
            if encode.timer is None:
                loop = asyncio.get_running_loop()
                encode.timer = loop.call_later(self._worker_wait, self._waited_too_long, encode)
            return
        if encode.timer is not None:
            encode.timer.cancel()
            encode.timer = None
        waits = self._waits(fitting)
        worker = min(fitting, key=lambda each: (*waits[each], random.random()))
        encode.worker, encode.id = worker, os.urandom(16)
        self._by_id[encode.id] = encode
        self._sent[worker] += encode.tokens
        encode.tenants.clear()
        for attempt in encode.attempts:
            if attempt.tenant not in encode.tenants:
                _submit(worker, encode.id, encode.image, attempt, with_pixels=not encode.tenants)
                encode.tenants.add(attempt.tenant)
        attempt = next(iter(encode.attempts))
        if log.isEnabledFor(logging.DEBUG):
            fields = of_request(attempt.name, encode.id)
            log.debug("request %s: image at %s", attempt.name, worker, extra=fields)

    def _waits(self, workers: Iterable[Worker]) -> dict[Worker, tuple[float, int]]:
        """Seconds until each encoder has encoded all images before the next one, and their tokens from this
        router: while no seconds are known, these decide."""
        waits = {}
        for worker in workers:
            tokens, status = self._sent[worker], worker.status
            waits[worker] = max(status.encode_queue_seconds, tokens * status.encode_token_seconds), tokens
        return waits

    def _waited_too_long(self, encode: ImageEncode) -> None:
        text = "its image needs an encoder, and none is ready"
        self._fail(encode, lambda attempt: NoWorker(f"request {attempt.name}: {text}", retry_after=1))

    def _fail(self, encode: ImageEncode, error: Callable[[Attempt], ApiError]) -> None:
        self._end(encode)
        for attempt in list(encode.attempts):
            attempt.on_event(attempt, NotEncoded(error(attempt)))

    def _withdraw(self, encode: ImageEncode) -> None:
        """Its encoder encodes it no more for this router."""
        if self._by_id.pop(encode.id, None) is not None:
            assert encode.worker is not None, "it has an id"
            self._sent[encode.worker] -= encode.tokens
            if not self._sent[encode.worker]:
                del self._sent[encode.worker]

    def _end(self, encode: ImageEncode) -> None:
        del self._under_way[encode.fingerprint, encode.image.name]
        self._withdraw(encode)
        if encode.timer is not None:
            encode.timer.cancel()


def _submit(
    worker: Worker, encode_id: bytes, image: Image[memoryview], attempt: Attempt, *, with_pixels: bool = True
) -> None:
    """Sends an image to a worker that encodes it. `attempt`: one that needs it."""
    if with_pixels:
        worker.send_pixels(image)
    submit = pb.SubmitEncode(
        encode_id=encode_id,
        image=pb.Image(name=image.name, rows=image.rows, columns=image.columns, with_pixels=with_pixels),
        traceparent=attempt.span.traceparent,
        name=attempt.name,
        tenant=attempt.tenant,
    )
    worker.send(pb.RouterMessage(encode=submit))


def _tell(target: Worker, name: bytes, encoder: Worker) -> None:
    described = encoder.description
    ready = pb.ImageReady(name=name, kv_address=described.kv_address, incarnation=described.incarnation)
    target.send(pb.RouterMessage(image_ready=ready))
