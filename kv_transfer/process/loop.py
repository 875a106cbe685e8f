"""An event loop over descriptors. The transfer process and each mover have one thread, which runs it.

With one thread there are no queues between threads, and no waits for Python's lock.
"""

import os
import select
from collections import deque
from collections.abc import Callable


class Loop:
    def __init__(self, before: Callable[[], float | None]) -> None:
        """`before`: called before each wait for events. Returns the most seconds to wait; None: no limit."""
        self._before = before
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._soon: deque[Callable[[], object]] = deque()
        self._calls: dict[int, Callable[[int], object]] = {}
        self._events: dict[int, int] = {}  # fd → the events it is registered for

    def wake(self, call: Callable[[], object]) -> None:
        """Calls `call` once, in this turn or the next."""
        self._soon.append(call)

    def interrupt(self) -> None:
        """Ends the present wait for events, or the next one. Signal handlers and threads may call it."""
        os.eventfd_write(self._wake_fd, 1)

    def watch(self, fd: int, events: int, call: Callable[[int], object]) -> None:
        """From now on `call(events)` whenever `fd` is ready for one of `events`."""
        before = self._events.get(fd)
        if before is None:
            self._epoll.register(fd, events)
            self._calls[fd] = call
        elif before != events:
            self._epoll.modify(fd, events)
        self._events[fd] = events

    def forget(self, fd: int) -> None:
        if self._events.pop(fd, None) is not None:
            del self._calls[fd]
            self._epoll.unregister(fd)

    def turn(self, timeout: float | None = None) -> None:
        """Wait for events (at most so many seconds), and serve each once."""
        again = self._before()
        if again is not None:
            timeout = again if timeout is None else min(timeout, again)
        for fd, events in self._epoll.poll(0 if self._soon else timeout):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd in self._calls:
                self._calls[fd](events)
        while self._soon:
            self._soon.popleft()()
