"""A device that ends each step when the test says so."""

import os
import select
import threading

from baton.engine import Engine


class ToldEvent:
    """An event that passes when the test calls `happens`."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self.query = self._told.is_set
        self.happens = self._told.set

    def synchronize(self) -> None:
        self._told.wait()

    def elapsed_time(self, later: "ToldEvent", /) -> float:
        return 1.0


class ToldDevice:
    """Of an engine. `events`: two for each launched step, its begin and its end."""

    def __init__(self, engine: Engine) -> None:
        self.events: list[ToldEvent] = []
        self._loop, self._fd = engine.loop, engine.loop.landings_fd
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        engine.runner._record = self._record

    def woken(self, within: float = 0.0) -> bool:
        """Whether the loop of a worker would wake within so many seconds."""
        woken = bool(self._poll.poll(1e3 * within))
        if woken:
            os.eventfd_read(self._fd)
        return woken

    def finish(self) -> None:
        """Ends and lands all steps under way."""
        self._loop.frozen = True
        for event in self.events:
            event.happens()
        while self._loop.under_way:
            self._loop.step()

    def _record(self) -> ToldEvent:
        self.events.append(ToldEvent())
        return self.events[-1]
