"""Arena, channel, configuration, trace and tombstones."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import baton.kv_transfer as kv
from baton.kv_names.cache_kinds import STATE, CacheArray
from baton.kv_transfer import channel as ch
from baton.kv_transfer.protocol import local_messages as lm
from baton.kv_transfer.protocol import shared
from tests.layouts import kv_layout


def test_a_child_process_shares_the_arena_and_the_heartbeat() -> None:
    arena, heartbeat = kv.Arena.create(4, 4096), kv.Heartbeat.create()
    code = (
        "import kv_transfer as kv, sys; fds = map(int, sys.argv[1:])\n"
        "a, h = kv.Arena(next(fds), 4, 4096), kv.Heartbeat(next(fds))\n"
        "assert bytes(a.slot(3)[:5]) == b'hello'; a.slot(0)[:2] = b'hi'; h.tick(); h.tick()"
    )
    arena.slot(3)[:5] = b"hello"
    fds = [arena.fd, heartbeat.fd]
    subprocess.run([sys.executable, "-c", code, *map(str, fds)], pass_fds=fds, check=True)
    assert bytes(arena.slot(0)[:2]) == b"hi"
    assert heartbeat.ticks == 2
    with pytest.raises(OSError):
        os.ftruncate(arena.fd, 4096)  # sealed: no process can take the memory away
    with pytest.raises(ValueError, match="not"):
        kv.Arena(os.dup(arena.fd), 5, 4096)
    arena.close()
    heartbeat.close()


def test_every_request_of_a_large_step_is_named() -> None:
    heartbeat = kv.Heartbeat.create()
    reader = kv.Heartbeat(os.dup(heartbeat.fd))
    ids = [i.to_bytes(16) for i in range(2 * 1024)]
    heartbeat.set_step(ids)
    assert reader.step == ids
    heartbeat.set_step(ids[:1])
    assert reader.step == ids[:1]
    reader.close()
    heartbeat.close()


SSM = CacheArray(STATE, "ssm", 1, 2, 1025, "float32")


@pytest.mark.parametrize("slot_bytes", [0, 5000, 128 << 20])
def test_bad_slot_sizes_are_named(slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="slot_bytes"):
        kv.Arena.create(4, slot_bytes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layout": kv_layout(2, 100, 256, "float32")}, "larger slots"),
        ({"layout": kv_layout(2, 1, 8, "float32", (SSM,), (1,))}, "one head of ssm"),
    ],
)
def test_a_bad_configuration_is_named(change: dict[str, Any], named: str) -> None:
    good: Any = {
        "name": "decode 0", "incarnation": 1, "model_fingerprint": "m",
        "layout": kv_layout(2, 1, 8, "float32"), "num_slots": 4, "slot_bytes": 4096,
    }  # fmt: skip
    kv.TransferConfig(**good)
    with pytest.raises(ValueError, match=named):
        kv.TransferConfig(**(good | change))


def test_a_channel_holds_back_what_does_not_fit_and_keeps_the_order() -> None:
    a, b = kv.channel_pair()
    blocked: list[bool] = []
    sender = ch.Channel(a, lm.FromReceiver, lambda: blocked.append(True))
    receiver = ch.Channel(b, lm.FromReceiver)
    total = 20_000
    for i in range(total):
        sender.send(lm.Emptied([i]))
    assert blocked
    assert sender.pending, "the socket took everything: the test tests nothing"
    got: list[int] = []
    while len(got) < total:
        while messages := receiver.receive():
            got += [m.slots[0] for m in messages]
        sender.flush()
    assert got == list(range(total))
    assert not sender.pending
    a.close()
    with pytest.raises(ch.ChannelClosed):
        receiver.receive()
    with pytest.raises(ch.ChannelClosed):
        receiver.send(lm.Emptied([1]))


def test_a_trace_on_a_full_disk_loses_events_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    trace = kv.TraceWriter("/dev/full", "prefill 0 engine")
    for _ in range(600):
        trace.instant("commit")
    trace.close()
    assert caplog.messages == ["/dev/full: No space left on device; events are lost"]


def test_a_trace_is_readable_even_when_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = kv.TraceWriter(path, "prefill 0 engine")

    def work() -> None:
        for i in range(300):
            trace.span("gather", 1.0, 1.5, layer=i)
            with trace.measure("measured"):
                trace.instant("commit")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.flush()
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert events[0]["args"] == {"name": "prefill 0 engine"}
    spans = [e for e in events if e["name"] == "gather"]
    assert len(spans) == 900
    assert (spans[0]["ph"], spans[0]["ts"], spans[0]["dur"]) == ("X", 1e6, 0.5e6)
    assert len({e["tid"] for e in spans}) == 3
    trace.close()
    trace.instant("after the end")
    off = kv.TraceWriter(None, "no process")
    off.instant("nothing")
    assert not off.enabled


def test_tombstones_are_bounded_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_TOMBSTONES", 3)
    graves: shared.Tombstones[str] = shared.Tombstones(10)
    for i in range(4):
        graves.bury(bytes([i]), f"reason {i}", now=i)
    assert [graves.get(bytes([i])) for i in range(4)] == [None, "reason 1", "reason 2", "reason 3"]
    graves.bury(b"\1", "again", now=5)
    graves.expire(13)
    assert [graves.get(bytes([i])) for i in range(4)] == [None, "again", None, None]
