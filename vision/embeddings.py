"""Embeddings of images by name: those that are kept, and those that are under way."""

import threading
from collections import OrderedDict
from collections.abc import MutableMapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

import numpy as np

CACHE_BYTES = 1 << 30


class EmbeddingFormat(NamedTuple):
    """What the two ends of a transfer of embeddings must agree on."""

    fingerprint: str
    """Of the encoder: equal if its configuration and its weights are."""
    dtype: str
    """Its name in torch."""
    token_bytes: int
    most_tokens: int
    """Of an image."""


class Embeddings:
    """Embeddings of an image are [tokens, bytes] uint8, which nothing changes. `Encoder` computes them. A
    worker without an encoder fetches them from one. Thread-safe.

    Attributes:
        hits: images that were kept, or under way, when they were asked for.
        kept_bytes: of embeddings.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        """`cache_bytes`: of embeddings that are kept. The least recently used ones go first."""
        self.hits = 0
        self.kept_bytes = 0
        self._most_bytes = cache_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._under_way: MutableMapping[bytes, Future[np.ndarray]] = {}
        self._held: dict[bytes, float] = {}  # names that are not dropped, until time.monotonic()

    def embeddings(
        self, name: bytes, pixels: bytes, rows: int, columns: int, tenant: bytes = b""
    ) -> "Future[np.ndarray]":
        """The embeddings of an image, which are ready at once if they are kept. `pixels` may be empty if the
        image is not to be encoded here: if it is not kept, an encoder fails with a `ValueError` then."""
        with self._lock:
            if (found := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
                self._hold(name)
                self.hits += 1
                ready: Future[np.ndarray] = Future()
                ready.set_result(found)
                return ready
            if (asked := self._under_way.get(name)) is not None:
                self.hits += 1
                self._join(asked, tenant)
                return asked
            future = self._start(name, pixels, rows, columns, tenant)
            self._under_way[name] = future
        future.add_done_callback(lambda _: self._over(name, rows * columns))
        return future

    def kept(self, name: bytes) -> np.ndarray | None:
        """Those that are kept. None: they are not."""
        with self._lock:
            return self._kept.get(name)

    def wait(self, seconds: float) -> bool:
        """Waits until embeddings that are under way may be there, at most `seconds`. False: none are."""
        with self._lock:
            asked = self._asked_for()
        if asked:
            wait(asked, seconds, FIRST_COMPLETED)
        return bool(asked)

    @property
    def waiting(self) -> int:
        """Images that are asked for now, and not there."""
        with self._lock:
            return len(self._asked_for())

    def _asked_for(self) -> "list[Future[np.ndarray]]":
        """The futures of these, while the lock is held."""
        return list(self._under_way.values())

    def _start(
        self, name: bytes, pixels: bytes, rows: int, columns: int, tenant: bytes
    ) -> "Future[np.ndarray]":
        """Begins to make embeddings, while the lock is held."""
        raise NotImplementedError

    def _join(self, asked: "Future[np.ndarray]", tenant: bytes) -> None:
        """Embeddings that are under way were asked for, while the lock is held."""

    def _hold(self, name: bytes) -> None:
        """Embeddings that are kept were asked for, while the lock is held. An encoder may hold them."""

    def _keep(self, name: bytes, embeddings: np.ndarray) -> None:
        with self._lock:
            self._kept[name] = embeddings
            self.kept_bytes += embeddings.nbytes
            self._hold(name)
            self._drop()

    def _drop(self) -> None:
        """Drops what is too much and not held."""
        dropped, over = list[bytes](), self.kept_bytes - self._most_bytes
        for name, embeddings in self._kept.items():
            if over <= 0:
                break
            if name not in self._held:
                dropped.append(name)
                over -= embeddings.nbytes
        for name in dropped:
            self.kept_bytes -= self._kept.pop(name).nbytes

    def _over(self, name: bytes, tokens: int) -> None:
        with self._lock:
            self._under_way.pop(name, None)
