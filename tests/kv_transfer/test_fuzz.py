"""Noise and damage by the thousand against live transfer processes: nothing dies, grows, or is believed.

`second_wire` holds authenticated sessions with them, and sends what a broken network,
a broken peer and a malicious one could send. Damage in transit leaves checksums as they were; forgeries carry
right ones. Between two rounds real transfers run over the same processes, and every byte is compared.
"""

import os
import random
from collections import deque
from typing import Any

import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer.wait import wait
from tests.system.machine import resident_bytes

from . import second_wire as wire
from .noise import Noise, drained, hostile_frames

POSITIONS = 96  # of a prompt that a decode worker fetches
ROUND = 250  # frames between two looks at the state of things
GROWTH = 8 << 20  # bytes by which a process may grow once it is warm: tables are bounded, allocators round up
MANY = pytest.param(100_000, marks=pytest.mark.long)
# Ids are forgotten after a second, so that memory must be flat after a short while.
DEADLINES = kv.TransferDeadlines(tombstone=1.0, fetch_wait=1.0, hold=20.0)


Frame = tuple[dict[str, int], bytes]  # fields of the header, payload


class Flat:
    """The memory of a process, once it is warm, stays where it is."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._warm: list[int] | None = None

    def look(self, progress: float) -> None:
        now = [resident_bytes(pid) for pid in self._pids]
        if self._warm is None and progress >= 0.2:
            self._warm = now
        if self._warm is not None:
            grown = [a - b for a, b in zip(now, self._warm, strict=True)]
            assert max(grown) < GROWTH, f"grew by {grown} bytes"


# ---------------------------------------------------------------- against a sender


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [3_000, MANY])
def test_a_sender_among_noise(make_pair: Any, count: int) -> None:
    settings = {"deadlines": DEADLINES, "blocks": 256, "exports": True}
    pair = make_pair(settings, settings)
    cached = pair.prefill.cache(1)
    noise = Noise(random.Random(count), [])
    frames = hostile_frames(noise)
    flat = Flat(pair.prefill.process.pid, pair.decode.process.pid)
    sent = 0
    while sent < count:
        noise.ids = [pair.prefill.hold(random.Random(sent).randrange(1, 60)) for _ in range(4)]
        noise.ids += [*cached, *(os.urandom(16) for _ in range(4))]
        lane: wire.Lane | None = None
        for _ in range(ROUND):
            if lane is None:
                lane = wire.connect(pair.prefill.port, memory=wire.this_host())
            try:
                lane.sock.sendall(next(frames))
                sent += 1
            except (ConnectionError, TimeoutError):
                lane = None
            if lane is not None and not drained(lane.sock):
                lane.sock.close()
                lane = None
            pair.prefill.poll()
        if lane is not None:
            lane.sock.close()
        for prefill_id in list(pair.prefill.held):
            pair.prefill.sender.close(prefill_id, "cancelled")
        truth(pair)
        pair.assert_whole()
        flat.look(sent / count)
    assert pair.prefill.process.poll() is None
    assert pair.prefill.stats().refused, "nothing was refused: this was no noise"


def truth(pair: Any) -> None:
    """A real transfer between real workers: bit for bit."""
    prefill_id = pair.prefill.hold(50)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 50)
    assert isinstance(pair.event(decode_id), kv.Injected)
    pair.assert_same(blocks, decode_id, 0, 50)
    pair.decode.release(decode_id)


# ---------------------------------------------------------------- against a receiver


class Source(wire.FakePrefill):
    """A fake prefill worker at the end of a decode worker's lane, before and after it breaks."""

    def __init__(self, decode: Any) -> None:
        super().__init__(memory=wire.this_host())
        self._decode = decode
        self.lane: wire.Lane | None = None
        self.transfer = b""  # of the last FETCH

    def fetched(self) -> tuple[bytes, list[int]]:
        """The decode worker asks it for the KV of a prompt: decode id and blocks."""
        decode, decode_id = self._decode, os.urandom(16)
        blocks = decode.reserved[decode_id] = decode.allocate(POSITIONS)
        decode.receiver.fetch(
            decode_id, prefill_id=b"p" * 16, kv_address=self.address, incarnation=5, attempt=0,
            block_ids=blocks,
            num_tokens=POSITIONS,
        )  # fmt: skip
        return decode_id, blocks

    def listen(self) -> bool:
        """Takes what decode says, or the next lane that it opens; whether there was something. Decode's
        engine has its turn first."""
        self._decode.poll()
        waiting = [self.listener, *([self.lane.sock] if self.lane else [])]
        readable = wait([each.fileno() for each in waiting], 0.02)
        try:
            if self.lane is not None and self.lane.sock.fileno() in readable:
                kind, transfer, _, _ = self.lane.read()
                if kind == 0:
                    self.lost()
                elif kind == wire.FETCH:
                    self.transfer = transfer
            elif self.listener.fileno() in readable:
                self.lost()
                self.lane = self.accept()
        except (OSError, AssertionError, ValueError):
            self.lost()  # it broke in mid-word
        return bool(readable)

    def send(self, data: bytes, frames: int = 0) -> None:
        assert self.lane is not None
        self.lane.sent += frames
        try:
            self.lane.sock.sendall(data)
        except OSError:
            self.lost()

    @property
    def credit(self) -> int:
        """KV frames that it may send; none before there is something to send."""
        return self.lane.granted - self.lane.sent if self.lane is not None and self.transfer else 0

    def lost(self) -> None:
        if self.lane is not None:
            self.lane.sock.close()
        self.lane, self.transfer = None, b""


