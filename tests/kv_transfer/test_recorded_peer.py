"""Recorded peers of wire versions 3 to 5 still work: its bytes mean the same, and today's workers serve it.

If a frame differs from the recording, the code broke the wire. Then the code changes back, or the wire gets a
new version with a recording of its own. That one holds `frame_of` for each of its values, and must equal what
`second_wire.frame` makes of them: an encoder does not vouch for itself.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer.endpoint import receiver
from baton.kv_transfer.protocol import hello
from baton.kv_transfer.protocol import messages as m
from baton.kv_transfer.protocol.frame import ChecksumWriter, FrameType, Header, pack, parse

from .recorded_peer import RECORDINGS, SECRET, RecordedPeer, payload

ABOUT = ("model of the tests", "kv3 layers=3 kv_heads=2 head_dim=16", "float32", "none", 4096)
SENDERS = {n: m.Identity("sender", (3, n), "recorded sender", 5, 0, 1, *ABOUT) for n in RECORDINGS}
RECEIVERS = {n: m.Identity("receiver", (3, n), "recorded receiver", 6, 0, 1, *ABOUT) for n in RECORDINGS}
FINISHED, RUNNING = b"finished prefill", b"running  prefill"
KV_OF_LAYERS = (torch.arange(3 * 2 * 2 * 2 * 16) / 8 - 20).view(3, 2, 2, 2, 16)  # two positions
FETCHED, CONTENT, RANKS, ABORTED, STATE = (bytes([i]) * 16 for i in range(1, 6))  # transfer ids

Value = tuple[bytes, m.Control | m.Hello] | tuple[Header, bytes]
FIRST_TOKEN = 42, -0.5, (42, 7), (-0.5, -2.0)
KV_FRAMES: list[Value] = [
    (Header(FrameType.KV, FETCHED, i, 0, 0, 2, 0, 2, i, 512), KV_OF_LAYERS[i].numpy().tobytes())
    for i in range(3)
]
VALUES: dict[str, list[Value]] = {
    "fetch": [
        (FETCHED, m.Fetch(FINISHED, 0, 1, ((0, 2),), 0, 0, 2)),
        (FETCHED, m.Commit(m.FirstToken(*FIRST_TOKEN), 3, 3 * 512)),
        (bytes(16), m.Credit(4)),
        *KV_FRAMES,
    ],
    "acknowledged": [
        (FETCHED, m.Ack()),
        (bytes(16), m.Credit(4, recall=True)),
        (bytes(16), m.CreditReturned(4, 3)),
        (bytes(16), m.Ping(6, 0)),
        (bytes(16), m.Ping(5, 0)),
    ],
    "fetch of a running prefill": [(ABORTED, m.Fetch(RUNNING, 0, 1, ((0, 2),), 0, 0, 2))],
    "aborted": [(ABORTED, m.Abort("cancelled")), (ABORTED, m.Aborted("cancelled", 0))],
    "content": [
        (CONTENT, m.FetchContent((b"hash of a chunk.",), 3, 1, 0, 0, 2)),
        (CONTENT, m.Aborted("unsupported", 0)),
    ],
    "two receivers": [
        (RANKS, m.Fetch(RUNNING, 0, 2, ((0, 2),), 1, 0, 2)),
        (RANKS, m.Aborted("unsupported", 0)),
    ],
    "state": [
        (STATE, m.Fetch(RUNNING, 1, 1, ((0, 2),), 0, 0, 2)),
        (Header(FrameType.KV, STATE, 1, 1, 0, 2, 2, 0, 0, 8, state_type=1), b"a state."),
        (STATE, m.Abort("integrity")),
        (STATE, m.Aborted("integrity", 1)),
    ],
    "never sent today": [
        (Header(FrameType.KV, CONTENT, 2, 0, 1, 3, 9, 4, 6, 8, sender_rank=5, receiver_rank=7), b"8 bytes."),
        (CONTENT, m.Have(2)),
        (bytes(16), m.HelloRefused("ranks", "recorded sender has rank 0 of 2")),
    ],
}

MEMORY = "boot id of another machine", b"a handle", 16, 4096, b"a token: 16 byte"
VALUES_OF_4: dict[str, list[Value]] = {
    "exported memory": [
        (FETCHED, m.Fetch(FINISHED, 0, 1, ((0, 2),), 0, 0, 2)),
        (bytes(16), m.Export("shared_memory", *MEMORY)),
        (FETCHED, m.Commit(m.FirstToken(*FIRST_TOKEN), 3, 3 * 512)),
        (bytes(16), m.Reach(True, "shared_memory")),
        (bytes(16), m.Credit(4)),
        *((FETCHED, m.SliceAt(i, i + 1, i, i, 0, 2, 0, 2, 512)) for i in range(3)),
        (bytes(16), m.Taken((0, 1, 2))),
        (FETCHED, m.Ack()),
    ],
    "memory of another machine": [
        (FETCHED, m.Fetch(FINISHED, 0, 1, ((0, 2),), 0, 0, 2)),
        (bytes(16), m.Export("shared_memory", *MEMORY)),
        (bytes(16), m.Reach(False, "another machine")),
        (FETCHED, m.Commit(m.FirstToken(*FIRST_TOKEN), 3, 3 * 512)),
        *KV_FRAMES,
        (FETCHED, m.Ack()),
    ],
}
VALUES_OF_5: dict[str, list[Value]] = {
    "exported memory": [
        *VALUES_OF_4["exported memory"][:5],
        *((FETCHED, m.Slices((m.AnySliceAt(i, i + 1, i, i, 0, 2, 0, 2, 512),))) for i in range(3)),
        *VALUES_OF_4["exported memory"][8:],
    ],
    "several slices": [
        (
            STATE,
            m.Slices(
                (m.AnySliceAt(3, 9, 0, 1, 0, 2, 5, 7, 1792), m.AnySliceAt(4, 8, 1, 0, 0, 2, 9, 0, 64, 1))
            ),
        ),
    ],
}
OF_VERSION = {3: VALUES, 4: VALUES_OF_4, 5: VALUES_OF_5}
ALL = [(version, exchange) for version, values in OF_VERSION.items() for exchange in values]


def frame_of(first: Header | bytes, value: m.Control | m.Hello | bytes) -> bytes:
    """The frame as today's code sends it: KV with its header, or a message with its transfer id."""
    body = value if isinstance(value, bytes) else m.encode(value)
    if not isinstance(first, Header):
        kind = m.frame_type(value) if isinstance(value, m.Control) else FrameType.HELLO
        first = Header(kind, first, length=len(body))
    return pack(first) + ChecksumWriter().message(b"", body)


