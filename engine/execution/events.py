"""Events in the order of the device's work, and a thread that waits for them."""

import os
import queue
import threading
import time
import weakref
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in the order of the device's work: a `torch.cuda.Event`, or its equivalent on a CPU."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Waits until the device has passed it."""

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds of the device between two events that it has passed."""


class HostEvent:
    """An event of a device that computes each call before it returns."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "HostEvent", /) -> float:
        return 1e3 * (later._at - self._at)


def record(device: torch.device) -> Event:
    """The event that the device has done all that the current stream has queued now."""
    if device.type == "cpu":
        return HostEvent()
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


class Landings:
    """A file descriptor that becomes readable when the device passes an event, or by `wake`, so that a loop
    can wait for it beside other things. Owns the descriptor and a thread that waits for one event after the
    other."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _close, self.fd, self._events)

    def wake(self) -> None:
        """Makes the descriptor readable. Any thread may call it."""
        os.eventfd_write(self.fd, 1)

    def expect(self, event: Event) -> None:
        """Makes the descriptor readable once the device passes this event, unless it has already."""
        if event.query():
            return
        if self._thread is None:
            # The thread holds no reference to this object, so that it can be collected.
            self._thread = threading.Thread(
                target=_announce, args=(self._events, os.dup(self.fd)), name="landings", daemon=True
            )
            self._thread.start()
        self._events.put(event)


def _announce(events: "queue.SimpleQueue[Event | None]", fd: int) -> None:
    while (event := events.get()) is not None:
        try:
            event.synchronize()
        finally:  # the engine's next call to a failed device raises the error
            os.eventfd_write(fd, 1)
        del event
    os.close(fd)


def _close(fd: int, events: "queue.SimpleQueue[Event | None]") -> None:
    events.put(None)
    os.close(fd)
