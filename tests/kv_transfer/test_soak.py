"""Thousands of small transfers: memory, descriptors and threads stay as they are."""

import gc
import os
import random
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import pytest

import baton.kv_transfer as kv
from tests.system.machine import resident_bytes

AT_ONCE = 8
GROWTH = 4 << 20  # bytes: allocators round up
DEADLINES = kv.TransferDeadlines(tombstone=1.0)  # a short run must see ids forgotten


def open_things(pid: int) -> tuple[int, int]:
    """Descriptors and threads."""
    return tuple(len(list(Path(f"/proc/{pid}", kind).iterdir())) for kind in ("fd", "task"))  # type: ignore[return-value]


@pytest.mark.all
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("movers", [0, 2])
@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.long)])
def test_nothing_grows(make_pair: Any, count: int, movers: int) -> None:
    gc.collect()  # garbage of earlier tests may hold descriptors
    settings = {"deadlines": DEADLINES, "movers": movers}
    pair = make_pair(settings, settings)
    assert pair.prefill.port, "it is up, and has forked"
    assert pair.decode.port
    made = [psutil.Process(worker.process.pid) for worker in (pair.prefill, pair.decode)]
    pids = [os.getpid(), *(p.pid for process in made for p in (process, *process.children()))]
    rng = random.Random(count)
    running: deque[bytes] = deque()
    warm: list[int] = []
    things: list[tuple[int, int]] = []
    for i in range(count + AT_ONCE):
        if len(running) == AT_ONCE or i >= count:
            decode_id = running.popleft()
            assert isinstance(pair.event(decode_id), kv.Injected)
            pair.decode.free += pair.decode.reserved.pop(decode_id)
            del pair.decode.events[decode_id]
        if i < count:
            n = rng.randrange(1, 40)
            running.append(pair.decode.fetch(pair.prefill, pair.prefill.hold(n), n))
        if i == count // 2:
            warm, things = [resident_bytes(pid) for pid in pids], [open_things(pid) for pid in pids]
    pair.assert_whole()
    pair.until(lambda: len(pair.prefill.released) == count, "the last ACK")
    assert [open_things(pid) for pid in pids] == things
    grown = [resident_bytes(pid) - before for pid, before in zip(pids, warm, strict=True)]
    assert max(grown) < GROWTH, f"this process, and prefill's and decode's with their movers, grew by {grown}"
