"""A peer of a decode worker breaks the protocol.

The transfer or the session ends with a reason and a counter, nothing leaks, and the next transfer works.
"""

import os
from pathlib import Path
from typing import Any

import pytest

import baton.kv_transfer as kv
from baton.kv_transfer.wait import wait

from . import second_wire as wire
from .transfer_process import logging_to
from .wire_transfers import asked, assert_pool, ended, refused, serve, slices


def test_a_fetch_is_not_answered_with_have(fetching: Any, until: Any) -> None:
    decode, _, lane, transfer, _ = fetching()
    lane.say(wire.HAVE, [1], transfer)
    assert lane.expect(wire.ABORT) == (transfer, ["integrity"])
    assert decode.stats().refused == {"have": 1}


@pytest.mark.parametrize(
    ("change", "counter"),
    [
        ({"checksum": 1}, "payload"),
        ({"layer": 3}, "frame_fields"),
        ({"kind": 1}, "frame_fields"),
        ({"token_count": 9}, "frame_length"),
        ({"token_start": 1}, "frame_range"),
        ({"head_start": 1}, "frame_range"),
        ({"seq": 1 << 31}, "sequence"),
        ({"seq": 1}, "sequence"),  # twice
        ({"layer": 1}, "frame_range"),  # twice
    ],
)
def test_a_bad_frame_ends_the_transfer_not_the_lane(
    fetching: Any, until: Any, change: dict[str, int], counter: str
) -> None:
    """Decode asks again under a new transfer id, over the same lane, and no bad byte is left."""
    decode, _, lane, transfer, blocks = fetching()
    (head, body), second, _ = slices(10)
    lane.send(wire.KV, second[1], transfer, **second[0])
    lane.send(wire.KV, body, transfer, **(head | change))
    assert lane.expect(wire.ABORT) == (transfer, ["integrity"])
    refused(decode, until, counter)
    assert decode.stats().checksum_failures == ({"payload": 1} if counter == "payload" else {})
    fetch = decode.receiver._fetches[b"d"]
    until(lambda: decode.poll() or fetch.refetches, "the engine to ask again", decode.receiver)
    again, _ = lane.expect(wire.FETCH)
    assert again != transfer
    while lane.sent == lane.granted:
        lane.read()
    lane.send(wire.KV, body, transfer, **head)  # stale: its transfer has ended
    frames = serve(lane, again)
    assert isinstance(ended(decode, until), kv.Injected)
    assert_pool(decode, blocks, frames)
    assert decode.stats().late_frames == 1


def test_a_sender_that_refuses_the_proof_has_said_why(fetching: Any, until: Any, tmp_path: Path) -> None:
    """It is busy, for example. The peer breaks no rule."""
    with logging_to(tmp_path / "log") as logged:
        decode, _, lane, _, _ = fetching()
        lane.say(wire.HELLO, ["refused", "busy", "256 peers fetch from here"])
        refused(decode, until, "by_peer")
        assert decode.stats().refused == {"by_peer": 1}
        until(lambda: "'busy': '256 peers fetch from here'" in logged(), "the log")


def test_a_frame_of_no_transfer(fetching: Any, until: Any) -> None:
    decode, _, lane, transfer, _ = fetching()
    (head, body), *_ = slices(10)
    lane.send(wire.KV, body, os.urandom(16), **head)
    refused(decode, until, "transfer_id")
    serve(lane, transfer)
    assert isinstance(ended(decode, until), kv.Injected), "the frame took a credit, and that came back"


@pytest.mark.parametrize("how", ["credit", "recall", "length", "header", "eof"])
def test_what_ends_the_session(fetching: Any, until: Any, how: str) -> None:
    """Decode reopens its lanes under a new session, and FETCHes again."""
    decode, fake, lane, transfer, blocks = fetching()
    frames = slices(10)
    lane.send(wire.KV, frames[0][1], transfer, **frames[0][0])
    if how == "credit":
        for _ in range(4):
            lane.send(wire.KV, frames[1][1], os.urandom(16), **frames[1][0])
    elif how == "recall":
        lane.say(wire.CREDIT, [4, 0])
    elif how == "length":
        lane.send(wire.KV, bytes(8192), transfer)
    elif how == "header":
        lane.send(wire.KV, frames[1][1], transfer, **frames[1][0], check=1)
    else:
        lane.sock.sendall(wire.frame(wire.KV, frames[1][1], transfer, **frames[1][0])[:999])  # in mid-frame
        lane.sock.close()
    session = kv_refetched(decode, fake)
    if how in ("length", "credit"):
        refused(decode, until, how)
    elif how == "recall":
        refused(decode, until, "credit")
    elif how == "header":
        assert decode.stats().checksum_failures == {"header": 1}
    frames = serve(session, asked(session))
    assert isinstance(ended(decode, until), kv.Injected)
    assert_pool(decode, blocks, frames)


def kv_refetched(decode: Any, fake: wire.FakePrefill) -> wire.Lane:
    """The lane of decode's next session; its engine must poll to ask for it."""
    while not wait([fake.listener.fileno()], 0.05):
        decode.poll()
    return fake.accept()


def test_a_session_that_gave_way_to_another_peer_opens_again_for_a_fetch_alone(
    fetching: Any, until: Any
) -> None:
    """The peer had the ACK. To repeat it would take the place of yet another peer."""
    decode, fake, lane, transfer, _ = fetching()
    serve(lane, transfer)
    assert isinstance(ended(decode, until), kv.Injected)
    assert lane.expect(wire.ACK) == (transfer, [])
    lane.say(wire.HELLO, ["refused", "crowded", "too many peers fetch from here"])
    assert lane.read()[0] == 0
    until(lambda: decode.stats().sessions == 0, "the session to end")
    for _ in range(3):  # looks of decode at what it has to send
        decode.later(1.0)
        assert decode.stats().sessions == 0
    assert not wait([fake.listener.fileno()], 0)
    assert not decode.stats().refused


def test_a_transfer_that_stalls_beside_one_that_does_not(fetching: Any, until: Any) -> None:
    decode, fake, lane, transfer, _ = fetching(progress=50.0)
    lane.say(wire.COMMIT, [[77, None, [], []], 3, 3 * 2560], transfer)
    decode.receiver.fetch(
        b"e", prefill_id=b"q" * 16, kv_address=fake.address, incarnation=5, attempt=0,
        block_ids=decode.allocate(10),
        num_tokens=10,
    )  # fmt: skip
    other, _ = lane.expect(wire.FETCH)
    head, body = slices(10)[0]
    for _ in range(2):  # then it has read COMMIT
        decode.stats()
    decode.later(30.0)
    lane.send(wire.KV, body, other, **head)
    until(lambda: decode.stats().frames_received, "the frame")
    decode.later(50.0)
    assert lane.expect(wire.ABORT) == (transfer, ["deadline"])
    assert decode.stats().sessions == 1


def test_kv_comes_over_the_card_that_is_left_if_the_other_one_refuses(make_decode: Any, until: Any) -> None:
    """Lanes take turns with the cards, so the only lane is tried over the first one, and then over the
    second."""
    fake, decode = wire.FakePrefill(), make_decode(lanes=1)
    blocks = decode.reserved[b"d"] = decode.allocate(10)
    decode.receiver.fetch(
        b"d", prefill_id=b"p" * 16, kv_address=f"127.0.0.3,{fake.address}", incarnation=5, attempt=0,
        block_ids=blocks, num_tokens=10,
    )  # fmt: skip
    lane = fake.accept()
    serve(lane, asked(lane))
    assert isinstance(ended(decode, until), kv.Injected)
