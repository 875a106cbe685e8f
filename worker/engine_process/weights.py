"""New weights of an engine process: read in a thread beside the steps, applied between two of them."""

import contextlib
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor

from baton.engine import Engine
from baton.engine.loader.live_weights import NewWeights
from baton.worker import messages
from baton.worker.ipc import ServiceLink
from baton.worker.messages import DropWeights, ReplaceWeights, StageWeights

log = logging.getLogger(__name__)


class WeightsChange:
    """At most one set of weights is read or staged at a time. The loop's thread makes all calls.

    `fileno()` is readable when weights were read, also if they were dropped: then `report` is due."""

    def __init__(self, engine: Engine, link: ServiceLink) -> None:
        self._engine = engine
        self._link = link
        self._thread: ThreadPoolExecutor | None = None
        self._done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._staged: Future[NewWeights] | None = None
        self._question, self._told = 0, False

    def fileno(self) -> int:
        return self._done

    def handle(self, message: messages.OfWeights) -> None:
        match message:
            case StageWeights(question, path):
                assert self._staged is None, "the service drops weights before it asks for others"
                self._question, self._told = question, False
                self._staged = self._begin(path)
                self._staged.add_done_callback(lambda _: os.eventfd_write(self._done, 1))
            case ReplaceWeights(question, version):
                assert self._staged is not None, "the service waits for WeightsStaged"
                self._engine.replace_weights(self._staged.result(), version)
                self._staged, engine = None, self._engine
                self._link.send(
                    messages.WeightsReplaced(question, engine.model_fingerprint, engine.content_root)
                )
            case DropWeights():
                if self._staged is not None:
                    self._engine.drop_weights()
                self._staged = None

    def _begin(self, path: str) -> "Future[NewWeights]":
        try:
            staging = self._engine.staging(path)
        except ValueError as error:
            refused: Future[NewWeights] = Future()
            refused.set_exception(error)
            return refused
        self._thread = self._thread or ThreadPoolExecutor(1, "weights")
        return self._thread.submit(staging)

    def report(self) -> None:
        """Tells the service process, once, how the reading ended."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._done)
        if self._staged is None or self._told or not self._staged.done():
            return
        self._told = True
        error = self._staged.exception()
        nbytes, fingerprint = 0, ""
        if error is None:
            new = self._staged.result()
            nbytes, why, fingerprint = new.nbytes, "", new.fingerprint
        elif isinstance(error, ValueError):
            why = str(error)
        else:
            log.error("reading new weights failed", exc_info=error)
            why = f"{type(error).__name__}: {error}; see the worker's log"
        self._link.send(messages.WeightsStaged(self._question, nbytes, why, fingerprint))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        os.close(self._done)
