"""A lane alone, in this process: whatever bytes come, it hands over what was sent, or nothing."""

import contextlib
import random
import socket
from typing import Any, cast

import pytest

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.layout import Slice
from baton.kv_transfer.process.frames import LaneOwner, OutgoingFrame, SlotPipe
from baton.kv_transfer.process.lane import Lane
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.process.prefill_side import SendingSession
from baton.kv_transfer.protocol.frame import FrameError, FrameType, FrameWriter, Header, pack
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.wait import wait

BURST = 32  # frames
ARENA = Arena.create(1, 4 << 20)


class Owner(LaneOwner[Lane]):
    """Takes every KV frame, and keeps those whose checksum matched. Lets every frame begin."""

    def __init__(self, slots: SlotPipe | None = None) -> None:
        """`slots`: may be those of an owner before it."""
        self.whole: list[tuple[Header, bytes]] = []
        self.seen = 0
        self.closed = ""
        self.sent: list[OutgoingFrame] = []
        self.dropped: list[OutgoingFrame] = []
        self.slots = SlotPipe(ARENA) if slots is None else slots
        with contextlib.suppress(FrameError):
            while True:
                self.slots.take()
        self.slots.lay_out([0])

    def kv_begins(self, lane: Lane, header: Header, slot: int) -> None:
        pass

    def kv_ends(self, lane: Lane, header: Header, slot: int, intact: bool | None) -> None:
        self.seen += 1
        if intact:
            self.whole.append((header, bytes(self.slots.arena.slot(slot)[: header.length])))
        self.slots.lay_out([slot])

    def control(self, lane: Lane, header: Header, payload: memoryview) -> None:
        raise AssertionError("no control message was sent")

    def lane_closed(self, lane: Lane, kind: str, why: str) -> None:
        self.closed = kind

    def frame_begins(self, lane: Lane, frame: OutgoingFrame) -> bool:
        return True

    def frame_sent(self, lane: Lane, frame: OutgoingFrame) -> None:
        self.sent.append(frame)

    def frame_dropped(self, lane: Lane, frame: OutgoingFrame) -> None:
        self.dropped.append(frame)


def receiving(sock: socket.socket, loop: Loop, owner: Owner) -> Lane:
    lane = Lane(sock, loop, owner, TraceWriter(None, ""))
    lane.slots = owner.slots
    return lane


def sending(sock: socket.socket, loop: Loop, owner: Owner) -> Lane:
    return Lane(sock, loop, owner, TraceWriter(None, ""))


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def narrow() -> tuple[socket.socket, socket.socket]:
    """A connection that holds few bytes which the near end does not read."""
    near, far = connected()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    return near, far


def framed(head: Header, payload: bytes) -> bytes:
    return pack(head) + FrameWriter().message(b"", payload)


