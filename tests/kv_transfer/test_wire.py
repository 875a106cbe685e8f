"""A second implementation of the wire talks to real transfer processes.

First it behaves, as a decode and as a prefill worker. Then it does not, and is refused each time with a
reason and a counter, nothing leaks, and the next transfer works.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import kv_transfer as kv

from .conftest import Prefill
from .second_wire import (
    ABORT,
    ABORTED,
    ACK,
    COMMIT,
    CREDIT,
    EXPORT,
    FETCH,
    FETCH_CONTENT,
    HAVE,
    HELLO,
    KV,
    PING,
    REACH,
    SLICE,
    TAKEN,
    FakePrefill,
    Lane,
    connect,
    frame,
    pack,
    unpack,
)


def slices(n: int) -> list[tuple[dict[str, int], bytes]]:
    """`n` ≤ 16 positions of the tests' three layers, a frame for each layer, filled with noise."""
    return [
        ({"layer": i, "head_count": 2, "token_count": n, "seq": i}, os.urandom(2 * n * 2 * 16 * 4))
        for i in range(3)
    ]


@pytest.fixture
def fetching(make_decode: Any) -> Any:
    """A decode worker (one lane) that has asked a fake prefill worker for 10 positions."""

    def make(
        ranks: int = 1, about: dict[str, Any] | None = None, **deadlines: float
    ) -> tuple[Any, FakePrefill, Lane, bytes, bytes]:
        fake = FakePrefill(**(about or {}))
        limits = kv.TransferDeadlines(**deadlines)
        decode = make_decode(lanes=1, ranks=ranks, deadlines=limits, exports=True)
        blocks = decode.reserved[b"d"] = decode.allocate(10)
        decode.receiver.fetch(
            b"d",
            prefill_id=b"p" * 16,
            kv_address=fake.address,
            incarnation=5,
            attempt=0,
            block_ids=blocks,
            num_tokens=10,
        )
        lane = fake.accept()
        transfer = asked(lane)
        return decode, fake, lane, transfer, blocks

    return make


def asked(lane: Lane) -> bytes:
    transfer, message = lane.expect(FETCH)
    assert message == [b"p" * 16, 0, 1, [[0, 10]], 0, 0, 2]
    kind, _, _, payload = lane.read()
    assert (kind, unpack(payload)) == (CREDIT, [4, False])  # a frame a layer, and one for the lane
    return transfer


def serve(lane: Lane, transfer: bytes) -> list[tuple[dict[str, int], bytes]]:
    """A whole transfer, COMMIT first and the frames backwards, within the credit that there is."""
    frames = slices(10)
    lane.say(COMMIT, [[77, -0.5, [77], [-0.5]], 3, 3 * 2560], transfer)
    for head, body in reversed(frames):
        while lane.sent == lane.granted:
            assert lane.read()[0] == CREDIT
        lane.send(KV, body, transfer, **head)
    return frames


def assert_pool(decode: Any, blocks: list[int], frames: list[tuple[dict[str, int], bytes]]) -> None:
    """The pool holds these bytes (noise: NaNs among them, hence integers)."""
    for head, body in frames:
        expected = torch.frombuffer(bytearray(body), dtype=torch.int32).view(2, 10, 2, 16)
        assert torch.equal(decode.rows(blocks, head["layer"], 0, 10).view(torch.int32).cpu(), expected)


def ended(decode: Any, until: Any) -> Any:
    def event() -> Any:
        decode.poll()
        return decode.events.get(b"d")

    return until(event, "the fetch to end", decode.receiver)


# ---------------------------------------------------------------- it behaves


