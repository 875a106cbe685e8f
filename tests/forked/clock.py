"""A clock that a test gives to processes which it starts by a fork server."""

import mmap
import os
import time

VARIABLE = "TEST_CLOCK"
"""The environment variable that names its memory."""


class Clock:
    """What `time.monotonic()` returns there. It goes on as that of the machine until the test changes it."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("clock")
        os.truncate(self._fd, 16)
        self._values = memoryview(mmap.mmap(self._fd, 16)).cast("d")
        self._values[0] = 1.0
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def later(self, seconds: float) -> None:
        """Lets so much time pass at once."""
        self._values[1] += seconds

    def stop(self) -> None:
        """From now on time passes by `later` alone."""
        now = time.monotonic() + self._values[1]
        self._values[0], self._values[1] = 0.0, now

    def close(self) -> None:
        os.close(self._fd)


def follow(path: str) -> None:
    """Makes this process, and its forks, read the time from that clock."""
    with open(path, "r+b") as file:
        values, machine = memoryview(mmap.mmap(file.fileno(), 16)).cast("d"), time.monotonic
    time.monotonic = lambda: machine() * values[0] + values[1]
