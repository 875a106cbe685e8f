"""Encodes images in a thread of its own, and keeps their embeddings by name."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from baton.encode_worker.turns import Turns

Encode = Callable[[bytes, int, int], np.ndarray]
"""(pixels, rows, columns) → embeddings, as `Tower.encode`."""
CACHE_BYTES = 1 << 30


class Encoder:
    """One thread that encodes one image after the other, in the order in which they are asked for.

    Attributes:
        encoded: images that were encoded since the start.
        tokens: of these images.
        seconds: in which they were encoded, without those in which they waited for their turns.
        hits: images that were kept, or being encoded, when they were asked for.
        kept_bytes: of embeddings.
        turns: when the layers of the encoder may begin.
    """

    def __init__(self, encode: Encode, turns: Turns, cache_bytes: int = CACHE_BYTES) -> None:
        """`cache_bytes`: of embeddings that are kept. The least recently used ones go first."""
        self.turns = turns
        self.encoded = 0
        self.hits = 0
        self.tokens = 0
        self.seconds = 0.0
        self._encode = encode
        self._most_bytes = cache_bytes
        self.kept_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._under_way: dict[bytes, Future[np.ndarray]] = {}
        self._tokens_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    def embeddings(self, name: bytes, pixels: bytes, rows: int, columns: int) -> "Future[np.ndarray]":
        """The embeddings of an image, [tokens, bytes] uint8, which nothing changes. They are ready at once if
        they are kept. `pixels` may be empty if the image is not to be encoded here: if it is not kept, the
        result is a `ValueError` then."""
        with self._lock:
            if (found := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
                self.hits += 1
                ready: Future[np.ndarray] = Future()
                ready.set_result(found)
                return ready
            if (asked := self._under_way.get(name)) is not None:
                self.hits += 1
                return asked
            future = self._thread.submit(self._run, name, pixels, rows, columns)
            self._under_way[name] = future
            self._tokens_waiting += rows * columns
        future.add_done_callback(lambda _: self._over(name, rows * columns))
        return future

    def wait(self, seconds: float) -> bool:
        """Waits until an image is encoded, at most `seconds`. False: none is being encoded."""
        with self._lock:
            under_way = list(self._under_way.values())
        if under_way:
            wait(under_way, seconds, FIRST_COMPLETED)
        return bool(under_way)

    @property
    def waiting(self) -> int:
        """Images that are asked for now, and not encoded."""
        return len(self._under_way)

    @property
    def queue_seconds(self) -> float:
        """In which the waiting images are encoded, if nothing decodes. 0: none waits, or not known."""
        return self._tokens_waiting * self.turns.token_seconds

    def rehearse(self, rows: int, columns: int, pixels: bytes) -> None:
        """Encodes an image that is not kept, and learns from it alone what images cost."""
        self.turns.forget()
        self._thread.submit(self._encode, pixels, rows, columns).result()

    def forget(self) -> None:
        """Keeps no embeddings, since the weights change. Encodes what was asked for before, which no request
        waits for any more."""
        self.turns.grant(math.inf)
        self._thread.submit(self._forget).result()

    def _forget(self) -> None:
        with self._lock:
            self._kept.clear()
            self.kept_bytes = 0

    def close(self) -> None:
        """Encodes nothing more. Returns when the thread has ended."""
        self.turns.grant(math.inf)
        self._thread.shutdown(cancel_futures=True)

    def _run(self, name: bytes, pixels: bytes, rows: int, columns: int) -> np.ndarray:
        if not pixels:
            raise ValueError("the pixels of an image are missing, and its embeddings are not kept")
        before = self.turns.seconds
        encoded = self._encode(pixels, rows, columns)
        with self._lock:
            self.encoded += 1
            self.tokens += rows * columns
            self.seconds += self.turns.seconds - before
            self._kept[name] = encoded
            self.kept_bytes += encoded.nbytes
            while self.kept_bytes > self._most_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.kept_bytes -= dropped.nbytes
        return encoded

    def _over(self, name: bytes, tokens: int) -> None:
        with self._lock:
            self._under_way.pop(name, None)
            self._tokens_waiting -= tokens
