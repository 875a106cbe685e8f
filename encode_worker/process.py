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
from baton.worker.engine_process.attempt import Attempt, AttemptTable
from baton.worker.engine_process.handler import Handler
from baton.worker.engine_process.start import (
    EXIT_START_FAILED,
    EXIT_TRANSFER_GONE,
    EngineProcessConfig,
    start,
)
from baton.worker.ipc import ServiceLink
from baton.worker.messages import FromRouter

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np

    from baton.encode_worker.serving import ServedEmbeddings
    from baton.vision.encoder import Encoder

IDLE_TICK = 0.25
"""Seconds between two signs of life."""


@dataclass(slots=True, eq=False, kw_only=True)
class ImageAttempt(Attempt):
    """One image that a router wants to have encoded."""

    name: bytes
    future: Future[np.ndarray]
    ended_at: float = 0.0

    def stop(self) -> None:
        """An image that is not begun, and that no other attempt wants, is not encoded."""
        if all(other.future is not self.future for other in self.attempts if other is not self):
            self.future.cancel()


class EncoderLoop(Handler):
    """Takes the messages of the service, in one thread."""

    def __init__(self, link: ServiceLink, encoder: Encoder, served: ServedEmbeddings) -> None:
        Handler.__init__(self, AttemptTable[ImageAttempt](link.send), link.send, "an encoder")
        self._link = link
        self._encoder = encoder
        self._served = served
        self._ended = deque[ImageAttempt]()
        self._done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def fds(self) -> list[int]:
        return [self._link.fileno(), self._served.fileno(), self._done]

    def turn(self) -> bool:
        """Handles what has come. False: the service wants the process to stop."""
        for message in self._link.receive_all():
            if not self.handle(message):
                return False
        with suppress(BlockingIOError):
            os.eventfd_read(self._done)
        while self._ended:
            self._tell(self._ended.popleft())
        self._served.poll()
        self._attempts.flush()
        return True

    def close(self) -> None:
        self._encoder.close()
        self._served.close()
        os.close(self._done)

    def _pause(self, message: messages.Pause) -> messages.Paused:
        """Routers send no new requests. What was sent is encoded."""
        return messages.Paused(message.question, computing=False, error="")

    def _said(self, kind: str, content: pb.SubmitEncode, message: FromRouter) -> None:
        assert kind == "encode", "the service takes nothing else"
        assert message.origin is not None, "it submits an attempt"
        asked, [pixels] = content.image, message.pixels
        future = self._encoder.embeddings(asked.name, pixels, asked.rows, asked.columns, content.tenant)
        if self._attempts.find(content.encode_id) is not None:
            return
        image = ImageAttempt(
            stream=message.stream, origin=message.origin, tokens=asked.rows * asked.columns, name=asked.name,
            future=future,
        )  # fmt: skip
        self._attempts.open(image)

        def ended(_: object) -> None:  # in the thread of the encoder
            image.ended_at = time.monotonic()
            self._ended.append(image)
            os.eventfd_write(self._done, 1)

        future.add_done_callback(ended)

    def _tell(self, image: ImageAttempt) -> None:
        if image.closed:
            return
        assert image.stream is not None, "it has not ended for its router"
        try:
            image.future.result()
        except ValueError as error:
            image.lost(pb.FAILURE_CODE_INVALID, str(error))
        except (Exception, CancelledError) as error:  # noqa: BLE001  of a device that has no memory, for one
            image.lost(pb.FAILURE_CODE_ENGINE, f"{type(error).__name__}: {error}")
        else:
            origin = image.origin
            self._served.encoded(image.name, image.tokens)
            self._send(to_routers.encoded(image.stream, image.id))
            self._attempts.report(messages.Encoded(origin, origin.accepted_at, image.ended_at, image.tokens))
            image.close("finished")

    def status(self, question: int) -> messages.EngineStatus:
        from baton.engine.api.stats import EngineStats
        from baton.engine.execution.image_encoder import encoder_stats

        served = self._served
        stats = EngineStats(
            requests_running=len(self._attempts),
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
        told = pb.WorkerStatus(idle=not self._attempts and served.idle)
        return messages.EngineStatus(question, stats, self._attempts.counts, told)


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