def test_as_a_decode_worker(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    prefill_id, transfer = prefill.hold(10, token=42), os.urandom(16)
    expected = [prefill.rows(prefill.held[prefill_id], i, 0, 10) for i in range(3)]
    lane = connect(prefill.port)
    lane.say(FETCH, [prefill_id, 0, 1, [[0, 10]], 0, 0, 2], transfer)
    kind, which, _, payload = lane.read()  # before any credit: only COMMIT can come
    assert (kind, which, unpack(payload)) == (COMMIT, transfer, [[42, None, [], []], 3, 3 * 2560])
    lane.say(CREDIT, [5, False])
    for seq in range(3):
        kind, which, head, payload = lane.read()
        assert (kind, which, head["seq"], head["token_count"]) == (KV, transfer, seq, 10)
        assert (head["sender_rank"], head["receiver_rank"]) == (0, 0)
        got = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(2, 10, 2, 16)
        assert torch.equal(got, expected[head["layer"]].cpu())
    lane.say(CREDIT, [5, True])
    kind, _, _, payload = lane.read()
    assert (kind, unpack(payload)) == (CREDIT, [5, 3])
    lane.say(ACK, [], transfer)
    until(lambda: prefill.poll() or prefill.released == {prefill_id: "acked"}, "the release", prefill.sender)
    lane.say(ACK, [], transfer)  # as after a session that might have lost the first
    lane.say(CREDIT, [6, True])
    assert next(unpack(m[3]) for m in iter(lane.read, None) if m[0] == CREDIT) == [6, 3], "it goes on"
    stats = prefill.stats()
    assert (stats.refused, stats.transfers) == ({}, {"acked": 1})
    assert prefill.sender.idle


def test_as_a_prefill_worker(fetching: Any, until: Any) -> None:
    decode, _, lane, transfer, blocks = fetching()
    lane.answers = False
    frames = serve(lane, transfer)
    event = ended(decode, until)
    assert event.first_token == kv.FirstToken(77, -0.5, (77,), (-0.5,))
    assert_pool(decode, blocks, frames)
    # Nothing is missing: what is not used of the credit is recalled, before or after the ACK.
    said = {kind: (which, unpack(payload)) for kind, which, _, payload in (lane.read(), lane.read())}
    assert said == {ACK: (transfer, []), CREDIT: (bytes(16), [4, True])}
    lane.say(CREDIT, [4, 3])
    until(lambda: decode.stats().receiver_slots_free == 16, "the slots to come home")


def export(lane: Lane, arena: kv.Arena) -> None:
    """Exports an arena of this process."""
    token = os.urandom(16)
    arena.marks[arena.num_slots * 16 :][:16] = token
    handle = struct.pack("<II", os.getpid(), arena.fd)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    lane.say(EXPORT, ["shared_memory", boot, handle, arena.num_slots, arena.slot_bytes, token])


@pytest.mark.parametrize("stale", [False, True])
def test_as_a_prefill_worker_that_exports_memory(fetching: Any, until: Any, stale: bool) -> None:
    decode, _, lane, transfer, blocks = fetching()
    lane.answers = False
    arena = kv.Arena.create(8, 4096)
    export(lane, arena)
    until(lambda: decode.poll() or select.select([lane.sock], [], [], 0)[0], "REACH", decode.receiver)
    assert lane.expect(REACH)[1] == [True, "shared_memory"]
    frames = slices(10)
    lane.say(COMMIT, [[77, None, [], []], 3, 3 * 2560], transfer)
    for i, (head, body) in enumerate(frames):
        slot, generation = 7 - i, 40 + i
        arena.slot(slot)[: len(body)] = body
        checksum = xxhash.xxh3_64_intdigest(body)
        arena.marks[slot * 16 : slot * 16 + 16] = struct.pack(
            "<QQ", generation + (stale and i == 1), checksum
        )
        fields = [slot, generation, head["seq"], head["layer"], 0, 2, 0, 10, len(body)]
        lane.say(SLICE, fields, transfer)
    if not stale:
        assert isinstance(ended(decode, until), kv.Injected)
        assert_pool(decode, blocks, frames)
        taken: list[int] = []
        while len(taken) < 3:
            taken += lane.expect(TAKEN)[1][0]
        assert sorted(taken) == [5, 6, 7]
    else:
        said: list[tuple[int, Any]] = []
        until(lambda: decode.poll() or decode.stats().transfers.get("integrity"), "its end", decode.receiver)
        while not said or said[-1][0] != ABORT:
            kind, _, _, payload = lane.read()
            said.append((kind, unpack(payload)))
        refused(decode, until, "payload")
        assert (REACH, [False, "a slice could not be read, or was wrong"]) in said
    arena.close()


@pytest.mark.parametrize(
    ("slot", "size", "reason"), [(0, 2560, "order"), (8, 2560, "length"), (0, 4097, "length")]
)
def test_a_slice_that_cannot_be(fetching: Any, until: Any, slot: int, size: int, reason: str) -> None:
    decode, _, lane, transfer, _ = fetching()
    arena = kv.Arena.create(8, 4096)
    if reason != "order":
        export(lane, arena)
        until(lambda: decode.poll() or select.select([lane.sock], [], [], 0)[0], "REACH", decode.receiver)
    lane.say(SLICE, [slot, 1, 0, 0, 0, 2, 0, 10, size], transfer)
    refused(decode, until, reason)
    arena.close()


def fp8_numbers(payload: bytes, positions: int) -> torch.Tensor:
    """The numbers that a payload of two heads of 16 stands for: values, and then their scales."""
    count = 2 * positions * 2
    assert len(payload) == count * (16 + 4)
    values = torch.frombuffer(bytearray(payload[: count * 16]), dtype=torch.float8_e4m3fn)
    scales = torch.frombuffer(bytearray(payload[count * 16 :]), dtype=torch.float32)
    return values.float().view(2, positions, 2, 16) * scales.view(2, positions, 2, 1)


def test_as_a_decode_worker_of_a_prefill_worker_with_fp8(make_prefill: Any) -> None:
    """The peer converts, so what it keeps is not asked."""
    prefill = make_prefill(layout=kv.KVLayout(3, 2, 16, "float8_e4m3fn"))
    prefill_id, transfer = prefill.hold(10, token=42), os.urandom(16)
    expected = [prefill.exact_rows(prefill.held[prefill_id], i, 0, 10) for i in range(3)]
    lane = connect(prefill.port)
    lane.say(FETCH, [prefill_id, 0, 1, [[0, 10]], 0, 0, 2], transfer)
    assert lane.expect(COMMIT) == (transfer, [[42, None, [], []], 3, 3 * 800])
    lane.say(CREDIT, [3, False])
    for _ in range(3):
        kind, _, head, payload = lane.read()
        assert (kind, head["token_count"], head["head_count"]) == (KV, 10, 2)
        assert torch.equal(fp8_numbers(payload, 10), expected[head["layer"]])


@pytest.mark.parametrize("damaged", [False, True])
def test_as_a_prefill_worker_with_fp8(fetching: Any, until: Any, damaged: bool) -> None:
    """The checksum covers the scales."""
    about = {"dtype": "float8_e4m3fn", "scales": "token_head"}
    decode, _, lane, transfer, blocks = fetching(about=about)
    bodies = []
    for layer in range(3):
        values = torch.randn(2 * 10 * 2 * 16).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = (torch.rand(2 * 10 * 2) + 0.1) * 10**layer
        bodies.append(values.numpy().tobytes() + scales.numpy().tobytes())
    lane.say(COMMIT, [[77, None, [], []], 3, 3 * 800], transfer)
    for layer, body in enumerate(bodies):
        while lane.sent == lane.granted:
            assert lane.read()[0] == CREDIT
        head = {"layer": layer, "head_count": 2, "token_count": 10, "seq": layer}
        if damaged and layer == 2:
            head["checksum"] = xxhash.xxh3_64_intdigest(body)
            body = body[:-1] + bytes([body[-1] ^ 1])
        lane.send(KV, body, transfer, **head)
    if damaged:
        assert lane.expect(ABORT) == (transfer, ["integrity"])
        return
    assert ended(decode, until).first_token == kv.FirstToken(77)
    for layer, body in enumerate(bodies):
        assert torch.equal(decode.rows(blocks, layer, 0, 10), fp8_numbers(body, 10))


def test_frames_of_a_group_have_the_heads_of_one_rank_each(make_prefill: Any, until: Any) -> None:
    """To its peer a worker of two ranks is one: all frames have sender rank 0, and one COMMIT counts them."""
    prefill = make_prefill(ranks=2)
    prefill_id, transfer = prefill.hold(10, token=42), os.urandom(16)
    expected = [prefill.rows(prefill.held[prefill_id], i, 0, 10) for i in range(3)]
    lane = connect(prefill.port)
    lane.say(FETCH, [prefill_id, 0, 1, [[0, 10]], 0, 0, 2], transfer)
    assert lane.expect(COMMIT) == (transfer, [[42, None, [], []], 6, 3 * 2560])
    lane.say(CREDIT, [6, False])
    came = set()
    for seq in range(6):
        kind, which, head, payload = lane.read()
        assert (kind, which, head["seq"], head["sender_rank"], head["head_count"]) == (
            KV,
            transfer,
            seq,
            0,
            1,
        )
        got = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(2, 10, 1, 16)
        assert torch.equal(got[:, :, 0], expected[head["layer"]][:, :, head["head_start"]])
        came.add((head["layer"], head["head_start"]))
    assert len(came) == 6
    lane.say(ACK, [], transfer)
    until(lambda: prefill.poll() or prefill.released == {prefill_id: "acked"}, "the release", prefill.sender)


def test_a_group_takes_frames_with_any_heads(fetching: Any, until: Any) -> None:
    """Four ranks, of which two hold each head. Some frames have one head, and some have both."""
    decode, _, lane, transfer, blocks = fetching(ranks=4)
    whole = slices(10)
    frames = []
    for head, body in whole:
        kv_of_layer = torch.frombuffer(bytearray(body), dtype=torch.int32).view(2, 10, 2, 16)
        for first, count in ((0, 2),) if head["layer"] == 1 else ((1, 1), (0, 1)):
            part = kv_of_layer[:, :, first : first + count].contiguous().numpy().tobytes()
            named = {"head_start": first, "head_count": count, "seq": len(frames)}
            frames.append((head | named, part))
    lane.say(COMMIT, [[77, None, [], []], 5, 3 * 2560], transfer)
    for head, body in frames:
        while lane.sent == lane.granted:
            assert lane.read()[0] == CREDIT
        lane.send(KV, body, transfer, **head)
    assert ended(decode, until).first_token == kv.FirstToken(77)
    assert_pool(decode, blocks, whole)


def test_a_fetch_of_nothing_is_answered(make_prefill: Any, until: Any) -> None:
    """Decode has all positions already, and wants the first token alone."""
    prefill = make_prefill()
    prefill_id, transfer = prefill.hold(10, token=42), os.urandom(16)
    lane = connect(prefill.port)
    lane.say(FETCH, [prefill_id, 0, 1, [], 0, 0, 2], transfer)
    assert lane.expect(COMMIT) == (transfer, [[42, None, [], []], 0, 0])
    lane.say(ACK, [], transfer)
    until(lambda: prefill.poll() or prefill.released == {prefill_id: "acked"}, "the release", prefill.sender)


# ---------------------------------------------------------------- it does not: at prefill


@pytest.fixture(scope="module")
def shared() -> Iterator[Prefill]:
    """For peers that misbehave, one after the other."""
    with closing(Prefill()) as prefill:
        yield prefill


def refused(worker: Any, until: Any, reason: str, count: int = 1) -> None:
    until(lambda: worker.stats().refused.get(reason, 0) >= count, f"{reason} to be counted")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost: prefill\r\nUser-Agent: someone who is lost\r\n\r\n", "header"),
        (frame(HELLO, b"x", magic=b"HTTP"), "magic"),
        (frame(HELLO, b"x", version=1), "version"),
        (frame(99, b"x"), "type"),
        (frame(HELLO, b"x", b"t" * 16), "type"),
        (frame(HELLO, b"x", seq=1), "type"),
        (frame(HELLO, b"", length=1 << 31), "hello"),
        (frame(FETCH, b"x"), "hello"),
        (frame(KV, b"x"), "hello"),
        (frame(HELLO, b"x"), "hello"),
        (frame(HELLO, pack(["proof", bytes(32)])), "hello"),
        (frame(HELLO, b"\x93\xa7refused\xa1\x80\xa0"), "hello"),  # a text that is not UTF-8
        (frame(HELLO, b"\x91" * 4000), "hello"),  # nested as deep as it goes
        (frame(HELLO, pack(["open", bytes(15), 0, 1, bytes(32), b""])), "hello"),
    ],
)
def test_before_the_handshake(shared: Prefill, until: Any, data: bytes, kind: str) -> None:
    before = shared.stats().refused.get(kind, 0)
    lane = Lane(socket.create_connection(("127.0.0.1", shared.port)))
    lane.sock.sendall(data)
    while lane.read()[0]:
        pass  # at most a word about why
    until(lambda: shared.stats().refused.get(kind, 0) == before + 1, f"{kind} to be counted")
    until(lambda: shared.stats().lanes == 0, "the lane to close")


