"""A real transfer process, and what the engine and service processes of its worker hold of it."""

import contextlib
import functools
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import baton.kv_transfer as kv
from baton.kv_transfer import spawn, staging
from baton.processes import spawn as spawning
from tests.forked import ForkedPopen
from tests.forked.clock import VARIABLE, Clock
from tests.within import WITHIN

SECRET = b"a cluster secret for tests"
MODEL = "model of the tests"
NEVER = 1e9  # seconds


def deadlines(**soon: float) -> kv.TransferDeadlines:
    """Deadlines that no machine is too slow for, but those in `soon`: these pass by `later`."""
    waits = {*kv.TransferDeadlines.__struct_fields__} - {"ping"}
    return kv.TransferDeadlines(**dict.fromkeys(waits, NEVER) | soon)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[Callable[[], str]]:
    """What the processes write that are started meanwhile. Each call returns all of it: `capfd` loses what
    comes while it reads."""
    before = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield path.read_text
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.write(2, path.read_bytes())


class TransferProcess:
    """Owns the process, and the ends of the engine: `sending` and `receiving`."""

    popen: Any = ForkedPopen
    """Starts the process: this, or `subprocess.Popen` as in workers."""

    def __init__(
        self, layout: kv.KVLayout, *, slots: int = 16, slot_bytes: int = 4096, secret: bytes = SECRET,
        incarnation: int | None = None, encrypt: bool = False, **config: Any,
    ) -> None:  # fmt: skip
        """`config`: other fields of `TransferConfig`."""
        self.layout = layout
        self.encrypt = encrypt
        self.incarnation = incarnation or random.getrandbits(64)
        self.sending, sending = kv.ArenaEnd.pair(slots, slot_bytes)
        self.receiving, receiving = kv.ArenaEnd.pair(slots, slot_bytes)
        self.heartbeat = kv.Heartbeat.create()
        self.service, service = kv.channel_pair()
        self.clock = Clock()
        # On every machine the same; tests of what it changes say otherwise.
        default: Any = {
            "name": "worker 0", "model_fingerprint": MODEL, "movers": 0, "deadlines": deadlines(),
            "exported_slot_bytes": staging.EXPORTED_SLOT_BYTES,  # which a test may have changed
        }  # fmt: skip
        settings = default | config
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spawning, "subprocess", SimpleNamespace(Popen=self.popen, PIPE=subprocess.PIPE))
            patch.setenv(VARIABLE, self.clock.path)
            self.process = kv.spawn_transfer(
                kv.TransferConfig(
                    incarnation=self.incarnation, layout=layout, num_slots=slots,
                    slot_bytes=slot_bytes, encrypt=encrypt, **settings,
                ),
                sending=sending, receiving=receiving, heartbeat=self.heartbeat, service=service,
                secret=secret,
            )  # fmt: skip

    @functools.cached_property
    def port(self) -> int:
        """Waits until the process is up: others start meanwhile."""
        self.service.settimeout(WITHIN)
        ready = spawn.decode_from_transfer(self.service.recv(1 << 16))
        assert isinstance(ready, spawn.Ready)
        return ready.port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stats(self) -> kv.TransferStats:
        """As of now: what was queued before the request is skipped."""
        assert self.port >= 0
        self.service.setblocking(False)
        while True:
            try:
                assert self.service.recv(1 << 16), "the transfer process is gone"
            except BlockingIOError:
                break
        self.service.settimeout(WITHIN)
        self.service.send(spawn.encode(spawn.StatsRequest()))
        while True:
            message = spawn.decode_from_transfer(self.service.recv(1 << 16))
            if isinstance(message, kv.TransferStats):
                return message

    def later(self, seconds: float) -> None:
        """Lets so much time pass at once for the process, if it runs, and makes it look at its clock."""
        assert self.port >= 0
        self.clock.later(seconds)
        with contextlib.suppress(OSError):
            self.service.send(spawn.encode(spawn.StatsRequest()))

    def later_until(self, seconds: float, met: Callable[[kv.TransferStats], object]) -> bool:
        """Lets so much time pass at once. Returns whether the process, which has looked at its clock, meets a
        condition. Once it does, no more time may pass: a mover that closes lanes would seem to hang."""
        self.later(seconds)
        found = [met(self.stats()) for _ in range(3)]
        return any(found)

    def stop(self) -> None:
        self.service.close()
        self.process.wait(WITHIN)
        self.clock.close()
        for end in (self.sending, self.receiving):
            end.channel.close()
            end.arena.close()
        self.heartbeat.close()
