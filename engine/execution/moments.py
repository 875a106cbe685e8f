"""Moments in the order of the device's work, and a thread that waits for them."""

import os
import queue
import threading
import time
import weakref
from typing import Any, Protocol

import torch


class Moment(Protocol):
    """A point in the order of the device's work: a `torch.cuda.Event`, or its equivalent on a CPU."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has passed it."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds of the device between two moments that it has passed."""
        ...


class HostMoment:
    """A moment of a device that computes each call before it returns."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "HostMoment", /) -> float:
        return 1e3 * (later._at - self._at)


def moment(device: torch.device) -> Moment:
    """The moment when the device has done all that the current stream has queued now."""
    if device.type == "cpu":
        return HostMoment()
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


class Landings:
    """A file descriptor that becomes readable when the device passes a moment, so that a loop can wait for
    it beside other things. Owns the descriptor and a thread that waits for one moment after the other."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._moments: queue.SimpleQueue[Moment | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _close, self.fd, self._moments)

    def expect(self, moment: Moment) -> None:
        """Makes the descriptor readable once the device passes this moment, unless it has already."""
        if moment.query():
            return
        if self._thread is None:
            # The thread holds no reference to this object, so that it can be collected.
            self._thread = threading.Thread(
                target=_announce, args=(self._moments, os.dup(self.fd)), name="landings", daemon=True
            )
            self._thread.start()
        self._moments.put(moment)


def _announce(moments: "queue.SimpleQueue[Moment | None]", fd: int) -> None:
    while (moment := moments.get()) is not None:
        try:
            moment.synchronize()
        finally:  # the engine's next call to a failed device raises the error
            os.eventfd_write(fd, 1)
        del moment
    os.close(fd)


def _close(fd: int, moments: "queue.SimpleQueue[Moment | None]") -> None:
    moments.put(None)
    os.close(fd)
