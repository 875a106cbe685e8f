"""Encodes images in a thread of its own, and keeps their embeddings by name."""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from baton.encode_worker.embeddings import CACHE_BYTES, Embeddings
from baton.encode_worker.turns import Turns

Encode = Callable[[bytes, int, int], np.ndarray]
"""(pixels, rows, columns) → embeddings, as `Tower.encode`."""


class Encoder(Embeddings):
    """One thread that encodes one image after the other, in the order in which they are asked for.

    Attributes:
        encoded: images that were encoded since the start.
        tokens: of these images.
        seconds: in which they were encoded, without those in which they waited for their turns.
        turns: when the layers of the encoder may begin.
    """

    def __init__(self, encode: Encode, turns: Turns, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__(cache_bytes)
        self.turns = turns
        self.encoded = 0
        self.tokens = 0
        self.seconds = 0.0
        self._encode = encode
        self._tokens_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")

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

    def _start(self, name: bytes, pixels: bytes, rows: int, columns: int) -> "Future[np.ndarray]":
        self._tokens_waiting += rows * columns
        return self._thread.submit(self._run, name, pixels, rows, columns)

    def _run(self, name: bytes, pixels: bytes, rows: int, columns: int) -> np.ndarray:
        if not pixels:
            raise ValueError("the pixels of an image are missing, and its embeddings are not kept")
        before = self.turns.seconds
        encoded = self._encode(pixels, rows, columns)
        with self._lock:
            self.encoded += 1
            self.tokens += rows * columns
            self.seconds += self.turns.seconds - before
        self._keep(name, encoded)
        return encoded

    def _over(self, name: bytes, tokens: int) -> None:
        super()._over(name, tokens)
        with self._lock:
            self._tokens_waiting -= tokens
