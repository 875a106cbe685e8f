"""The engine process of an encoder. Its service runs `python -m baton.encode_worker.process`.

    router ── Encode: pixels ─▶ encoder thread ─▶ kept by name ── Encoded ─▶ router ── ImageReady ─▶ worker
                                                    └──────────── lanes ◀── asks by name ─────────────┘

Embeddings leave while the next image is computed: the thread of the encoder, the thread that fills slots, and
the transfer process work at the same time.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.channel import ChannelClosed
from baton.kv_transfer.wait import wait
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process import to_routers
from baton.worker.engine_process.start import (
    EXIT_START_FAILED,
    EXIT_TRANSFER_GONE,
    EngineProcessConfig,
    start,
)
from baton.worker.ipc import ServiceLink
from baton.worker.messages import Origin

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np

    from baton.encode_worker.serving import ServedEmbeddings
    from baton.vision.encoder import Encoder

IDLE_TICK = 0.25
"""Seconds between two signs of life."""
NO_WEIGHTS = "the weights of an encoder cannot be replaced; start all workers again"


@dataclass(slots=True, eq=False)
class _Image:
    """One that a router wants to have encoded."""

    stream: int
    origin: Origin
    name: bytes
    tokens: int
    future: Future[np.ndarray]
    ended_at: float = 0.0


class EncoderLoop:
    """Takes the messages of the service, in one thread."""

    def __init__(self, link: ServiceLink, encoder: Encoder, served: ServedEmbeddings) -> None:
        self._link = link
        self._encoder = encoder
        self._served = served
        self._open: dict[bytes, _Image] = {}  # by the id of the attempt
        self._ended = deque[_Image]()
        self._done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def fds(self) -> list[int]:
        return [self._link.fileno(), self._served.fileno(), self._done]

    def turn(self) -> bool:
        """Handles what has come. False: the service wants the process to stop."""
        for message in self._link.receive_all():
            match message:
                case messages.Stop():
                    self._fail_all(pb.FAILURE_CODE_DRAINING, "the worker shuts down")
                    self._link.send(messages.Stopped())
                    return False
                case messages.FromRouter(stream, data, origin, pixels):
                    said = pb.RouterMessage.FromString(data)
                    if origin is None:  # the service takes nothing else
                        self._cancel(stream, said.cancel.attempt_id)
                    else:
                        self._encode(stream, origin, said.encode, pixels[0])
                case messages.Detached(stream):
                    self._cancel(stream, None)
                case messages.AskStatus(question):
                    self._link.send(self._status(question))
                case messages.HandBack(reason):
                    self._fail_all(pb.FAILURE_CODE_DRAINING, reason)
                case _:
                    self._answer(message)
        with suppress(BlockingIOError):
            os.eventfd_read(self._done)
        while self._ended:
            self._tell(self._ended.popleft())
        self._served.poll()
        return True

    def close(self) -> None:
        self._encoder.close()
        self._served.close()
        os.close(self._done)

    def _answer(self, message: messages.ToEngine) -> None:
        """What an encoder cannot do, or needs not do."""
        match message:
            case messages.Pause(question):  # routers send no new requests; what was sent is encoded
                self._link.send(messages.Paused(question, computing=False, error=""))
            case messages.StageWeights(question):
                self._link.send(messages.WeightsStaged(question, 0, NO_WEIGHTS))
            case messages.LoadAdapter(question):
                self._link.send(messages.AdapterLoaded(question, b"", "an encoder takes no adapters"))
            case messages.SetMemory(question):
                why = "the memory of an encoder cannot be released"
                self._link.send(messages.MemorySet(question, [], lost_weights=False, busy=False, error=why))
            case messages.DropWeights():
                pass
            case _:
                raise AssertionError(f"not for an encoder: {message}")

    def _encode(self, stream: int, origin: Origin, submit: pb.SubmitEncode, pixels: bytes) -> None:
        asked = submit.image
        future = self._encoder.embeddings(asked.name, pixels, asked.rows, asked.columns, submit.tenant)
        if origin.attempt_id in self._open:
            return
        tokens = asked.rows * asked.columns
        image = self._open[origin.attempt_id] = _Image(stream, origin, asked.name, tokens, future)

        def ended(_: object) -> None:  # in the thread of the encoder
            image.ended_at = time.monotonic()
            self._ended.append(image)
            os.eventfd_write(self._done, 1)

        future.add_done_callback(ended)

    def _tell(self, image: _Image) -> None:
        origin = image.origin
        if self._open.pop(origin.attempt_id, None) is not image:
            return
        try:
            image.future.result()
        except ValueError as error:
            self._fail(image, pb.FAILURE_CODE_INVALID, str(error))
        except (Exception, CancelledError) as error:  # noqa: BLE001  of a device that has no memory, for one
            self._fail(image, pb.FAILURE_CODE_ENGINE, f"{type(error).__name__}: {error}")
        else:
            self._served.encoded(image.name, image.tokens)
            self._link.send(to_routers.encoded(image.stream, origin.attempt_id))
            self._link.send(messages.Encoded(origin, origin.accepted_at, image.ended_at, image.tokens))

    def _cancel(self, stream: int, attempt_id: bytes | None) -> None:
        """An image that is not begun, and that no other attempt wants, is not encoded."""
        if attempt_id is None:
            ended = [key for key, image in self._open.items() if image.stream == stream]
        else:
            ended = [attempt_id] if attempt_id in self._open else []
        for key in ended:
            image = self._open.pop(key)
            if all(other.future is not image.future for other in self._open.values()):
                image.future.cancel()

    def _fail(self, image: _Image, code: pb.FailureCode, message: str) -> None:
        self._link.send(to_routers.failed(image.stream, image.origin.attempt_id, code, message))
        self._link.send(messages.Failed(image.origin, code, message))

    def _fail_all(self, code: pb.FailureCode, message: str) -> None:
        for image in self._open.values():
            self._fail(image, code, message)
        self._open.clear()

    def _status(self, question: int) -> messages.EngineStatus:
        from baton.engine.api.stats import EngineStats
        from baton.engine.execution.image_encoder import encoder_stats

        served = self._served
        stats = EngineStats(
            requests_running=len(self._open),
            requests_decoding=0,
            requests_waiting=0,
            tokens_waiting=0,
            blocks_free=served.blocks_free,
            blocks_spare=served.blocks_free,
            blocks_total=served.blocks,
            blocks_cached=0,
            held_prefills=0,
            reservations=0,
            preemptions=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            prefill_position=0.0,
            encoder=encoder_stats(self._encoder),
        )
        idle = not self._open and served.idle
        return messages.EngineStatus(question, stats, messages.RequestCounts(), idle, [])


def run(config: EngineProcessConfig) -> int:
    # These imports load torch, which is slow. The process must be tied to its parent before.
    from baton.encode_worker.serving import ServedEmbeddings
    from baton.engine.execution.image_encoder import start_encoder
    from baton.kv_transfer import Heartbeat, TraceWriter, Transport
    from baton.worker.engine_process.embeddings import embedding_layout

    link = ServiceLink(config.address)
    trace = TraceWriter(config.trace_path, config.name)
    heartbeat = Heartbeat(config.heartbeat_fd)

    def progress(stage: str, fraction: float) -> None:
        heartbeat.tick()
        link.send(messages.Progress(stage, fraction))

    heartbeat.tick()
    try:
        encoder, embedding, model = start_encoder(config.engine, progress, config.hold_seconds)
    except ValueError as error:
        link.send(messages.StartFailed(str(error)))
        link.close()
        return EXIT_START_FAILED
    served = ServedEmbeddings(Transport.inherited(config.arenas, trace), embedding, encoder)
    assert model.vision is not None, "an encoder has started"
    described = pb.WorkerDescription(
        model_fingerprint=embedding.fingerprint,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        block_size=CHUNK_TOKENS,
        num_blocks=served.blocks,
    )
    link.send(messages.EngineReady(described, embedding_layout(embedding), model.vision.settings))
    gc.enable()
    loop = EncoderLoop(link, encoder, served)
    try:
        while True:
            wait(loop.fds, 0.0 if link.has_messages else IDLE_TICK)
            if not loop.turn():
                break
            heartbeat.tick()
    except ChannelClosed:
        return EXIT_TRANSFER_GONE
    link.wait_for(messages.Exit)
    loop.close()
    trace.close()
    link.close()
    return 0


if __name__ == "__main__":
    start(EngineProcessConfig, run)