def test_a_wrong_secret(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    lane = connect(prefill.port, secret=b"guessed")
    kind, _, _, payload = lane.read()
    assert (kind, unpack(payload)[:2]) == (HELLO, ["refused", "secret"])
    assert lane.read()[0] == 0
    refused(prefill, until, "secret")


def test_idle_connections_keep_no_peer_out(make_prefill: Any) -> None:
    prefill = make_prefill(max_handshakes=4)
    idle = [Lane(socket.create_connection(("127.0.0.1", prefill.port))) for _ in range(6)]
    lanes = [connect(prefill.port, session=b"s" * 16, number=i, lanes=3) for i in range(3)]
    assert [lane.read()[0] for lane in idle[:3]] == [0, 0, 0], "the oldest are closed"
    lanes[0].say(FETCH, [prefill.hold(10), 0, 1, [], 0, 0, 2], os.urandom(16))
    lanes[0].expect(COMMIT)


def test_silent_and_too_many_connections(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill(max_handshakes=3, deadlines=kv.TransferDeadlines(handshake=0.7))
    lanes = [Lane(socket.create_connection(("127.0.0.1", prefill.port))) for _ in range(5)]
    refused(prefill, until, "handshakes", 2)
    assert [lane.read()[0] for lane in lanes] == [0] * 5, "all are closed, the silent ones by their deadline"
    assert prefill.stats().deadlines == {"handshake": 3}
    until(lambda: prefill.stats().lanes == 0, "the lanes to be gone")
    connect(prefill.port)


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (KV, b"x" * 100, "direction"),
        (KV, b"x" * 5000, "length"),
        (FETCH, b"x" * (65 << 10), "length"),
        (FETCH, pack([b"p" * 16, 0, 1, [[5, 5]], 0, 0, 2]), "message"),
        (ABORT, b"\x91\xa1\x80", "message"),  # a text that is not UTF-8
        (ABORT, b"\x91" * 60_000, "message"),
        (ABORTED, pack(["gone", 0]), "message"),
        (HELLO, pack(["proof", bytes(32)]), "message"),
        (PING, pack([6, 0]), "incarnation"),
        (REACH, pack([True, ""]), "order"),
        (TAKEN, pack([[3]]), "foreign"),
    ],
)
def test_an_authenticated_peer_that_breaks_the_protocol(
    shared: Prefill, until: Any, kind: int, body: bytes, reason: str
) -> None:
    before, prefill_id = shared.stats().refused.get(reason, 0), shared.open(10)
    lane = connect(shared.port)
    lane.say(FETCH, [prefill_id, 0, 1, [[0, 10]], 0, 0, 2], os.urandom(16))
    until(lambda: shared.sender.has_fetch(prefill_id), "the FETCH")
    lane.send(kind, body)
    refused(shared, until, reason, before + 1)
    until(lambda: not shared.sender.has_fetch(prefill_id), "its transfer to end with its session")
    assert shared.stats().sessions == 0
    assert lane.read()[0] == 0


