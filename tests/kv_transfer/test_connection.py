"""A connection alone, in this process: whatever bytes come, it hands over what was sent, or nothing."""

import contextlib
import random
import socket

import pytest

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.layout import Piece
from baton.kv_transfer.process.connection import Connection
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.lane_messages import Begins, Ends, Gone, LaneClosed, Report
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.protocol.frame import FrameError, FrameType, FrameWriter, Header, pack
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.wait import wait

BURST = 32  # frames
ARENA = Arena.create(1, 4 << 20)


class Owner:
    """Takes every KV frame, and keeps those whose checksum matched."""

    def __init__(self, slots: SlotPipe | None = None) -> None:
        """`slots`: may be those of an owner before it."""
        self.whole: list[tuple[Slice, bytes]] = []
        self.seen = 0
        self.reason = ""  # why it closed
        self.sent: list[int] = []  # slots
        self.dropped: list[int] = []
        self.slots = SlotPipe(ARENA) if slots is None else slots
        with contextlib.suppress(FrameError):
            while True:
                self.slots.take()
        self.slots.lay_out([0])

    def report(self, report: Report) -> None:
        match report:
            case Begins(_, s):
                self.coming = s
            case Ends(_, intact):
                self.seen += 1
                if intact:
                    s = self.coming
                    self.whole.append((s, bytes(self.slots.arena.slot(s.slot)[: s.size])))
                self.slots.lay_out([self.coming.slot])
            case Gone(_, slot, sent):
                (self.sent if sent else self.dropped).append(slot)
            case LaneClosed(_, kind):
                self.reason = kind
            case _:
                raise AssertionError("no control message was sent")


def slice_of(size: int, seq: int = 0, slot: int = 0) -> Slice:
    return Slice(Piece(0, 0, 0, 0, 0), seq=seq, size=size, slot=slot)


def receiving(sock: socket.socket, loop: Loop, owner: Owner, *, ahead: bool = False) -> Connection:
    lane = Connection(sock, loop, owner.report, TraceWriter(None, ""), ahead=ahead)
    lane.slots = owner.slots
    return lane


def sending(sock: socket.socket, loop: Loop, owner: Owner, arena: Arena = ARENA) -> Connection:
    lane = Connection(sock, loop, owner.report, TraceWriter(None, ""))
    lane.sending = arena
    return lane


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


def framed(head: Header | Slice, payload: bytes) -> bytes:
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
        lane = receiving(far, loop, owner, ahead=rng.random() < 0.5)
        lane.max_payload = 4096
        burst, right = b"", rng.randrange(BURST - 1)
        expected: list[tuple[Slice, bytes]] = []
        for seq in range(BURST):
            payload = rng.randbytes(rng.randrange(4, 1200))  # a burst is more than is read ahead
            piece = Piece(rng.randrange(9), 0, 0, 0, 0)
            head = Slice(piece, rng.randbytes(16), seq, len(payload))
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
        while not owner.reason:
            loop.turn(1.0)
        near.close()
        assert owner.whole == expected, "a damaged frame was believed, or an undamaged one was not"
        assert owner.seen >= BURST - 1
        assert owner.reason in ("header", "eof")


def test_a_lane_reads_what_there_is_when_told_to() -> None:
    """On a slow line a frame comes in dribs and drabs: each is progress, though none is a megabyte."""
    near, far = connected()
    loop, owner = Loop(lambda: None), Owner()
    lane = receiving(far, loop, owner)
    lane.max_payload = 4 << 20
    payload = random.Random(1).randbytes(2 << 20)
    head = slice_of(len(payload))
    data = framed(head, payload)
    lane.serve()
    near.sendall(data[:1064])
    while not lane.receiving:
        loop.turn(1.0)
    heard = lane.heard
    near.sendall(data[1064:2064])
    assert not wait([far.fileno()], 0.2), "it waits for more than that"
    loop.wake(lambda: lane.tick(0.0))
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
    frames = (framed(Header(FrameType.ACK, i.to_bytes(16, "big"), length=1), b"x") for i in range(2000))
    got, expected = b"", b"".join(frames)
    while not owner.reason and len(got) < len(expected):
        loop.turn(0)
        got += near.recv(1 << 20)
    assert got == expected
    lane.close("stopped", "")


