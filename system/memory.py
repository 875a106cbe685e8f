"""Memory that a process no longer needs."""

import ctypes
from contextlib import suppress


def trim() -> None:
    """The allocator gives back what it keeps of freed memory, for any thread. It takes milliseconds, and as
    much again when the memory is needed later. Other threads that allocate wait meanwhile."""
    with suppress(AttributeError):  # musl has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
