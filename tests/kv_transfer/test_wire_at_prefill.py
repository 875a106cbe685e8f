"""A peer of a prefill worker breaks the protocol.

It is refused each time with a reason and a counter, nothing leaks, and the next transfer works.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from . import second_wire as wire
from .conftest import Prefill
from .transfer_process import deadlines
from .wire_transfers import refused


@pytest.fixture(scope="module")
def shared() -> Iterator[Prefill]:
    """For peers that misbehave, one after the other."""
    with closing(Prefill()) as prefill:
        yield prefill


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost: prefill\r\nUser-Agent: someone who is lost\r\n\r\n", "header"),
        (wire.frame(wire.HELLO, b"x", magic=b"HTTP"), "magic"),
        (wire.frame(wire.HELLO, b"x", version=1), "version"),
        (wire.frame(99, b"x"), "type"),
        (wire.frame(wire.HELLO, b"x", b"t" * 16), "type"),
        (wire.frame(wire.HELLO, b"x", seq=1), "type"),
        (wire.frame(wire.HELLO, b"", length=1 << 31), "hello"),
        (wire.frame(wire.FETCH, b"x"), "hello"),
        (wire.frame(wire.KV, b"x"), "hello"),
        (wire.frame(wire.HELLO, b"x"), "hello"),
        (wire.frame(wire.HELLO, wire.pack(["proof", bytes(32)])), "hello"),
        (wire.frame(wire.HELLO, b"\x93\xa7refused\xa1\x80\xa0"), "hello"),  # a text that is not UTF-8
        (wire.frame(wire.HELLO, b"\x91" * 4000), "hello"),  # nested as deep as it goes
        (wire.frame(wire.HELLO, wire.pack(["open", bytes(15), 0, 1, bytes(32), b""])), "hello"),
    ],
)
def test_before_the_handshake(shared: Prefill, until: Any, data: bytes, kind: str) -> None:
    before = shared.stats().refused.get(kind, 0)
    lane = wire.Lane(socket.create_connection(("127.0.0.1", shared.port)))
    lane.sock.sendall(data)
    while lane.read()[0]:
        pass  # at most a word about why
    until(lambda: shared.stats().refused.get(kind, 0) == before + 1, f"{kind} to be counted")
    until(lambda: shared.stats().lanes == 0, "the lane to close")


def test_silent_and_too_many_connections(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill(max_handshakes=3, deadlines=deadlines(handshake=50.0))
    lanes = [wire.Lane(socket.create_connection(("127.0.0.1", prefill.port))) for _ in range(5)]
    refused(prefill, until, "handshakes", 2)
    prefill.later(50.0)
    assert [lane.read()[0] for lane in lanes] == [0] * 5, "all are closed, the silent ones by their deadline"
    assert prefill.stats().deadlines == {"handshake": 3}
    until(lambda: prefill.stats().lanes == 0, "the lanes to be gone")
    wire.connect(prefill.port)


@pytest.mark.all
def test_more_decode_workers_than_sessions_are_served_in_turn(make_prefill: Any, until: Any) -> None:
    """The session that was not used for longest ends, and its peer learns that no ACK is lost. Those with a
    transfer stay. If all have one, the next peer is refused for now."""
    prefill = make_prefill(max_sessions=3)
    lanes: list[wire.Lane] = []

    def fetch(incarnation: int) -> tuple[wire.Lane, bytes]:
        lane, transfer = wire.connect(prefill.port, incarnation=incarnation), os.urandom(16)
        lane.say(wire.FETCH, [prefill.hold(10), 0, []], transfer)
        lane.expect(wire.COMMIT)
        return lane, transfer

    busy, kept = fetch(100)
    for worker in range(8):
        lane, transfer = fetch(worker)
        lanes.append(lane)
        lane.say(wire.ACK, [], transfer)
        until(lambda n=worker + 1: prefill.poll() or len(prefill.released) == n, "the ACK")
    for lane in lanes[:-2]:
        assert lane.expect(wire.HELLO)[1][:2] == ["refused", "crowded"]
        assert lane.read()[0] == 0
    assert prefill.stats().sessions == 3
    others = [fetch(200), fetch(201)]
    late = wire.connect(prefill.port, incarnation=300)
    assert late.expect(wire.HELLO)[1][:2] == ["refused", "busy"]
    for number, (lane, transfer) in enumerate([(busy, kept), *others], 9):
        lane.say(wire.ACK, [], transfer)
        until(lambda n=number: prefill.poll() or len(prefill.released) == n, "the ACK")
    fetch(300)


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (wire.KV, b"x" * 100, "direction"),
        (wire.KV, b"x" * 5000, "length"),
        (wire.FETCH, b"x" * (65 << 10), "length"),
        (wire.FETCH, wire.pack([b"p" * 16, 0, [[5, 5]]]), "message"),
        (wire.ABORT, b"\x91\xa1\x80", "message"),  # a text that is not UTF-8
        (wire.ABORT, b"\x91" * 60_000, "message"),
        (wire.ABORTED, wire.pack(["gone", 0]), "message"),
        (wire.HELLO, wire.pack(["proof", bytes(32)]), "message"),
        (
            wire.HELLO,
            wire.pack(["refused", "incarnation", "prefill 0 is now 7"]),
            "by_peer",
        ),  # after its proof
        (wire.REACH, wire.pack([True, ""]), "order"),
        (wire.TAKEN, wire.pack([[3]]), "foreign"),
    ],
)
def test_an_authenticated_peer_that_breaks_the_protocol(
    shared: Prefill, until: Any, kind: int, body: bytes, reason: str
) -> None:
    before, prefill_id = shared.stats().refused.get(reason, 0), shared.open(10)
    lane = wire.connect(shared.port)
    lane.say(wire.FETCH, [prefill_id, 0, [[0, 10]]], os.urandom(16))
    until(lambda: shared.sender.has_fetch(prefill_id), "the FETCH")
    lane.send(kind, body)
    refused(shared, until, reason, before + 1)
    until(lambda: not shared.sender.has_fetch(prefill_id), "its transfer to end with its session")
    assert shared.stats().sessions == 0
    assert lane.read()[0] == 0


def test_sessions_of_two_lanes(make_prefill: Any, until: Any) -> None:
    """Control goes down lane 0 only; without all its lanes a session ends; a new one ends the old."""
    prefill = make_prefill(deadlines=deadlines(handshake=50.0))
    first, second = (wire.connect(prefill.port, session=b"a" * 16, number=i, lanes=2) for i in (0, 1))
    until(lambda: prefill.stats().sessions == 1, "the session")
    second.say(wire.FETCH, [b"p" * 16, 0, [[0, 10]]], os.urandom(16))
    refused(prefill, until, "order")
    assert [first.read()[0], second.read()[0]] == [0, 0]
    alone = wire.connect(prefill.port, session=b"b" * 16, lanes=2)
    until(lambda: prefill.later(50.0) or prefill.stats().deadlines == {"handshake": 1}, "the deadline")
    assert alone.read()[0] == 0
    old, new = wire.connect(prefill.port), wire.connect(prefill.port, session=b"c" * 16)
    assert old.read()[0] == 0, "a peer has one session"
    for number, lanes in ((0, 1), (1, 2)):
        stray = wire.connect(prefill.port, session=b"c" * 16, number=number, lanes=lanes)
        assert wire.unpack(stray.read()[3])[:2] == ["refused", "hello"], "it does not fit the session"
    assert prefill.stats().sessions == 1
    new.sock.close()


def test_damaged_control_messages(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    damages: dict[str, Any] = {"header": {"check": 1}, "control": {"checksum": 1}}
    for kind, damage in damages.items():
        lane = wire.connect(prefill.port)
        until(lambda: prefill.stats().sessions == 1, "the session")
        lane.send(wire.ABORT, wire.pack(["gone"]), **damage)
        assert lane.read()[0] == 0
        until(lambda kind=kind: prefill.stats().checksum_failures.get(kind) == 1, f"{kind} to be counted")


def test_peers_of_two_wire_versions_refuse_each_other(
    make_prefill: Any, make_decode: Any, until: Any
) -> None:
    """Each side finds the other's version in a header, and logs both."""
    prefill = make_prefill()
    lane = wire.Lane(socket.create_connection(("127.0.0.1", prefill.port)))
    lane.send(wire.HELLO, b"of another version", version=10)
    assert lane.read()[0] == wire.HELLO, "with the version of this side in its header"
    assert lane.read()[0] == 0
    refused(prefill, until, "version")
    fake, decode = wire.FakePrefill(), make_decode(lanes=1)
    decode.receiver.fetch(
        b"d", prefill_id=b"p" * 16, kv_address=fake.address, incarnation=5, attempt=0,
        block_ids=decode.allocate(10), num_tokens=10,
    )  # fmt: skip
    lane = wire.Lane(fake.listener.accept()[0])
    assert lane.read()[0] == wire.HELLO
    lane.send(wire.HELLO, version=10)
    refused(decode, until, "version")