def flipped(rng: random.Random, data: bytes, start: int, stop: int) -> bytes:
    damaged = bytearray(data)
    for at in rng.sample(range(start, stop), rng.randrange(1, 4)):
        damaged[at] ^= 1 << rng.randrange(8)
    return bytes(damaged)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [5_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_a_mutated_frame_is_never_whole(count: int) -> None:
    """Bursts of frames, all payloads but one damaged; the last has a damaged header, or half is missing."""
    rng = random.Random(count)
    loop = Loop(lambda: None)
    mutated, slots = 0, SlotPipe(ARENA)  # each takes two descriptors
    while mutated < count:
        near, far = connected()
        owner = Owner(slots)
        lane = receiving(far, loop, owner)
        lane.max_payload = 4096
        if rng.random() < 0.5:
            lane.read_ahead()
        burst, right = b"", rng.randrange(BURST - 1)
        expected: list[tuple[Header, bytes]] = []
        for seq in range(BURST):
            payload = rng.randbytes(rng.randrange(4, 1200))  # a burst is more than is read ahead
            piece = Slice(rng.randrange(9), 0, 0, 0, 0)
            head = Header(FrameType.KV, rng.randbytes(16), piece, seq, len(payload))
            frame = framed(head, payload)
            if seq == right:
                expected.append((head, payload))
            elif seq < BURST - 1:
                frame = flipped(rng, frame, 64, len(frame))
            else:
                frame = (
                    flipped(rng, frame, 0, 64) if rng.random() < 0.9 else frame[: rng.randrange(len(frame))]
                )
            mutated += seq != right
            burst += frame
        near.sendall(burst)
        near.shutdown(socket.SHUT_WR)
        lane.serve()
        while not owner.closed:
            loop.turn(1.0)
        near.close()
        assert owner.whole == expected, "a damaged frame was believed, or an undamaged one was not"
        assert owner.seen >= BURST - 1
        assert owner.closed in ("header", "eof")


def test_a_lane_reads_what_there_is_when_told_to() -> None:
    """On a slow line a frame comes in dribs and drabs: each is progress, though none is a megabyte."""
    near, far = connected()
    loop, owner = Loop(lambda: None), Owner()
    lane = receiving(far, loop, owner)
    lane.max_payload = 4 << 20
    payload = random.Random(1).randbytes(2 << 20)
    head = Header(FrameType.KV, length=len(payload))
    data = framed(head, payload)
    lane.serve()
    near.sendall(data[:1064])
    while not lane.receiving:
        loop.turn(1.0)
    heard = lane.heard
    near.sendall(data[1064:2064])
    assert not wait([far.fileno()], 0.2), "it waits for more than that"
    loop.wake(lane.relax)
    while lane.heard == heard:
        loop.turn(1.0)
    near.setblocking(False)
    at = 2064
    while not owner.whole:
        if wait([], 0, [near.fileno()]) and at < len(data):
            at += near.send(data[at : at + 65536])
        loop.turn(0.01)
    assert owner.whole == [(head, payload)]
    lane.close("stopped", "")


def test_more_messages_at_once_than_the_kernel_takes() -> None:
    """As when a session comes up that 2,000 transfers wait for."""
    near, far = connected()
    loop, owner = Loop(lambda: None), Owner()
    lane = receiving(far, loop, owner)
    for i in range(2000):
        lane.push(FrameType.ACK, i.to_bytes(16, "big"), b"x")
    got = b""
    while not owner.closed and (lane.unsent or wait([near.fileno()], 0)):
        loop.turn(0)
        got += near.recv(1 << 20)
    expected = (framed(Header(FrameType.ACK, i.to_bytes(16, "big"), length=1), b"x") for i in range(2000))
    assert got == b"".join(expected)
    lane.close("stopped", "")


def test_a_peer_that_asks_and_never_reads_does_not_fill_the_memory() -> None:
    near, far = narrow()
    loop, owner = Loop(lambda: None), Owner()
    lane = receiving(far, loop, owner)
    while not owner.closed and lane.unsent < 1 << 27:
        for _ in range(100):  # so that all come long before TCP gives up the peer
            lane.push(FrameType.ABORTED, bytes(16), bytes(100))
        loop.turn(0)
    assert owner.closed == "flood"
    assert lane.unsent < 1 << 24
    near.close()


def test_a_frame_pushed_onto_a_lane_that_has_just_closed_gives_its_slot_back() -> None:
    """Its owner does not know it yet."""
    near, far = connected()
    loop, owner = Loop(lambda: None), Owner()
    lane = receiving(far, loop, owner)
    lane.serve()
    near.close()
    while not owner.closed:
        loop.turn(1.0)
    frame = OutgoingFrame(Header(FrameType.KV, length=4), memoryview(b"four"), 0)
    lane.push_frame(frame)
    loop.turn(1.0)
    assert owner.dropped == [frame]


def test_a_lane_that_closes_gives_every_slot_back_once() -> None:
    """Of a frame that is being written, too, and of one whose every byte waits to be."""
    near, far = narrow()
    loop, sender = Loop(lambda: None), Owner()
    lane = sending(far, loop, sender)
    payload = memoryview(bytes(16 << 20))
    sizes = [16 << 20, 100, 200, 16 << 20]  # only the first begins, and the peer does not read
    frames = [
        OutgoingFrame(Header(FrameType.KV, seq=i, length=n), payload[:n], i) for i, n in enumerate(sizes)
    ]
    for frame in frames:
        lane.push_frame(frame)
    loop.turn(1.0)
    assert sum(sizes[1:]) < lane.unsent < sum(sizes), "in the middle of the first"
    lane.close("stopped", "")
    assert sorted(f.slot for f in sender.dropped) == [0, 1, 2, 3]
    assert sender.sent == []
    near.close()

    near, far = narrow()
    far.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            far.send(payload)
    lane = sending(far, loop, sender)
    for frame in frames[1:]:
        lane.push_frame(frame)
    loop.turn(0)
    assert lane.unsent == sum(sizes[1:]) + 3 * 64 + 2 * 8, "two wait for the socket, and a part of the third"
    sender.dropped.clear()
    lane.close("stopped", "")
    assert sorted(f.slot for f in sender.dropped) == [1, 2, 3]
    near.close()


def test_a_frame_goes_to_the_lane_with_the_fewest_unsent_bytes() -> None:
    """Not in turn: one that is slow, or has a large frame, is given less."""
    sockets = [connected() for _ in range(3)]
    loop = Loop(lambda: None)  # not running: nothing leaves
    session = SendingSession(cast("Any", None), cast("Any", None), 1, b"s" * 16, 3)
    session.lanes = {n: sending(far, loop, Owner()) for n, (_, far) in enumerate(sockets)}
    for size in (5000, 1000, 3000, 1100, 1000, 1):  # to lane 0, 1, 2, 1, 1, then 2 has least
        session.send_frame(OutgoingFrame(Header(FrameType.KV, length=size), memoryview(bytes(size)), 0))
    assert [lane.unsent for lane in session.lanes.values()] == [5000, 3100, 3001]
    for pair in sockets:
        for sock in pair:
            sock.close()


@pytest.mark.all
def test_what_is_sent_moves_when_the_peer_takes_it() -> None:
    """Not when the kernel does; and what is no KV is none."""
    near, far = connected()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
    loop, sender = Loop(lambda: None), Owner()
    lane = sending(far, loop, sender)

    def looked(now: float) -> float:
        lane.look_at_sent(now)
        return lane.kv_moved

    lane.push(FrameType.PING, b"", b"x")
    loop.turn(1.0)
    assert looked(1.0) == 0, "no KV"
    payload = memoryview(random.Random(1).randbytes(16 << 20))
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    lane.push_frame(OutgoingFrame(Header(FrameType.KV, length=len(payload)), payload, 0))
    loop.turn(1.0)
    before = -1
    while lane._taken != before:
        before = lane._taken
        wait([], 0.2)  # the peer's kernel takes what it has room for
        assert looked(2.0) == 2.0
    assert lane.unsent, "in mid-frame"
    assert looked(3.0) == 2.0, "the line stands still"
    lane.push(FrameType.PING, b"", b"x")
    loop.turn(0)
    assert looked(4.0) == 2.0
    got, unsent, now = len(near.recv(1 << 16)), lane.unsent, 5.0
    while lane._taken == before and lane._sent - got > 1 << 16:
        got += len(near.recv(1 << 16))
        looked(now)
    assert lane.kv_moved == now
    assert lane.unsent == unsent, "nothing was written meanwhile"
    total = 2 * (64 + 1 + 8) + 64 + len(payload) + 8
    while got < total:
        loop.turn(0)
        got += len(near.recv(1 << 20))
    assert lane.unsent == 0
    wait([], 0.1)
    assert looked(6.0) == 6.0
    lane.push(FrameType.PING, b"", b"x")
    loop.turn(0)
    near.recv(1 << 16)
    assert looked(7.0) == 6.0
    assert [f.slot for f in sender.sent] == [0]
    lane.close("stopped", "")
    assert looked(8.0) == 6.0
    near.close()


def test_frames_of_ended_transfers_leave_no_trace() -> None:
    near, far = connected()
    loop, sender = Loop(lambda: None), Owner()
    sender.frame_begins = lambda lane, frame: False  # type: ignore[method-assign]
    lane = sending(far, loop, sender)
    for _ in range(3):
        lane.push_frame(OutgoingFrame(Header(FrameType.KV, length=4), memoryview(b"four"), 0))
    loop.turn(0)
    lane.look_at_sent(1.0)
    assert (lane.unsent, lane.kv_moved) == (0, 0.0)
    lane.close("stopped", "")
    near.close()
