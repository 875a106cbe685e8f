"""An endpoint of an engine over a device that takes its time. The test plays the transfer process.

On CUDA a gather or scatter goes on after the call that started it. Until its event has passed, no slot is
handed over or given back, no block is reported free, and nothing is reported injected.
"""

import fcntl
import socket
from typing import Any

import msgspec
import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer import channel as ch
from baton.kv_transfer.device.host_pool import HostPool
from baton.kv_transfer.endpoint import ranked_pool
from baton.kv_transfer.protocol import local_messages as lm
from tests.layouts import kv_layout, paged

LAYOUT = kv_layout(2, 1, 8, "float32")  # 64 B a position and layer
NO_TRACE = kv.TraceWriter(None, "")
SLOTS = 6


class LateEvent:
    def __init__(self) -> None:
        self.passed = False


class LatePool(HostPool):
    """Does the work of a gather or scatter when the test lets its event pass (`go`), as a stream would."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recorded: list[LateEvent] = []
        self.work: list[tuple[LateEvent, Any]] = []  # in stream order
        self.sums: dict[int, int] = {}  # of slices, by slot

    def record(self) -> LateEvent:
        self.recorded.append(LateEvent())
        return self.recorded[-1]

    def passed(self, event: Any) -> bool:
        return event.passed

    def gather(self, batch: Any, after: Any = ()) -> Any:
        event = LateEvent()

        def work() -> None:
            assert all(e is None or e.passed for e in after), "a stream waits for these"
            HostPool.gather(self, batch)

        self.work.append((event, work))
        return event, lambda: [self.sums.get(s.slot, 0) for s in batch]

    def scatter(self, batch: Any, memory: Any = None) -> Any:
        event = LateEvent()
        copied = [msgspec.structs.replace(s, verified=True) for s in batch]
        self.work.append((event, lambda: HostPool.scatter(self, copied)))
        return event, lambda: [0 if s.verified else s.sum - self.sums[s.slot] for s in batch]

    def go(self, count: int = 1) -> None:
        """Let the stream run on by `count` events."""
        for event, work in [self.work.pop(0) for _ in range(count)]:
            work()
            event.passed = True


def late_pools(monkeypatch: pytest.MonkeyPatch) -> list[LatePool]:
    """Endpoints open a `LatePool`. Returns those that they have opened."""
    made: list[LatePool] = []

    def open_pool(*args: Any, **_: Any) -> LatePool:
        made.append(LatePool(*args))
        return made[-1]

    monkeypatch.setattr(ranked_pool, "open_pool", open_pool)
    return made


class Bench:
    """An endpoint and the transfer process's end of its channel."""

    def __init__(self, endpoint: Any, receives: Any, lowest_fd: int = 0) -> None:
        ours, theirs = kv.channel_pair()
        if lowest_fd:
            theirs = socket.socket(fileno=fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD_CLOEXEC, lowest_fd))
        self.arena = kv.Arena.create(SLOTS, 4096)
        end = kv.ArenaEnd(theirs, self.arena)
        self.cache = [torch.arange(2.0 * 8 * 16 * 8).view(2, 8, 16, 1, 8) for _ in range(2)]
        self.endpoint = endpoint(end, paged(self.cache, 16, LAYOUT, "cpu"), NO_TRACE)
        self.channel = ch.Channel(ours, receives)
        self.inbox: list[Any] = []

    def next(self, until: Any, kind: type) -> Any:
        """The next message, which must be of this type."""

        def some() -> bool:
            self._receive()
            return bool(self.inbox)

        until(some, kind.__name__, self.channel)
        message = self.inbox.pop(0)
        assert isinstance(message, kind), message
        return message

    def silent(self) -> bool:
        self._receive()
        return not self.inbox

    def _receive(self) -> None:
        for message in self.channel.receive():
            self.inbox += message.slices if isinstance(message, lm.SlicesOut) else [message]
