"""A second implementation of the wire, as a decode or a prefill worker, talks to real transfer processes."""

import os
import struct
from typing import Any

import pytest
import torch
import xxhash

import baton.kv_transfer as kv
from baton.kv_transfer.wait import wait
from tests.layouts import kv_layout

from . import second_wire as wire
from .wire_transfers import assert_pool, ended, refused, serve, slices


def test_as_a_decode_worker(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    prefill_id, transfer = prefill.hold(10, token=42), os.urandom(16)
    expected = [prefill.rows(prefill.held[prefill_id], i, 0, 10) for i in range(3)]
    lane = wire.connect(prefill.port)
    lane.say(wire.FETCH, [prefill_id, 0, [[0, 10]]], transfer)
    kind, which, _, payload = lane.read()  # before any credit: only COMMIT can come
    assert (kind, which, wire.unpack(payload)) == (wire.COMMIT, transfer, [[42, None, [], []], 3, 3 * 2560])
    lane.say(wire.CREDIT, [5, False])
    for seq in range(3):
        kind, which, head, payload = lane.read()
        assert (kind, which, head["seq"], head["token_count"]) == (wire.KV, transfer, seq, 10)
        got = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(2, 10, 2, 16)
        assert torch.equal(got, expected[head["layer"]].cpu())
    lane.say(wire.CREDIT, [5, True])
    kind, _, _, payload = lane.read()
    assert (kind, wire.unpack(payload)) == (wire.CREDIT, [5, 3])
    lane.say(wire.ACK, [], transfer)
    until(lambda: prefill.poll() or prefill.released == {prefill_id: "acked"}, "the release", prefill.sender)
    lane.say(wire.ACK, [], transfer)  # as after a session that might have lost the first
    lane.say(wire.CREDIT, [6, True])
    assert next(wire.unpack(m[3]) for m in iter(lane.read, None) if m[0] == wire.CREDIT) == [6, 3], (
        "it goes on"
    )
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
    said = {kind: (which, wire.unpack(payload)) for kind, which, _, payload in (lane.read(), lane.read())}
    assert said == {wire.ACK: (transfer, []), wire.CREDIT: (bytes(16), [4, True])}
    lane.say(wire.CREDIT, [4, 3])
    until(lambda: decode.stats().receiver_slots_free == 16, "the slots to come home")


def export(lane: wire.Lane, arena: kv.Arena) -> None:
    """Exports an arena of this process."""
    token = os.urandom(16)
    arena.marks[arena.num_slots * 16 :][:16] = token
    handle = struct.pack("<II", os.getpid(), arena.fd)
    lane.say(wire.EXPORT, ["shared_memory", [handle], arena.num_slots, arena.slot_bytes, token])


@pytest.mark.parametrize("stale", [False, True])
def test_as_a_prefill_worker_that_exports_memory(fetching: Any, until: Any, stale: bool) -> None:
    decode, _, lane, transfer, blocks = fetching(about={"memory": wire.this_host()}, device="cpu")
    lane.answers = False
    arena = kv.Arena.create(8, 4096)
    export(lane, arena)
    until(lambda: decode.poll() or wait([lane.sock.fileno()], 0), "REACH", decode.receiver)
    assert lane.expect(wire.REACH)[1] == [True, "shared_memory"]
    frames, said_at = slices(10), []
    lane.say(wire.COMMIT, [[77, None, [], []], 3, 3 * 2560], transfer)
    for i, (head, body) in enumerate(frames):
        slot, generation = 7 - i, 40 + i
        arena.slot(slot)[: len(body)] = body
        checksum = xxhash.xxh3_64_intdigest(body)
        arena.marks[slot * 16 : slot * 16 + 16] = struct.pack(
            "<QQ", generation + (stale and i == 1), checksum
        )
        said_at.append([slot, generation, head["seq"], len(body), [head["layer"], 0, 2, 0, 10]])
    lane.say(wire.SLICES, [said_at], transfer)
    if not stale:
        assert isinstance(ended(decode, until), kv.Injected)
        assert_pool(decode, blocks, frames)
        taken: list[int] = []
        while len(taken) < 3:
            taken += lane.expect(wire.TAKEN)[1][0]
        assert sorted(taken) == [5, 6, 7]
    else:
        said: list[tuple[int, Any]] = []
        until(lambda: decode.poll() or decode.stats().transfers.get("integrity"), "its end", decode.receiver)
        while not said or said[-1][0] != wire.ABORT:
            kind, _, _, payload = lane.read()
            said.append((kind, wire.unpack(payload)))
        refused(decode, until, "payload")
        assert (wire.REACH, [False, "a slice could not be read, or was wrong"]) in said
    arena.close()


@pytest.mark.parametrize(
    ("slot", "size", "reason"), [(0, 2560, "order"), (8, 2560, "length"), (0, 4097, "length")]
)
def test_a_slice_that_cannot_be(fetching: Any, until: Any, slot: int, size: int, reason: str) -> None:
    decode, _, lane, transfer, _ = fetching(about={"memory": wire.this_host()}, device="cpu")
    arena = kv.Arena.create(8, 4096)
    if reason != "order":
        export(lane, arena)
        until(lambda: decode.poll() or wait([lane.sock.fileno()], 0), "REACH", decode.receiver)
    lane.say(wire.SLICES, [[[slot, 1, 0, size, [0, 0, 2, 0, 10]]]], transfer)
    refused(decode, until, reason)
    arena.close()


def fp8_numbers(payload: bytes, positions: int) -> torch.Tensor:
    """The numbers that a payload of two heads of 16 stands for: values, and then their scales."""
    count = 2 * positions * 2
    assert len(payload) == count * (16 + 4)
    values = torch.frombuffer(bytearray(payload[: count * 16]), dtype=torch.float8_e4m3fn)
    scales = torch.frombuffer(bytearray(payload[count * 16 :]), dtype=torch.float32)
    return values.float().view(2, positions, 2, 16) * scales.view(2, positions, 2, 1)


@pytest.mark.parametrize(
    ("kept", "dtype"),
    [("float8_e4m3fn", "float32"), ("float32", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")],
)
def test_as_a_decode_worker_if_one_side_keeps_fp8(make_prefill: Any, kept: str, dtype: str) -> None:
    """KV comes in FP8. Only a prefill worker that keeps something else converts."""
    prefill = make_prefill(layout=kv_layout(3, 2, 16, kept))
    prefill_id, transfer = prefill.hold(10, token=42), os.urandom(16)
    expected = [prefill.exact_rows(prefill.held[prefill_id], i, 0, 10) for i in range(3)]
    if kept != "float8_e4m3fn":
        scales = [x.abs().amax(dim=-1, keepdim=True) / 448 for x in expected]
        both = zip(expected, scales, strict=True)
        expected = [(x / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in both]
    lane = wire.connect(prefill.port, dtype=dtype)
    lane.say(wire.FETCH, [prefill_id, 0, [[0, 10]]], transfer)
    assert lane.expect(wire.COMMIT) == (transfer, [[42, None, [], []], 3, 3 * 800])
    lane.say(wire.CREDIT, [3, False])
    for _ in range(3):
        kind, _, head, payload = lane.read()
        assert (kind, head["token_count"], head["head_count"]) == (wire.KV, 10, 2)
        assert torch.equal(fp8_numbers(payload, 10), expected[head["layer"]])


@pytest.mark.parametrize("damaged", [False, True])
def test_as_a_prefill_worker_with_fp8(fetching: Any, until: Any, damaged: bool) -> None:
    """The checksum covers the scales."""
    about = {"dtype": "float8_e4m3fn"}
    decode, _, lane, transfer, blocks = fetching(about=about)
    bodies = []
    for layer in range(3):
        values = torch.randn(2 * 10 * 2 * 16).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = (torch.rand(2 * 10 * 2) + 0.1) * 10**layer
        bodies.append(values.numpy().tobytes() + scales.numpy().tobytes())
    lane.say(wire.COMMIT, [[77, None, [], []], 3, 3 * 800], transfer)
    for layer, body in enumerate(bodies):
        while lane.sent == lane.granted:
            assert lane.read()[0] == wire.CREDIT
        head = {"layer": layer, "head_count": 2, "token_count": 10, "seq": layer}
        if damaged and layer == 2:
            head["checksum"] = xxhash.xxh3_64_intdigest(body)
            body = body[:-1] + bytes([body[-1] ^ 1])
        lane.send(wire.KV, body, transfer, **head)
    if damaged:
        assert lane.expect(wire.ABORT) == (transfer, ["integrity"])
        return
    assert ended(decode, until).first_token == kv.FirstToken(77)
    for layer, body in enumerate(bodies):
        assert torch.equal(decode.rows(blocks, layer, 0, 10), fp8_numbers(body, 10))


def test_frames_of_a_group_have_the_heads_of_one_rank_each(make_prefill: Any, until: Any) -> None:
    """To its peer a worker of two ranks is one: one COMMIT counts all frames."""
    prefill = make_prefill(ranks=2)
    prefill_id, transfer = prefill.hold(10, token=42), os.urandom(16)
    expected = [prefill.rows(prefill.held[prefill_id], i, 0, 10) for i in range(3)]
    lane = wire.connect(prefill.port)
    lane.say(wire.FETCH, [prefill_id, 0, [[0, 10]]], transfer)
    assert lane.expect(wire.COMMIT) == (transfer, [[42, None, [], []], 6, 3 * 2560])
    lane.say(wire.CREDIT, [6, False])
    came = set()
    for seq in range(6):
        kind, which, head, payload = lane.read()
        assert (kind, which, head["seq"], head["head_count"]) == (wire.KV, transfer, seq, 1)
        got = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(2, 10, 1, 16)
        assert torch.equal(got[:, :, 0], expected[head["layer"]][:, :, head["head_start"]])
        came.add((head["layer"], head["head_start"]))
    assert len(came) == 6
    lane.say(wire.ACK, [], transfer)
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
    lane.say(wire.COMMIT, [[77, None, [], []], 5, 3 * 2560], transfer)
    for head, body in frames:
        while lane.sent == lane.granted:
            assert lane.read()[0] == wire.CREDIT
        lane.send(wire.KV, body, transfer, **head)
    assert ended(decode, until).first_token == kv.FirstToken(77)
    assert_pool(decode, blocks, whole)
