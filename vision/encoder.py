"""Encodes images in a thread of its own, and keeps their embeddings by name."""

import math
import threading
import time
import weakref
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from baton.system import turns as tenants
from baton.vision.embeddings import CACHE_BYTES, Embeddings
from baton.vision.turns import Turns

Encode = Callable[[bytes, int, int], np.ndarray]
"""(pixels, rows, columns) → embeddings, as `Tower.encode`."""


class _Image(Future[np.ndarray]):
    """One that waits in the turn of each tenant that has asked for it. The first turn encodes it."""

    def __init__(self, name: bytes) -> None:
        super().__init__()
        self.name = name
        self.tenants = set[bytes]()
        self.pixels, self.rows, self.columns = b"", 0, 0
        self.begun = False  # or cancelled, as the thread has seen


class Encoder(Embeddings):
    """One thread that encodes one image after the other. Tenants take turns by the seconds of their images.

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
        self._without_pixels: MutableMapping[bytes, _Image] = weakref.WeakValueDictionary()
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
        self._waiting = tenants.Turns()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    @property
    def queue_seconds(self) -> float:
        """In which the waiting images are encoded, if nothing decodes. 0: none waits, or not known."""
        return self._tokens_waiting * self.turns.token_seconds

    def embeddings(
        self, name: bytes, pixels: bytes, rows: int, columns: int, tenant: bytes = b""
    ) -> "Future[np.ndarray]":
        if not pixels and self.wants is not None:
            with self._lock:
                lacks = name not in self._kept and name not in self._under_way
                waiting = self._without_pixels.setdefault(name, _Image(name)) if lacks else None
                if waiting is not None:
                    waiting.tenants.add(tenant)
            if waiting is not None:
                self.wants(name)  # also if it was asked for before: that router may have gone
                return waiting
        return super().embeddings(name, pixels, rows, columns, tenant)

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
            asked = list(self._under_way.values())
        for image in asked:
            image.cancel()
        self.turns.grant(math.inf)
        self._thread.shutdown()

    def _start(
        self, name: bytes, pixels: bytes, rows: int, columns: int, tenant: bytes
    ) -> "Future[np.ndarray]":
        self._tokens_waiting += rows * columns
        image = self._without_pixels.pop(name, None) or _Image(name)
        image.pixels, image.rows, image.columns = pixels, rows, columns
        image.tenants.add(tenant)
        for each in image.tenants:
            self._queue(image, each)
        return image

    def _join(self, asked: "Future[np.ndarray]", tenant: bytes) -> None:
        assert isinstance(asked, _Image), "it comes from `_start`"
        if tenant not in asked.tenants:
            asked.tenants.add(tenant)
            self._queue(asked, tenant)

    def _queue(self, image: _Image, tenant: bytes) -> None:
        self._waiting.add(tenant, partial(self._serve, image, tenant))
        self._thread.submit(self._waiting.serve)

    def _serve(self, image: _Image, tenant: bytes) -> None:
        if image.begun:
            return
        image.begun = True
        if not image.set_running_or_notify_cancel():
            return
        before = self.turns.seconds
        try:
            encoded = self._run(image.name, image.pixels, image.rows, image.columns)
        except BaseException as error:  # noqa: BLE001  (what waits for the image raises it)
            image.set_exception(error)
            del image  # which has the frame with the pixels now
        else:
            image.pixels = b""
            image.set_result(encoded)
        self._waiting.charge(tenant, self.turns.seconds - before)

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


def _nothing() -> None:
    pass