def test_sessions_of_two_lanes(make_prefill: Any, until: Any) -> None:
    """Control goes down lane 0 only; without all its lanes a session ends; a new one ends the old."""
    prefill = make_prefill(deadlines=kv.TransferDeadlines(handshake=1.0))
    first, second = (connect(prefill.port, session=b"a" * 16, number=i, lanes=2) for i in (0, 1))
    until(lambda: prefill.stats().sessions == 1, "the session")
    second.say(FETCH, [b"p" * 16, 0, 1, [[0, 10]], 0, 0, 2], os.urandom(16))
    refused(prefill, until, "order")
    assert [first.read()[0], second.read()[0]] == [0, 0]
    alone = connect(prefill.port, session=b"b" * 16, lanes=2)
    assert alone.read()[0] == 0
    assert prefill.stats().deadlines == {"handshake": 1}
    old, new = connect(prefill.port), connect(prefill.port, session=b"c" * 16)
    assert old.read()[0] == 0, "a peer has one session"
    for number, lanes in ((0, 1), (1, 2)):
        stray = connect(prefill.port, session=b"c" * 16, number=number, lanes=lanes)
        assert unpack(stray.read()[3])[:2] == ["refused", "hello"], "it does not fit the session"
    assert prefill.stats().sessions == 1
    new.sock.close()


