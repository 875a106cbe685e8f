"""States on the wire, with `second_wire` as the peer: each side of a session, and exported memory."""

import os
from typing import Any

import baton.kv_transfer as kv
from baton.kv_names.cache_kinds import STATE, CacheArray
from tests.layouts import kv_layout

from . import second_wire as wire
from .ranks import as_bytes

FINGERPRINT = "kv12 layers=2 @1 attention.kv=2x2x16 @0 state.conv=3x4x8:bfloat16 state.ssm=1x4x256:float32"
STATES = (
    CacheArray(STATE, "conv", 3, 4, 8, "bfloat16"),
    CacheArray(STATE, "ssm", 1, 4, 256, "float32"),
)
LAYOUT = kv_layout(2, 2, 16, "float32", STATES, (0,))
CONV = {"layer": 0, "kind": 1, "head_count": 4, "token_start": 10}
SSM = CONV | {"kind": 2}
KV_OF_10 = {"layer": 1, "head_count": 2, "token_count": 10}
SIZES = 4 * 3 * 8 * 2, 4 * 256 * 4, 10 * 2 * 2 * 16 * 4
"""Bytes of `conv`, `ssm` and the KV of ten positions."""


def state_bytes(worker: Any, slot: int) -> list[bytes]:
    return [as_bytes(layers[0][slot].cpu()).numpy().tobytes() for layers in worker.states]


def next_frame(lane: wire.Lane) -> tuple[int, dict[str, int], bytes]:
    kind, _, head, payload = lane.read()
    return (
        kind,
        {name: value for name, value in head.items() if value and name not in ("seq", "length")},
        payload,
    )


def test_as_a_decode_worker(make_prefill: Any, until: Any) -> None:
    """The peer needs nothing, has all KV, and lacks all of it."""
    prefill = make_prefill(layout=LAYOUT)
    prefill_id = prefill.hold(10, state_slot=2)
    blocks, states = prefill.held[prefill_id], state_bytes(prefill, 2)
    lane = wire.connect(prefill.port, layout=FINGERPRINT)
    lane.say(wire.CREDIT, [9, False])
    for ranges, next_positions, sizes in (([], [], ()), ([], [10], SIZES[:2]), ([[0, 10]], [], SIZES)):
        transfer = os.urandom(16)
        lane.say(wire.FETCH, [prefill_id, 0, ranges, next_positions], transfer)
        found: list[tuple[int, dict[str, int], bytes]] = []
        committed = False
        while len(found) < len(sizes) or not committed:
            kind, head, payload = next_frame(lane)
            if kind == wire.COMMIT:
                committed = True
                assert wire.unpack(payload) == [[7, None, [], []], len(sizes), sum(sizes)]
            elif kind == wire.KV:
                found.append((kind, head, payload))
        names = {name: value for name, value in CONV.items() if value}
        rows = prefill.rows(blocks, 0, 0, 10).contiguous().numpy().tobytes()
        expected = [
            (wire.KV, names, states[0]),
            (wire.KV, names | {"kind": 2}, states[1]),
            (wire.KV, KV_OF_10, rows),
        ]
        assert sorted(found, key=lambda frame: expected.index(frame)) == expected[: len(sizes)]
    lane.say(wire.ACK, [], transfer)
    until(lambda: prefill.poll() or prefill.released == {prefill_id: "acked"}, "the ACK", prefill.sender)


def asked(decode: Any, fake: wire.FakePrefill) -> tuple[wire.Lane, bytes]:
    """A session of `decode`, which asks for ten positions into slot 3 of its states."""
    blocks = decode.reserved[b"d"] = decode.allocate(10)
    decode.receiver.fetch(
        b"d", prefill_id=b"p" * 16, kv_address=fake.address, incarnation=5, attempt=0, block_ids=blocks,
        num_tokens=10, state_slot=3,
    )  # fmt: skip
    lane = fake.accept()
    transfer, message = lane.expect(wire.FETCH)
    assert message == [b"p" * 16, 0, [[0, 10]], [10]]
    assert lane.read()[0] == wire.CREDIT
    assert lane.granted == 3 + 1, "a frame for the layer with KV and for each state, and one for the lane"
    return lane, transfer


def test_as_a_prefill_worker(make_decode: Any, until: Any) -> None:
    """Frames come in any order, `ssm` in two parts."""
    decode, bodies = make_decode(lanes=1, layout=LAYOUT), [os.urandom(size) for size in SIZES]
    lane, transfer = asked(decode, wire.FakePrefill(layout=FINGERPRINT))
    half = SIZES[1] // 2
    lane.say(wire.COMMIT, [[77, None, [], []], 4, sum(SIZES)], transfer)
    frames = [
        (SSM | {"head_start": 1, "head_count": 2, "seq": 2}, bodies[1][half // 2 : half // 2 + half]),
        (KV_OF_10 | {"seq": 3}, bodies[2]),
        (CONV | {"seq": 0}, bodies[0]),
    ]
    for head, body in frames:
        lane.send(wire.KV, body, transfer, **head)
    until(lambda: decode.poll() or decode.stats().frames_received == 3, "the frames", decode.receiver)
    assert not decode.events, "heads 0 and 3 are missing"
    lane.send(wire.KV, bodies[1][:half], transfer, **SSM | {"head_count": 2, "seq": 1})  # head 1 came twice
    assert lane.expect(wire.ABORT) == (transfer, ["integrity"])
    assert decode.stats().refused == {"frame_range": 1}
    until(lambda: decode.poll() or decode.receiver._fetches[b"d"].refetches, "a FETCH", decode.receiver)
    transfer, _ = lane.expect(wire.FETCH)
    lane.say(wire.COMMIT, [[77, None, [], []], 3, sum(SIZES)], transfer)
    for seq, (head, body) in enumerate(
        zip((SSM, KV_OF_10, CONV), (bodies[1], bodies[2], bodies[0]), strict=True)
    ):
        while lane.sent == lane.granted:
            lane.read()
        lane.send(wire.KV, body, transfer, **head | {"seq": seq})
    until(lambda: decode.poll() or b"d" in decode.events, "the end", decode.receiver)
    assert isinstance(decode.events[b"d"], kv.Injected)
    assert state_bytes(decode, 3) == bodies[:2]


def test_exported_memory(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill(layout=LAYOUT, exports=True, device="cpu")
    prefill_id, transfer = prefill.hold(10, state_slot=1), os.urandom(16)
    lane = wire.connect(prefill.port, layout=FINGERPRINT, memory=wire.this_host())
    lane.say(wire.FETCH, [prefill_id, 0, [[0, 10]]], transfer)
    assert {lane.read()[0] for _ in range(2)} == {wire.EXPORT, wire.COMMIT}
    lane.say(wire.REACH, [True, ""])
    lane.say(wire.CREDIT, [3, False])
    slices = [lane.read() for _ in range(3)]
    assert {kind for kind, *_ in slices} == {wire.SLICES}
    places = [place for *_, payload in slices for [some] in [wire.unpack(payload)] for place in some]
    for number, (slot, _, *about) in enumerate(places[1:]):
        assert about == [1 + number, SIZES[number], [0, 0, 4, 10, 0, 1 + number]]
        filled = bytes(prefill.sending.arena.slot(slot)[: SIZES[number]])
        assert filled == state_bytes(prefill, 1)[number]
    lane.say(wire.TAKEN, [[slot for slot, *_ in places]])
    lane.say(wire.ACK, [], transfer)
    until(lambda: prefill.poll() or prefill.released == {prefill_id: "acked"}, "the ACK", prefill.sender)
