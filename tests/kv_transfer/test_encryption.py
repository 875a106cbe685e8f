"""Encrypted lanes: a second implementation reads them, and an attacker on the network cannot change them."""

import random
import socket
from typing import Any

import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer.arena import Arena
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.protocol import frame as frames
from baton.kv_transfer.protocol.frame import DirectionKey, FrameType, LaneKeys

from .conftest import Pair
from .second_wire import COMMIT, CREDIT, FETCH, KV, Direction, connect, frame
from .test_connection import Owner, connected, receiving, sending, slice_of
from .transfer_process import deadlines

KEY, OTHER = bytes(range(32)), bytes(32)


@pytest.mark.parametrize("movers", [0, 1])
def test_as_a_decode_worker(make_prefill: Any, movers: int) -> None:
    """With a mover, lane 1 and its keys go on in another process, after frames of the transfer process."""
    prefill = make_prefill(encrypt=True, movers=movers)
    prefill_id = prefill.hold(10)
    expected = [prefill.rows(prefill.held[prefill_id], layer, 0, 10) for layer in range(3)]
    lanes = 1 + movers
    session = [
        connect(prefill.port, session=b"s" * 16, number=i, lanes=lanes, encrypt=True) for i in range(lanes)
    ]
    control, data = session[0], session[-1]
    control.say(FETCH, [prefill_id, 0, [[0, 10]]], b"t" * 16)
    control.say(CREDIT, [3, False])
    found = [data.read() for _ in range(3 + (lanes == 1))]
    frames = [f for f in found if f[0] == KV]
    assert len(frames) == 3
    for _, transfer, head, payload in frames:
        got = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(2, 10, 2, 16)
        assert transfer == b"t" * 16
        assert torch.equal(got, expected[head["layer"]].cpu())
    assert COMMIT in ([control.read()[0]] if lanes > 1 else [f[0] for f in found])


@pytest.mark.parametrize("encrypts", ["prefill", "decode"])
def test_a_peer_in_plain_text_is_refused(make_prefill: Any, make_decode: Any, encrypts: str) -> None:
    prefill = make_prefill(encrypt=encrypts == "prefill")
    decode = make_decode(encrypt=encrypts == "decode", deadlines=deadlines(unreachable=50.0))
    prefill_id = prefill.hold(10)
    decode_id = decode.fetch(prefill, prefill_id, 10)
    pair = Pair(prefill, decode)
    pair.until(lambda: prefill.stats().refused and decode.stats().refused, "the refusal")
    decode.later(50.0)
    event = pair.event(decode_id)
    assert event == kv.FetchFailed(decode_id, "unreachable")
    assert (prefill.stats().refused.keys(), decode.stats().refused.keys()) == ({"encryption"}, {"by_peer"})
    assert prefill.stats().bytes_sent == 0


def test_a_refusal_after_the_proof_is_encrypted(make_prefill: Any, make_decode: Any) -> None:
    """A worker that was started anew at its address would count attacks otherwise."""
    pair = Pair(make_prefill(encrypt=True), make_decode(encrypt=True))
    decode_id = pair.decode.fetch(pair.prefill, pair.prefill.hold(10), 10, incarnation=1)
    assert pair.event(decode_id) == kv.FetchFailed(decode_id, "incarnation")
    pair.until(lambda: (stats := pair.prefill.stats()).refused or stats.checksum_failures, "the refusal")
    assert pair.prefill.stats().checksum_failures == {}
    assert pair.prefill.stats().refused.keys() == {"by_peer"}


def sealed(key: bytes = KEY) -> list[bytes]:
    """Four frames as they leave a lane."""
    direction = Direction(key)
    return [direction.seal(frame(KV, bytes([seq]) * 300, seq=seq)) for seq in range(4)]


def read(data: bytes) -> tuple[list[int], str]:
    """The sequence numbers of the frames that a lane takes from these bytes, and why it closes."""
    near, far = connected()
    loop, owner = Loop(lambda: None), Owner()
    lane = receiving(far, loop, owner)
    lane.max_payload = 4096
    lane.encrypt(LaneKeys(DirectionKey(OTHER), DirectionKey(KEY)))
    near.sendall(data)
    near.shutdown(socket.SHUT_WR)
    lane.serve()
    while not owner.reason:
        loop.turn(1.0)
    near.close()
    for header, payload in owner.whole:
        assert payload == bytes([header.seq]) * 300
    return [header.seq for header, _ in owner.whole], owner.reason


@pytest.mark.parametrize(
    ("what", "whole"),
    [("payload", 1), ("tag", 1), ("header", 1), ("replay", 1), ("reorder", 1), ("leave out", 1),
     ("key of another lane", 0), ("plain text", 1), ("longer", 1)],
)  # fmt: skip
def test_what_an_attacker_does_to_a_frame(what: str, whole: int) -> None:
    """The lane ends at the first frame that is not as it was sent, also if its header's checksum is right."""
    frames, rng = sealed(), random.Random(what)
    match what:
        case "payload" | "tag":
            damaged = bytearray(frames[1])
            at = rng.randrange(64, 364) if what == "payload" else rng.randrange(364, 380)
            damaged[at] ^= 1 << rng.randrange(8)
            frames[1] = bytes(damaged)
        case "header":
            frames[1] = frame(KV, b"", layer=1, seq=1, length=300)[:64] + frames[1][64:]
        case "replay":
            frames.insert(1, frames[0])
        case "reorder":
            frames[1:3] = frames[2], frames[1]
        case "leave out":
            del frames[1]
        case "key of another lane":
            frames = sealed(key=OTHER)
        case "plain text":
            frames[1] = frame(KV, bytes([1]) * 300, seq=1)
        case "longer":
            frames[1] = frame(KV, b"", seq=1, length=308)[:64] + frames[1][64:]
    assert read(b"".join(frames)) == (list(range(whole)), "tag")


def test_a_stream_that_is_cut() -> None:
    assert read(b"".join(sealed())[:-1]) == ([0, 1, 2], "eof")


def test_a_lane_sends_what_the_second_implementation_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that the kernel takes in parts, messages between them, and a new key after each two frames."""
    monkeypatch.setattr(frames, "FRAMES_OF_A_KEY", 2)
    near, far = connected()
    loop, sender = Loop(lambda: None), Owner()
    lane = sending(far, loop, sender)
    lane.push(FrameType.HELLO, bytes(16), b"in plain text")
    lane.encrypt(LaneKeys(DirectionKey(KEY), DirectionKey(OTHER)))
    payload = random.Random(1).randbytes((5 << 20) + 7)
    lane.sending = Arena.create(3, 8 << 20)
    for seq in range(3):
        lane.sending.slot(seq)[: len(payload)] = payload
        lane.push_slice(slice_of(len(payload), seq, seq))
        lane.push(FrameType.PING, bytes(16), b"ping")
    near.setblocking(False)
    got = b""
    while len(sender.sent) < 3:
        loop.turn(0.01)
        try:
            got += near.recv(1 << 24)
        except BlockingIOError:
            continue
    near.setblocking(True)
    lane.close("stopped", "")
    while more := near.recv(1 << 24):
        got += more
    hello, got = got[: 64 + 13 + 8], got[64 + 13 + 8 :]
    assert hello == frame(1, b"in plain text")
    direction, found = Direction(KEY, frames_of_a_key=2), []
    while got:
        length = int.from_bytes(got[44:48], "little")
        found.append(direction.open(got[:64], got[64 : 64 + length + 16]))
        got = got[64 + length + 16 :]
    assert sorted(found) == sorted([payload, b"ping"] * 3)
