"""Encodes images in a thread of its own, and keeps their embeddings by name."""

import math
import threading
import time
import weakref
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from baton.encode_worker.embeddings import CACHE_BYTES, Embeddings
from baton.encode_worker.turns import Turns

Encode = Callable[[bytes, int, int], np.ndarray]
"""(pixels, rows, columns) → embeddings, as `Tower.encode`."""


class Encoder(Embeddings):
    """One thread that encodes one image after the other, in the order in which they are asked for.

    An encoder of a pool holds embeddings until a worker has fetched them, for `hold_seconds` at most. If as
    many bytes are held as are kept at most, the next image waits. So no embeddings are dropped before they
    are fetched, and memory is bounded by what is kept and one image.

        next image ── waits for room ──▶ a fetch ends, or the time of what is held for longest

    A fetch waits for no image, so both end.

    An image may be asked for without its pixels. If its embeddings are not kept, `wants` is called, and its
    future waits until the pixels come with a later question. One that nothing waits for is forgotten.

    Attributes:
        wants: hears the name of an image of which the pixels are missing, in the thread that asks for it.
            None: such an image fails.
        encoded: images that were encoded since the start.
        tokens: of these images.
        seconds: in which they were encoded, without those in which they waited for their turns.
        turns: when the layers of the encoder may begin.
    """

    def __init__(
        self,
        encode: Encode,
        turns: Turns,
        cache_bytes: int = CACHE_BYTES,
        hold_seconds: float = 0.0,
        give_back: Callable[[], None] | None = None,
    ) -> None:
        """`hold_seconds` 0: the embeddings are for this process, which holds what it needs itself.
        `give_back`: gives back the memory of the device that `encode` has kept. None: it keeps none."""
        super().__init__(cache_bytes)
        self.wants: Callable[[bytes], None] | None = None
        self._without_pixels: MutableMapping[bytes, Future[np.ndarray]] = weakref.WeakValueDictionary()
        self._hold_seconds = hold_seconds
        self._released = threading.Condition(self._lock)
        self._closed = False
        self.turns = turns
        self.encoded = 0
        self.tokens = 0
        self.seconds = 0.0
        self._encode = encode
        self._give_back = give_back
        self._tokens_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    @property
    def queue_seconds(self) -> float:
        """In which the waiting images are encoded, if nothing decodes. 0: none waits, or not known."""
        return self._tokens_waiting * self.turns.token_seconds

    def embeddings(self, name: bytes, pixels: bytes, rows: int, columns: int) -> "Future[np.ndarray]":
        if not pixels and self.wants is not None:
            with self._lock:
                lacks = name not in self._kept and name not in self._under_way
                waiting = self._without_pixels.setdefault(name, Future()) if lacks else None
            if waiting is not None:
                self.wants(name)  # also if it was asked for before: that router may have gone
                return waiting
        future = super().embeddings(name, pixels, rows, columns)
        with self._lock:
            waiting = self._without_pixels.pop(name, None)
        if waiting is not None:
            future.add_done_callback(partial(_pass_on, waiting))
        return future

    def rehearse(self, rows: int, columns: int, pixels: bytes) -> None:
        """Encodes an image that is not kept, and learns from it alone what images cost."""
        self.turns.forget()
        self._thread.submit(self._encode, pixels, rows, columns).result()

    def release(self, name: bytes) -> None:
        """A worker has fetched these embeddings. They are kept as others are."""
        with self._released:
            if self._held.pop(name, None) is not None:
                self._drop()
                self._released.notify()

    def forget(self) -> None:
        """Keeps no embeddings, since the weights change. Encodes what was asked for before, which no request
        waits for any more."""
        self.turns.grant(math.inf)
        self._thread.submit(self._forget).result()

    def _forget(self) -> None:
        with self._lock:
            self._kept.clear()
            self._held.clear()
            self.kept_bytes = 0

    def give_back(self) -> None:
        """Gives back the memory of the device that weights do not need. Encodes what was asked for before. No
        image is computed when this returns, until one is asked for."""
        self.turns.grant(math.inf)
        self._thread.submit(self._give_back or _nothing).result()

    def close(self) -> None:
        """Encodes nothing more. Returns when the thread has ended."""
        with self._released:
            self._closed = True
            self._released.notify()
        self.turns.grant(math.inf)
        self._thread.shutdown(cancel_futures=True)

    def _start(self, name: bytes, pixels: bytes, rows: int, columns: int) -> "Future[np.ndarray]":
        self._tokens_waiting += rows * columns
        return self._thread.submit(self._run, name, pixels, rows, columns)

    def _run(self, name: bytes, pixels: bytes, rows: int, columns: int) -> np.ndarray:
        if not pixels:
            raise ValueError("the pixels of an image are missing, and its embeddings are not kept")
        self._wait_for_room()
        before = self.turns.seconds
        encoded = self._encode(pixels, rows, columns)
        with self._lock:
            self.encoded += 1
            self.tokens += rows * columns
            self.seconds += self.turns.seconds - before
        self._keep(name, encoded)
        return encoded

    def _asked_for(self) -> "list[Future[np.ndarray]]":
        return [*super()._asked_for(), *self._without_pixels.values()]

    def _hold(self, name: bytes) -> None:
        if self._hold_seconds:
            self._held.pop(name, None)  # the ends of times stay in order
            self._held[name] = time.monotonic() + self._hold_seconds

    def _wait_for_room(self) -> None:
        with self._released:
            while self._held and not self._closed:
                name, until = next(iter(self._held.items()))
                if (left := until - time.monotonic()) <= 0:
                    del self._held[name]
                elif sum(self._kept[each].nbytes for each in self._held) < self._most_bytes:
                    return
                else:
                    self._released.wait(left)

    def _over(self, name: bytes, tokens: int) -> None:
        super()._over(name, tokens)
        with self._lock:
            self._tokens_waiting -= tokens


def _pass_on(waiting: "Future[np.ndarray]", encoded: "Future[np.ndarray]") -> None:
    if encoded.cancelled():
        waiting.cancel()
    elif (error := encoded.exception()) is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(encoded.result())


def _nothing() -> None:
    pass