def slices() -> list[Frame]:
    """A prompt's KV in frames of 16 positions of a layer, filled with noise."""
    cuts = [(layer, start) for layer in range(3) for start in range(0, POSITIONS, 16)]
    return [
        (
            {"layer": layer, "head_count": 2, "token_start": start, "token_count": 16, "seq": seq},
            os.urandom(4096),
        )
        for seq, (layer, start) in enumerate(cuts)
    ]


def commit_of(frames: list[Frame], transfer: bytes) -> bytes:
    return wire.frame(wire.COMMIT, wire.pack([[77, None, [], []], len(frames), 4096 * len(frames)]), transfer)


def hostile(noise: Noise, transfer: bytes, frames: list[Frame]) -> tuple[bytes, int, bool]:
    """What a decode worker may be sent within its credit, how much of that it takes, and whether the line
    goes dead with it.

    Never a wrong payload under a right checksum: a peer that knows the secret could lie, and no checksum
    would tell.
    """
    rng = noise.rng
    head, body = rng.choice(frames)
    right = wire.frame(wire.KV, body, transfer, **head)
    kind = rng.random()
    if kind < 0.40:
        return noise.damaged(right, first=64), 1, False  # the payload alone: the lane goes on
    if kind < 0.65:
        field = rng.choice(["token_start", "token_count", "head_start", "head_count", "seq", "kind"])
        return wire.frame(wire.KV, body, transfer, **(head | {field: impossible(noise, field)})), 1, False
    if kind < 0.75:
        return wire.frame(wire.KV, body, rng.randbytes(16), **head), 1, False
    if kind < 0.94:
        return right, 1, False  # and perhaps a second time
    if kind < 0.96:
        return commit_of(frames, transfer), 0, False
    if kind < 0.985:
        return wire.frame(wire.ABORTED, wire.pack(["integrity", 1]), transfer), 0, False
    if kind < 0.99:
        return noise.forged(), 0, False
    if kind < 0.995:
        return noise.damaged(right), 1, False
    return rng.choice([rng.randbytes(rng.randrange(1, 3000)), right[: rng.randrange(1, 4000)]]), 1, True


def impossible(noise: Noise, field: str) -> int:
    """A value that makes the frame contradict itself, or what was asked for. A position that is another
    frame's would be a lie instead."""
    value = noise.number() & 0xFFFF
    return value + 1 if field == "token_start" and value % 16 == 0 else value


def honest(transfer: bytes, frames: list[Frame]) -> list[tuple[bytes, int]]:
    return [
        (commit_of(frames, transfer), 0),
        *((wire.frame(wire.KV, body, transfer, **head), 1) for head, body in frames),
    ]


def assert_pool(decode: Any, blocks: list[int], frames: list[Frame]) -> None:
    """The pool holds these bytes (noise: NaNs among them, hence integers)."""
    for head, body in frames:
        start = head["token_start"]
        expected = torch.frombuffer(bytearray(body), dtype=torch.int32).view(2, 16, 2, 16)
        rows = decode.rows(blocks, head["layer"], start, start + 16)
        assert torch.equal(rows.view(torch.int32).cpu(), expected)


@pytest.mark.all
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [500, MANY])
def test_a_receiver_among_noise(make_decode: Any, until: Any, count: int) -> None:
    decode = make_decode(lanes=1, deadlines=DEADLINES, blocks=256, slots=64)
    source = Source(decode)
    noise = Noise(random.Random(count), [b"p" * 16])
    flat = Flat(decode.process.pid)
    sent = believed = 0
    while sent < count:
        decode_id, blocks = source.fetched()
        frames = slices()
        mood = noise.rng.random()
        quiet = mood < 0.5  # then only the truth: it must come through, whatever was before
        damage = 0.03 if mood < 0.25 else 0.0  # of its payloads on the way: what comes through must be right
        served, silent = b"", 0
        untold: deque[tuple[bytes, int]] = deque()  # of `served`, still to be told
        while decode_id not in decode.events:
            silent = 0 if source.listen() else silent + 1
            if silent > 10:
                source.lost()  # the two sides count the frames of a broken stream in their own ways
            if source.lane is None or not source.transfer:
                continue
            if quiet and source.transfer != served:
                served = source.transfer
                untold = deque(honest(served, frames))
            while quiet and source.transfer == served and untold and source.credit >= untold[0][1]:
                data, size = untold.popleft()
                hit = size and noise.rng.random() < damage
                source.send(noise.damaged(data, first=64) if hit else data, size)
                sent += bool(hit)
            while not quiet and source.credit:
                data, size, dead = hostile(noise, source.transfer, frames)
                source.send(data, size)
                sent += 1
                if dead:
                    source.lost()
        outcome = decode.events.pop(decode_id)
        if isinstance(outcome, kv.Injected):
            believed += 1
            assert_pool(decode, blocks, frames)
        decode.release(decode_id)
        flat.look(sent / count)
    assert believed > count / 400
    assert decode.process.poll() is None
    source.lost()

    def home() -> bool:
        decode.poll()
        return decode.stats().receiver_slots_free == 64

    until(home, "the slots to come home", decode.receiver)
    assert decode.receiver.idle
    assert decode.stats().checksum_failures["payload"] > 0
