"""Divides the time of a device between the steps of an engine and its encoder of images.

An image of 1080p takes a device some 40 ms, and a step that decodes 5 to 15 ms. Beside such steps the encoder
computes only as many of its layers as a step leaves time for until the gap target. A layer never waits longer
than the gap target itself. So an encoder goes on also where decodes take all of the time, and a caller that
grants nothing more cannot hold it up. Without decodes it goes on at once.

Thread-safe. The wait is in the thread of the encoder; the engine never waits.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from baton.steps.averages import Average

DECAY = 0.8
"""Factor on the weight of an image with each later one."""


class Turns:
    """Of one encoder and one engine.

    Attributes:
        seconds: in which images were computed since the start, without waits.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._granted = threading.Condition()
        self._left = math.inf
        self._longest = 0.0
        self._taken = 0.0
        self.forget()
        self._seconds = 0.0  # of a layer of the image under way. 0: not known
        self._layers, self._waited = 0, 0.0  # of this image, so far; seconds

    @property
    def token_seconds(self) -> float:
        """Of images, for each of their tokens, without waits. 0: not known."""
        return self._image.value

    def forget(self) -> None:
        """What layers and images cost."""
        self._layer = Average(DECAY)  # seconds for each token of the image
        self._image = Average(DECAY)

    # Engine

    def grant(self, seconds: float, longest: float = 0.0) -> None:
        """The layers that begin until the next grant may take so many seconds. Infinite: nothing decodes.
        `longest`: seconds that a layer waits at most."""
        with self._granted:
            self._left, self._longest = seconds, longest
            self._granted.notify()

    def taken(self) -> float:
        """Seconds that layers should have taken since the last call."""
        with self._granted:
            taken, self._taken = self._taken, 0.0
        return taken

    # Encoder

    @property
    def ahead(self) -> float:
        """How many layers may be launched before the first of them has ended. A request that begins to decode
        now waits for these, at most until the gap target. Infinite: nothing decodes, and there is none."""
        with self._granted:
            if not math.isinf(self._left):
                return 1
            return max(1, self._longest / self._seconds) if self._longest and self._seconds else math.inf

    @contextmanager
    def image(self, tokens: int) -> Iterator[None]:
        """Around the computation of an image. The cost of its layers is learned if it ends well."""
        began = time.monotonic()
        self._seconds, self._layers, self._waited = tokens * self._layer.value, 0, 0.0
        yield
        seconds = time.monotonic() - began - self._waited
        self.seconds += seconds
        if self._layers:
            self._image.add(seconds, tokens)
            self._layer.add(seconds / self._layers, tokens)

    def next_layer(self) -> None:
        """Before a layer: waits until there is time for it."""
        began = time.monotonic()
        with self._granted:
            if self._left < self._seconds:
                self._granted.wait_for(lambda: self._left >= self._seconds, self._longest)
            self._left -= self._seconds
            self._taken += self._seconds
        self._layers += 1
        self._waited += time.monotonic() - began
