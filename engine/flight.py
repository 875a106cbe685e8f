"""A step that was launched: what is on its way from the device, and how to learn that it has arrived.

    launched ──▶ sampled ──▶ over (all that it queued was computed) ──▶ landed: its tokens are known

It is sampled with its launch; but where a grammar must know the token before, which the step before it has
not brought yet, as soon as that one landed: the device computes meanwhile. On a CPU a step is over when it is
sampled.
"""

import os
import queue
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.live_request import LiveRequest
from engine.model_runner import Computed, Sampling
from engine.scheduler import Schedule


class Moment(Protocol):
    """A point in the order of what the device computes: a `torch.cuda.Event`, or its like on a CPU."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Waits until it has."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds of the device from here to there; both are passed."""
        ...


class HostMoment:
    """Of a device that computes while it is told."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "HostMoment", /) -> float:
        return 1e3 * (later._at - self._at)


def moment(device: torch.device) -> Moment:
    """Now, in the order of the current stream."""
    if device.type == "cpu":
        return HostMoment()
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


@dataclass(slots=True, eq=False)
class Flight:
    plan: Schedule
    ids: frozenset[bytes]
    """Whom it computes."""
    computed: Computed
    began: Moment
    sampling: Sampling | None = None
    """None: not yet."""
    ended: Moment | None = None
    """Once it is sampled."""

    @property
    def sampled(self) -> list[LiveRequest]:
        """Who gets a token, in the order of `sampling`."""
        return self.computed.requests

    @property
    def waits(self) -> bool:
        """A grammar must know a token that the step before it brings."""
        return any(live.grammar is not None and live.pending for live in self.sampled)

    @property
    def over(self) -> bool:
        return self.ended is not None and self.ended.query()

    def wait(self) -> None:
        assert self.ended is not None, "it is sampled before anybody waits for it"
        self.ended.synchronize()

    @property
    def seconds(self) -> float:
        """That the device took."""
        return self.began.elapsed_time(self.ended) / 1e3


class Landings:
    """A file descriptor that becomes readable when a launched step is over, so that a loop can wait for that
    beside other things. Owns it and a thread, which does nothing but wait for one flight after the other."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _close, self.fd, self._flights)

    def expect(self, flight: Flight) -> None:
        if flight.over:
            return
        if self._thread is None:
            # It knows nothing of this object, which may go.
            self._thread = threading.Thread(
                target=_announce, args=(self._flights, os.dup(self.fd)), name="landings", daemon=True
            )
            self._thread.start()
        self._flights.put(flight)


def _announce(flights: "queue.SimpleQueue[Flight | None]", fd: int) -> None:
    while (flight := flights.get()) is not None:
        try:
            flight.wait()
        finally:  # a device that failed says so to whoever asks it next
            os.eventfd_write(fd, 1)
        del flight
    os.close(fd)


def _close(fd: int, flights: "queue.SimpleQueue[Flight | None]") -> None:
    flights.put(None)
    os.close(fd)