@pytest.mark.parametrize(("version", "exchange"), ALL)
def test_the_recorded_bytes_have_their_values(version: int, exchange: str) -> None:
    values = OF_VERSION[version][exchange]
    for (side, name, frame), (first, value) in zip(RECORDINGS[version][exchange], values, strict=True):
        header, body = parse(frame[:64]), memoryview(payload(frame))
        assert (header.type.name, header.length) == (name, len(body))
        if isinstance(first, Header):
            assert (header, body) == (first, value)
        else:
            assert header.transfer_id == first
            to: m.Side = "receiver" if side == "sender" else "sender"
            known = m.decode_hello(body) if name == "HELLO" else m.decode(to, header.type, body)
            assert known == value
        assert frame_of(first, value) == frame, f"{name} is sent as {frame_of(first, value).hex()}"


@pytest.mark.parametrize("version", RECORDINGS)
def test_the_recorded_handshake_is_the_one_of_today(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    nonces = iter([b"r" * 32, b"s" * 32])
    monkeypatch.setattr(hello, "os", SimpleNamespace(urandom=lambda size: next(nonces)))
    initiator = hello.Initiator(SECRET, RECEIVERS[version], b"recorded session", 0, 1, incarnation=5)
    listener = hello.Listener(SECRET, SENDERS[version])
    frames = [frame for *_, frame in RECORDINGS[version]["handshake"]]
    messages: list[Any] = [m.decode_hello(memoryview(payload(frame))) for frame in frames]
    opened, replied, proof = messages
    assert initiator.open == payload(frames[0])
    assert listener.answer(opened, initiator.open) == replied
    assert initiator.reply(replied) == SENDERS[version]
    assert initiator.proof == proof
    assert listener.check(proof) == (opened, RECEIVERS[version])
    assert [frame_of(bytes(16), message) for message in messages] == frames


def finished(prefill: Any) -> None:
    """Computes the recorded prefill."""
    prefill.open(2, FINISHED)
    for layer, rows in zip(prefill.pool, KV_OF_LAYERS, strict=True):
        layer[:, prefill.held[FINISHED][0], :2] = rows
    prefill.sender.ready(FINISHED, None, 0, 2)
    prefill.sender.commit(FINISHED, kv.FirstToken(*FIRST_TOKEN))


def fetched(decode: Any, decode_id: bytes, until: Any) -> None:
    """The recorded KV arrives."""
    until(lambda: decode.poll() or decode.events.get(decode_id), "the KV", decode.receiver)
    assert decode.events[decode_id].first_token == kv.FirstToken(*FIRST_TOKEN)
    for layer, rows in enumerate(KV_OF_LAYERS):
        assert torch.equal(decode.rows(decode.reserved[decode_id], layer, 0, 2).cpu(), rows)


def test_a_recorded_receiver_fetches_from_todays_sender(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill(exports=True)  # which the peer does not know
    finished(prefill)
    prefill.open(2, RUNNING)
    with socket.create_connection(("127.0.0.1", prefill.port)) as sock:
        peer = RecordedPeer("receiver", sock, 3)
        for exchange in ("fetch", "acknowledged"):
            peer.play(exchange)
        with ThreadPoolExecutor() as pool:  # the engine of the sender refuses, as it keeps no prefix cache
            played = pool.submit(peer.play, "content")
            until(lambda: prefill.poll() or played.done(), "the refusal", prefill.sender)
            played.result()
        peer.play("two receivers")
        until(lambda: prefill.poll() or prefill.released == {FINISHED: "acked"}, "the ACK", prefill.sender)
        for exchange in ("fetch of a running prefill", "aborted"):
            peer.play(exchange)
        assert prefill.stats().sessions == 1


def test_a_recorded_sender_feeds_todays_receiver(
    make_decode: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    ids = iter([FETCHED, ABORTED, STATE, b"another transfer"])
    monkeypatch.setattr(receiver, "os", SimpleNamespace(urandom=lambda size: next(ids)))
    decode = make_decode(lanes=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        source: Any = SimpleNamespace(address=f"127.0.0.1:{server.getsockname()[1]}", incarnation=5)
        decode_id = decode.fetch(source, FINISHED, 2)
        sock, _ = server.accept()
    with sock:
        peer = RecordedPeer("sender", sock, 3)
        peer.play("fetch")
        fetched(decode, decode_id, until)
        peer.play("acknowledged")
        decode_id = decode.fetch(source, RUNNING, 2)
        peer.play("fetch of a running prefill")
        decode.receiver.cancel(decode_id)
        decode.poll()
        peer.play("aborted")
        decode.fetch(source, RUNNING, 2, attempt=1)
        peer.play("state")
        assert decode.stats().refused == {"state": 1}
        assert decode.stats().sessions == 1


@pytest.mark.parametrize("version", [4, 5])
def test_a_recorded_receiver_reads_what_todays_sender_exports(
    make_prefill: Any, until: Any, version: int
) -> None:
    prefill = make_prefill(exports=True, device="cpu")
    finished(prefill)
    with socket.create_connection(("127.0.0.1", prefill.port)) as sock:
        RecordedPeer("receiver", sock, version).play("exported memory")
        until(lambda: prefill.poll() or prefill.released == {FINISHED: "acked"}, "the ACK", prefill.sender)
    slots = [bytes(prefill.sending.arena.slot(i)[:512]) for i in range(3)]
    assert slots == [rows.numpy().tobytes() for rows in KV_OF_LAYERS]


def test_todays_receiver_cannot_read_what_a_recorded_sender_exports(
    make_decode: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    monkeypatch.setattr(receiver, "os", SimpleNamespace(urandom=lambda size: FETCHED))
    decode = make_decode(lanes=1, exports=True, device="cpu")
    with socket.create_server(("127.0.0.1", 0)) as server:
        source: Any = SimpleNamespace(address=f"127.0.0.1:{server.getsockname()[1]}", incarnation=5)
        decode_id = decode.fetch(source, FINISHED, 2)
        sock, _ = server.accept()
    with sock, ThreadPoolExecutor() as pool:
        played = pool.submit(RecordedPeer("sender", sock, 4).play, "memory of another machine")
        fetched(decode, decode_id, until)
        played.result()
