"""What a lane carries over one pair of cards, as its sender measures it."""

import math

WINDOW = 0.5
"""Seconds of sending, of all lanes over these cards. What was before counts less and less."""
FORGOTTEN = 10.0
"""Seconds. A card that was slow may have been mended, so slices try it again."""


class CardRate:
    """Of the lanes of one session over the same two cards. Pure, without a clock."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._last = -math.inf

    def took(self, size: int, seconds: float, now: float) -> None:
        """The peer took so many bytes of a lane in this time, in which the lane always had some to send."""
        older = math.exp(-seconds / WINDOW)
        self._bytes = self._bytes * older + size
        self._seconds = self._seconds * older + seconds
        self._last = now

    def rate(self, now: float) -> float:
        """Bytes/s of each lane. 0: not known."""
        return self._bytes / self._seconds if self._seconds > 0 and now < self._last + FORGOTTEN else 0.0
