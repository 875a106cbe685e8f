"""Chunks of prefix caches on the wire: what a second implementation asks for, gets and sends."""

import os
from typing import Any

import pytest
import torch

import baton.kv_transfer as kv

from . import second_wire as wire
from .transfer_process import deadlines
from .wire_transfers import ended


def pin_of(transfer: bytes) -> bytes:
    """The name that a transfer by content has at the engine."""
    return b"pin:" + transfer


def test_chunks_of_a_prefix_cache_come_after_have(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    names = prefill.cache(3)
    lane, transfer = wire.connect(prefill.port), os.urandom(16)
    lane.say(wire.FETCH_CONTENT, [[names[1], names[2], b"?" * 16], 1], transfer)
    until(lambda: prefill.poll() or prefill.held, "the engine to be asked", prefill.sender)
    assert lane.expect(wire.HAVE) == (transfer, [2])
    frames = 3 * 128 * 256 // 4096
    assert lane.expect(wire.COMMIT) == (transfer, [[0, None, [], []], frames, 3 * 128 * 256])
    lane.say(wire.CREDIT, [frames, False])
    heads = [head for kind, _, head, _ in (lane.read() for _ in range(frames)) if kind == wire.KV]
    assert sorted((h["layer"], h["token_start"]) for h in heads) == [
        (layer, start) for layer in range(3) for start in range(64, 192, 16)
    ]
    lane.say(wire.ACK, [], transfer)
    until(lambda: prefill.poll() or prefill.released, "the ACK", prefill.sender)
    assert prefill.released == {pin_of(transfer): "acked"}


def test_at_most_two_prefixes_leave_at_a_time(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    [name] = prefill.cache(1)
    lane, ids = wire.connect(prefill.port), [os.urandom(16) for _ in range(4)]
    for transfer in ids[:3]:
        lane.say(wire.FETCH_CONTENT, [[name], 0], transfer)
    assert lane.expect(wire.ABORTED) == (ids[2], ["busy", 0])
    until(lambda: prefill.poll() or len(prefill.held) == 2, "the engine to be asked", prefill.sender)
    assert sorted(lane.read()[0] for _ in range(4)) == [wire.COMMIT, wire.COMMIT, wire.HAVE, wire.HAVE], (
        "both are pinned"
    )
    lane.say(wire.ABORT, ["cancelled"], ids[0])
    lane.say(wire.FETCH_CONTENT, [[name], 0], ids[3])
    until(lambda: prefill.poll() or pin_of(ids[3]) in prefill.held, "the fourth", prefill.sender)
    lane.sock.close()
    until(lambda: prefill.poll() or len(prefill.released) == 3, "no pin without its session", prefill.sender)


def test_a_pin_ends_at_its_deadline_also_if_its_peer_takes_a_byte_now_and_then(
    make_prefill: Any, until: Any
) -> None:
    prefill = make_prefill(deadlines=deadlines(pin=50.0))
    [name] = prefill.cache(1)
    lane, transfer = wire.connect(prefill.port), os.urandom(16)
    lane.say(wire.FETCH_CONTENT, [[name], 0], transfer)
    until(lambda: prefill.poll() or prefill.held, "the engine to be asked", prefill.sender)
    for total in range(1, 6):
        lane.say(wire.CREDIT, [total, False])
    until(lambda: prefill.later(20.0) or prefill.poll() or prefill.released, "the deadline", prefill.sender)
    assert prefill.released == {pin_of(transfer): "deadline"}
    assert prefill.stats().deadlines == {"pin": 1}


@pytest.fixture
def asking(make_decode: Any) -> Any:
    """A worker (one lane) that has asked a fake worker for chunks 1 and 2 of a prompt."""

    def make() -> tuple[Any, wire.FakePrefill, wire.Lane, bytes]:
        fake, decode = wire.FakePrefill(), make_decode(lanes=1)
        decode.reserved[b"d"] = decode.allocate(192)
        decode.receiver.fetch_content(
            b"d", chunks=[b"1" * 16, b"2" * 16], first_chunk=1, kv_address=fake.address, incarnation=5,
            block_ids=decode.reserved[b"d"],
        )  # fmt: skip
        lane = fake.accept()
        transfer, message = lane.expect(wire.FETCH_CONTENT)
        assert message == [[b"1" * 16, b"2" * 16], 1]
        return decode, fake, lane, transfer

    return make


def chunk_frames(chunk: int) -> list[tuple[dict[str, int], bytes]]:
    """The frames of one chunk, of 16 positions each. Chunk 1 has the first sequence numbers."""
    return [
        (
            {
                "layer": layer, "head_count": 2, "token_start": 64 * chunk + 16 * part, "token_count": 16,
                "seq": 12 * (chunk - 1) + 4 * layer + part,
            },
            os.urandom(4096),
        )
        for layer in range(3)
        for part in range(4)
    ]  # fmt: skip


def send_all(lane: wire.Lane, transfer: bytes, frames: list[tuple[dict[str, int], bytes]]) -> None:
    for head, body in frames:
        while lane.sent == lane.granted:
            assert lane.read()[0] == wire.CREDIT
        lane.send(wire.KV, body, transfer, **head)


def test_a_worker_that_has_one_of_two_chunks_sends_that_one(asking: Any, until: Any) -> None:
    decode, _, lane, transfer = asking()
    frames = chunk_frames(1)
    send_all(lane, transfer, frames[:2])  # over another lane they may be faster than HAVE
    lane.say(wire.HAVE, [1], transfer)
    send_all(lane, transfer, frames[2:])
    lane.say(wire.COMMIT, [[0, None, [], []], 12, 12 * 4096], transfer)
    event = ended(decode, until)
    assert isinstance(event, kv.Injected)
    assert event.stats.bytes == 12 * 4096
    assert lane.expect(wire.ACK) == (transfer, [])
    for head, body in frames:
        start = head["token_start"]
        rows = decode.rows(decode.reserved[b"d"], head["layer"], start, start + 16)
        expected = torch.frombuffer(bytearray(body), dtype=torch.int32).view(2, 16, 2, 16)
        assert torch.equal(rows.view(torch.int32).cpu(), expected)


@pytest.mark.parametrize(
    ("say", "counter"),
    [
        ([(wire.HAVE, [3])], "have"),
        ([(wire.HAVE, [0])], "have"),
        ([(wire.HAVE, [1]), (wire.HAVE, [1])], "have"),
        ([(wire.COMMIT, [[0, None, [], []], 0, 0])], "have"),
        ([(wire.KV, 2), (wire.HAVE, [1])], "frame_range"),
        ([(wire.HAVE, [1]), (wire.KV, 2)], "frame_range"),
        ([(wire.HAVE, [2]), (wire.COMMIT, [[0, None, [], []], 12, 12 * 4096]), (wire.KV, 1)], "commit"),
        ([(wire.HAVE, [1]), ("damaged", 1)], "payload"),
    ],
)
def test_a_worker_that_contradicts_itself_about_its_chunks_ends_the_transfer_for_good(
    asking: Any, until: Any, say: list[tuple[Any, Any]], counter: str
) -> None:
    """It is not asked again: computing is as fast."""
    decode, _, lane, transfer = asking()
    for kind, what in say:
        if kind == wire.KV:
            send_all(lane, transfer, chunk_frames(what)[: 1 if what == 2 else 12])
        elif kind == "damaged":
            head, body = chunk_frames(1)[0]
            send_all(lane, transfer, [(head | {"checksum": 1}, body)])
        else:
            lane.say(kind, what, transfer)
    assert ended(decode, until) == kv.FetchFailed(b"d", "integrity")
    assert lane.expect(wire.ABORT) == (transfer, ["integrity"])
    assert decode.stats().refused == {counter: 1}