def test_a_peer_that_asks_and_never_reads_does_not_fill_the_memory() -> None:
    near, far = narrow()
    loop, owner = Loop(lambda: None), Owner()
    lane = receiving(far, loop, owner)
    for _ in range(1000):
        for _ in range(100):  # so that all come long before TCP gives up the peer
            lane.push(FrameType.ABORTED, bytes(16), bytes(100))
        loop.turn(0)
        if owner.reason:
            break
    assert owner.reason == "flood"
    near.close()


def test_a_frame_pushed_onto_a_lane_that_has_just_closed_gives_its_slot_back() -> None:
    """Its owner does not know it yet."""
    near, far = connected()
    loop, owner = Loop(lambda: None), Owner()
    lane = receiving(far, loop, owner)
    lane.serve()
    near.close()
    while not owner.reason:
        loop.turn(1.0)
    lane.push_slice(slice_of(4))
    loop.turn(1.0)
    assert owner.dropped == [0]


def test_a_lane_that_closes_gives_every_slot_back_once() -> None:
    """Of a frame that is being written, too, and of one whose every byte waits to be."""
    near, far = narrow()
    loop, sender = Loop(lambda: None), Owner()
    arena = Arena.create(4, 16 << 20)
    lane = sending(far, loop, sender, arena)
    sizes = [16 << 20, 100, 200, 16 << 20]  # only the first begins, and the peer does not read
    slices = [slice_of(size, slot, slot) for slot, size in enumerate(sizes)]
    for s in slices:
        lane.push_slice(s)
    loop.turn(1.0)
    lane.close("stopped", "")
    assert sorted(sender.dropped) == [0, 1, 2, 3]
    assert sender.sent == []
    near.close()

    near, far = narrow()
    far.setblocking(False)
    while wait([], 0.2, [far.fileno()]):  # what the near end's kernel takes makes room
        with contextlib.suppress(BlockingIOError):
            far.send(bytes(1 << 20))
    lane = sending(far, loop, sender, arena)
    for s in slices[1:]:
        lane.push_slice(s)
    loop.turn(0)
    sender.dropped.clear()
    lane.close("stopped", "")
    assert sorted(sender.dropped) == [1, 2, 3]
    near.close()


@pytest.mark.all
def test_what_is_sent_moves_when_the_peer_takes_it() -> None:
    """Not when the kernel does; and what is no KV is none."""
    near, far = connected()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
    loop, sender, arena = Loop(lambda: None), Owner(), Arena.create(1, 16 << 20)
    lane = sending(far, loop, sender, arena)

    def looked(now: float) -> float:
        lane.tick(now)
        return lane.kv_moved

    lane.push(FrameType.PING, b"", b"x")
    loop.turn(1.0)
    assert looked(1.0) == 0, "no KV"
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    lane.push_slice(slice_of(16 << 20))
    loop.turn(1.0)
    before = -1
    while lane._taken != before:
        before = lane._taken
        wait([], 0.2)  # the peer's kernel takes what it has room for
        assert looked(2.0) == 2.0
    assert looked(3.0) == 2.0, "the line stands still"
    lane.push(FrameType.PING, b"", b"x")
    loop.turn(0)
    assert looked(4.0) == 2.0
    got, now = len(near.recv(1 << 16)), 5.0
    while lane._taken == before and lane._sent - got > 1 << 16:
        got += len(near.recv(1 << 16))
        looked(now)
    assert lane.kv_moved == now
    total = 2 * (64 + 1 + 8) + 64 + (16 << 20) + 8
    while got < total:
        loop.turn(0)
        got += len(near.recv(1 << 20))
    wait([], 0.1)
    assert looked(6.0) == 6.0
    lane.push(FrameType.PING, b"", b"x")
    loop.turn(0)
    near.recv(1 << 16)
    assert looked(7.0) == 6.0
    assert sender.sent == [0]
    lane.close("stopped", "")
    assert looked(8.0) == 6.0
    near.close()