def test_damaged_control_messages(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    damages: dict[str, Any] = {"header": {"check": 1}, "control": {"checksum": 1}}
    for kind, damage in damages.items():
        lane = connect(prefill.port)
        until(lambda: prefill.stats().sessions == 1, "the session")
        lane.send(ABORT, pack(["gone"]), **damage)
        assert lane.read()[0] == 0
        until(lambda kind=kind: prefill.stats().checksum_failures.get(kind) == 1, f"{kind} to be counted")


def test_a_part_of_the_wire_that_is_not_built_is_refused_by_name(make_prefill: Any) -> None:
    """Only the transfer ends. The session goes on."""
    prefill = make_prefill()
    lane = connect(prefill.port)
    for kind, message in (
        (FETCH, [b"p" * 16, 0, 4, [[0, 10]], 3, 0, 2]),  # several receivers
        (FETCH_CONTENT, [[b"c" * 16], 0, 4, 3, 0, 2]),
    ):
        transfer = os.urandom(16)
        lane.say(kind, message, transfer)
        assert lane.expect(ABORTED) == (transfer, ["unsupported", 0])
    lane.say(FETCH, [prefill.hold(10), 0, 1, [], 0, 0, 2], os.urandom(16))
    lane.expect(COMMIT)


def pin_of(transfer: bytes) -> bytes:
    """The name that a transfer by content has at the engine."""
    return b"pin:" + transfer


def test_chunks_of_a_prefix_cache_come_after_have(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    names = prefill.cache(3)
    lane, transfer = connect(prefill.port), os.urandom(16)
    lane.say(FETCH_CONTENT, [[names[1], names[2], b"?" * 16], 1, 1, 0, 0, 2], transfer)
    until(lambda: prefill.poll() or prefill.held, "the engine to be asked", prefill.sender)
    assert lane.expect(HAVE) == (transfer, [2])
    frames = 3 * 128 * 256 // 4096
    assert lane.expect(COMMIT) == (transfer, [[0, None, [], []], frames, 3 * 128 * 256])
    lane.say(CREDIT, [frames, False])
    heads = [head for kind, _, head, _ in (lane.read() for _ in range(frames)) if kind == KV]
    assert sorted((h["layer"], h["token_start"]) for h in heads) == [
        (layer, start) for layer in range(3) for start in range(64, 192, 16)
    ]
    lane.say(ACK, [], transfer)
    until(lambda: prefill.poll() or prefill.released, "the ACK", prefill.sender)
    assert prefill.released == {pin_of(transfer): "acked"}


def test_at_most_two_prefixes_leave_at_a_time(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    [name] = prefill.cache(1)
    lane, ids = connect(prefill.port), [os.urandom(16) for _ in range(4)]
    for transfer in ids[:3]:
        lane.say(FETCH_CONTENT, [[name], 0, 1, 0, 0, 2], transfer)
    assert lane.expect(ABORTED) == (ids[2], ["busy", 0])
    until(lambda: prefill.poll() or len(prefill.held) == 2, "the engine to be asked", prefill.sender)
    assert sorted(lane.read()[0] for _ in range(4)) == [COMMIT, COMMIT, HAVE, HAVE], "both are pinned"
    lane.say(ABORT, ["cancelled"], ids[0])
    lane.say(FETCH_CONTENT, [[name], 0, 1, 0, 0, 2], ids[3])
    until(lambda: prefill.poll() or pin_of(ids[3]) in prefill.held, "the fourth", prefill.sender)
    lane.sock.close()
    until(lambda: prefill.poll() or len(prefill.released) == 3, "no pin without its session", prefill.sender)


def test_a_pin_ends_at_its_deadline_also_if_its_peer_takes_a_byte_now_and_then(
    make_prefill: Any, until: Any
) -> None:
    prefill = make_prefill(deadlines=kv.TransferDeadlines(pin=0.5))
    [name] = prefill.cache(1)
    lane, transfer = connect(prefill.port), os.urandom(16)
    lane.say(FETCH_CONTENT, [[name], 0, 1, 0, 0, 2], transfer)
    until(lambda: prefill.poll() or prefill.held, "the engine to be asked", prefill.sender)
    for total in range(1, 6):
        lane.say(CREDIT, [total, False])
    until(lambda: prefill.poll() or prefill.released, "the deadline", prefill.sender)
    assert prefill.released == {pin_of(transfer): "deadline"}
    assert prefill.stats().deadlines == {"pin": 1}


# ---------------------------------------------------------------- it does not: at decode


@pytest.fixture
def asking(make_decode: Any) -> Any:
    """A worker (one lane) that has asked a fake worker for chunks 1 and 2 of a prompt."""

    def make() -> tuple[Any, FakePrefill, Lane, bytes]:
        fake, decode = FakePrefill(), make_decode(lanes=1)
        decode.reserved[b"d"] = decode.allocate(192)
        decode.receiver.fetch_content(
            b"d", chunks=[b"1" * 16, b"2" * 16], first_chunk=1, kv_address=fake.address, incarnation=5,
            block_ids=decode.reserved[b"d"],
        )  # fmt: skip
        lane = fake.accept()
        transfer, message = lane.expect(FETCH_CONTENT)
        assert message == [[b"1" * 16, b"2" * 16], 1, 1, 0, 0, 2]
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


def send_all(lane: Lane, transfer: bytes, frames: list[tuple[dict[str, int], bytes]]) -> None:
    for head, body in frames:
        while lane.sent == lane.granted:
            assert lane.read()[0] == CREDIT
        lane.send(KV, body, transfer, **head)


def test_a_worker_that_has_one_of_two_chunks_sends_that_one(asking: Any, until: Any) -> None:
    decode, _, lane, transfer = asking()
    frames = chunk_frames(1)
    send_all(lane, transfer, frames[:2])  # over another lane they may be faster than HAVE
    lane.say(HAVE, [1], transfer)
    send_all(lane, transfer, frames[2:])
    lane.say(COMMIT, [[0, None, [], []], 12, 12 * 4096], transfer)
    event = ended(decode, until)
    assert isinstance(event, kv.Injected)
    assert event.stats.bytes == 12 * 4096
    assert lane.expect(ACK) == (transfer, [])
    for head, body in frames:
        start = head["token_start"]
        rows = decode.rows(decode.reserved[b"d"], head["layer"], start, start + 16)
        expected = torch.frombuffer(bytearray(body), dtype=torch.int32).view(2, 16, 2, 16)
        assert torch.equal(rows.view(torch.int32).cpu(), expected)


@pytest.mark.parametrize(
    ("say", "counter"),
    [
        ([(HAVE, [3])], "have"),
        ([(HAVE, [0])], "have"),
        ([(HAVE, [1]), (HAVE, [1])], "have"),
        ([(COMMIT, [[0, None, [], []], 0, 0])], "have"),
        ([(KV, 2), (HAVE, [1])], "frame_range"),
        ([(HAVE, [1]), (KV, 2)], "frame_range"),
        ([(HAVE, [2]), (COMMIT, [[0, None, [], []], 12, 12 * 4096]), (KV, 1)], "commit"),
        ([(HAVE, [1]), ("damaged", 1)], "payload"),
    ],
)
def test_a_worker_that_contradicts_itself_about_its_chunks_ends_the_transfer_for_good(
    asking: Any, until: Any, say: list[tuple[Any, Any]], counter: str
) -> None:
    """It is not asked again: computing is as fast."""
    decode, _, lane, transfer = asking()
    for kind, what in say:
        if kind == KV:
            send_all(lane, transfer, chunk_frames(what)[: 1 if what == 2 else 12])
        elif kind == "damaged":
            head, body = chunk_frames(1)[0]
            send_all(lane, transfer, [(head | {"checksum": 1}, body)])
        else:
            lane.say(kind, what, transfer)
    assert ended(decode, until) == kv.FetchFailed(b"d", "integrity")
    assert lane.expect(ABORT) == (transfer, ["integrity"])
    assert decode.stats().refused == {counter: 1}


def test_a_fetch_is_not_answered_with_have(fetching: Any, until: Any) -> None:
    decode, _, lane, transfer, _ = fetching()
    lane.say(HAVE, [1], transfer)
    assert lane.expect(ABORT) == (transfer, ["integrity"])
    assert decode.stats().refused == {"have": 1}


@pytest.mark.parametrize(
    ("change", "counter"),
    [
        ({"checksum": 1}, "payload"),
        ({"layer": 3}, "frame_fields"),
        ({"kind": 1}, "state"),
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
    lane.send(KV, second[1], transfer, **second[0])
    lane.send(KV, body, transfer, **(head | change))
    assert lane.expect(ABORT) == (transfer, ["integrity"])
    refused(decode, until, counter)
    assert decode.stats().checksum_failures == ({"payload": 1} if counter == "payload" else {})
    fetch = decode.receiver._fetches[b"d"]
    until(lambda: decode.poll() or fetch.refetches, "the engine to ask again", decode.receiver)
    again, _ = lane.expect(FETCH)
    assert again != transfer
    while lane.sent == lane.granted:
        lane.read()
    lane.send(KV, body, transfer, **head)  # stale: its transfer has ended
    frames = serve(lane, again)
    assert isinstance(ended(decode, until), kv.Injected)
    assert_pool(decode, blocks, frames)
    assert decode.stats().late_frames == 1


def test_integrity_is_tried_three_times_and_then_given_up(fetching: Any, until: Any) -> None:
    decode, _, lane, transfer, _ = fetching()
    for attempt in range(3):
        (head, body), *_ = slices(10)
        lane.send(KV, body, transfer, **head, checksum=1)
        lane.expect(ABORT)
        until(lambda: select.select([decode.receiver], [], [], 0)[0], "the engine to be told")
        decode.poll()
        if attempt < 2:
            transfer, _ = lane.expect(FETCH)
            while lane.sent == lane.granted:
                lane.read()
    assert ended(decode, until) == kv.FetchFailed(b"d", "integrity")
    assert decode.stats().checksum_failures == {"payload": 3}
    until(lambda: decode.stats().receiver_slots_free == 16 and decode.receiver.idle, "the slots to come home")


def test_a_frame_of_no_transfer(fetching: Any, until: Any) -> None:
    decode, _, lane, transfer, _ = fetching()
    (head, body), *_ = slices(10)
    lane.send(KV, body, os.urandom(16), **head)
    refused(decode, until, "transfer_id")
    serve(lane, transfer)
    assert isinstance(ended(decode, until), kv.Injected), "the frame took a credit, and that came back"


@pytest.mark.parametrize("how", ["credit", "recall", "length", "header", "eof"])
def test_what_ends_the_session(fetching: Any, until: Any, how: str) -> None:
    """Decode reopens its lanes under a new session, and FETCHes again."""
    decode, fake, lane, transfer, blocks = fetching()
    frames = slices(10)
    lane.send(KV, frames[0][1], transfer, **frames[0][0])
    if how == "credit":
        for _ in range(4):
            lane.send(KV, frames[1][1], os.urandom(16), **frames[1][0])
    elif how == "recall":
        lane.say(CREDIT, [4, 0])
    elif how == "length":
        lane.send(KV, bytes(8192), transfer)
    elif how == "header":
        lane.send(KV, frames[1][1], transfer, **frames[1][0], check=1)
    else:
        lane.sock.sendall(frame(KV, frames[1][1], transfer, **frames[1][0])[:999])  # in mid-frame
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


def kv_refetched(decode: Any, fake: FakePrefill) -> Lane:
    """The lane of decode's next session; its engine must poll to ask for it."""
    while not select.select([fake.listener], [], [], 0.05)[0]:
        decode.poll()
    return fake.accept()


def test_a_session_lost_once_all_has_come_costs_nothing(fetching: Any, until: Any) -> None:
    """Nothing is asked for again, and prefill learns over the next session that it may let go."""
    decode, fake, lane, transfer, blocks = fetching()
    frames = serve(lane, transfer)
    kind, _, _, payload = lane.read()
    assert (kind, unpack(payload)) == (CREDIT, [4, True]), "decode misses nothing any more"
    lane.sock.close()
    until(lambda: decode.stats().sessions == 0, "decode to notice")
    assert isinstance(ended(decode, until), kv.Injected)
    assert_pool(decode, blocks, frames)
    assert fake.accept().expect(ACK) == (transfer, [])


def test_a_commit_whose_frames_never_come(fetching: Any, until: Any) -> None:
    """Nor any other: the frames are lost, and their credits with them. Only a new session has any."""
    decode, fake, lane, transfer, _ = fetching(progress=0.5)
    lane.say(COMMIT, [[77, None, [], []], 3, 3 * 2560], transfer)
    assert lane.read()[0] == 0, "the session ends"
    assert decode.stats().deadlines == {"progress": 1}
    asked(kv_refetched(decode, fake))


def test_a_transfer_that_stalls_beside_one_that_does_not(fetching: Any, until: Any) -> None:
    decode, fake, lane, transfer, _ = fetching(progress=0.5)
    lane.say(COMMIT, [[77, None, [], []], 3, 3 * 2560], transfer)
    decode.receiver.fetch(
        b"e", prefill_id=b"q" * 16, kv_address=fake.address, incarnation=5, attempt=0,
        block_ids=decode.allocate(10),
        num_tokens=10,
    )  # fmt: skip
    other, _ = lane.expect(FETCH)
    head, body = slices(10)[0]
    lane.send(KV, body, other, **head)
    assert lane.expect(ABORT) == (transfer, ["deadline"])
    assert decode.stats().sessions == 1


def test_a_peer_that_falls_silent(fetching: Any, until: Any) -> None:
    """The lane stays open, as over a network that is gone; no PING comes."""
    decode, fake, silent, _, _ = fetching(peer_dead=1.0)
    session = kv_refetched(decode, fake)
    assert decode.stats().deadlines == {"peer_dead": 1}
    assert silent.sock.fileno() >= 0
    serve(session, asked(session))
    assert isinstance(ended(decode, until), kv.Injected)


def test_a_peer_whose_engine_hangs(fetching: Any) -> None:
    decode, fake, lane, _, _ = fetching()
    lane.say(PING, [5, 11_000])
    kv_refetched(decode, fake)
    assert decode.stats().deadlines == {"engine_dead": 1}


def test_mutated_frames(fetching: Any, until: Any) -> None:
    """Frames damaged at random, with a right header checksum: no crash, no wrong byte, and it still works."""
    rng = random.Random(5)
    decode, fake, lane, transfer, _ = fetching()
    for _ in range(40):
        while lane.sent < lane.granted:
            head, body = rng.choice(slices(10))
            field = rng.choice([*head, "kind", "head_start", "length", "checksum", "flags", "version"])
            value = rng.choice([0, 1, 2, 3, 10, 255, 65535, rng.getrandbits(16)])
            bad = head | {field: value if field != "version" else value % 256}
            try:
                lane.send(
                    rng.choice([KV, KV, KV, COMMIT, CREDIT]), body, rng.choice([transfer, bytes(16)]), **bad
                )
            except OSError:
                break
        decode.poll()
        if b"d" in decode.events:
            break
        lane.sock.setblocking(False)
        if select.select([fake.listener], [], [], 0.1)[0]:
            lane = fake.accept()
            transfer = asked(lane)
    decode.poll()
    assert decode.process.poll() is None, "the transfer process died"
    assert not isinstance(decode.events.get(b"d"), kv.Injected)
