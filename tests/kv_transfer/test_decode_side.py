"""The receiving side of a transfer process alone: no network, and the time is told."""

import itertools
import math
from collections.abc import Collection, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

import baton.kv_transfer as kv
from baton.kv_transfer import channel as ch
from baton.kv_transfer.layout import Dtypes, Piece
from baton.kv_transfer.nixl.memory import NixlMemory
from baton.kv_transfer.process import arrivals, decode_side, link_rates, peer_exports
from baton.kv_transfer.process.decode_side import DecodeSide
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.process.tcp_session import Session
from baton.kv_transfer.protocol import local_messages as lm
from baton.kv_transfer.protocol.frame import FrameError, FrameType, Header
from baton.kv_transfer.protocol.messages import (
    Abort,
    Aborted,
    Ack,
    Commit,
    Credit,
    Export,
    Fetch,
    Identity,
    ProtocolError,
    Slices,
)
from baton.kv_transfer.slices import Slice
from tests.layouts import kv_layout
from tests.stand_in import implements, stand_in


@implements(Session)
class Peer:
    """The session that `Network` makes."""

    slot_bytes, lane_count, transport, why_lanes = 4096, 4, "tcp", ""
    dtypes, peer = Dtypes("float32"), stand_in(Identity, incarnation=9)

    def __init__(self, number: int) -> None:
        self.kv_moved = 0.0
        self.number = number
        self.said: list[tuple[Any, bytes]] = []
        self.ended = ""
        self.ways = list[int]()
        self.bad = set[int]()

    def send(self, message: Any, transfer_id: bytes = b"") -> None:
        self.said.append((message, transfer_id))

    def end(self, reason: str, detail: str) -> None:
        self.ended = reason

    def moved(self, now: float) -> None:
        self.kv_moved = now


class Network:
    """A connector. The test says whether it reaches a peer."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses  # at once
        self.attempts: list[tuple[tuple[str, int], int]] = []
        self.tried: list[tuple[set[int], bool]] = []  # ways to avoid, and whether packets are small
        self.session: Peer | None = None  # the last

    def connect(
        self, addresses: Sequence[tuple[str, int]], incarnation: int, lanes: int, avoid: Collection[int], /,
        *, narrow: bool,
    ) -> Session:  # fmt: skip
        self.attempts.append((addresses[0], lanes))
        self.tried.append((set(avoid), narrow))
        if self.refuses:
            raise ConnectionRefusedError("no process listens")
        self.session = Peer(len(self.attempts))
        return cast("Session", self.session)


def kv_slice(slots: SlotPipe, transfer_id: bytes, start: int = 0, count: int = 4, seq: int = 0) -> Slice:
    """In a slot that is laid out."""
    size = 64 * count
    return Slice(Piece(0, 0, 1, start, count), transfer_id, seq, size, slot=slots.take())


class Side:
    """A decode side, its engine's end, and a clock."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        network: Network,
        *,
        nixl: NixlMemory | None = None,
        **deadlines: float,
    ) -> None:
        self.now = 0.0
        self.is_up = False
        for module in (arrivals, decode_side, peer_exports):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        config = kv.TransferConfig(
            name="decode 0", incarnation=1, model_fingerprint="m", num_slots=4,
            slot_bytes=4096, layout=kv_layout(1, 1, 8, "float32"), max_lanes=12, movers=0,
            deadlines=kv.TransferDeadlines(**deadlines),
        )  # fmt: skip
        ours, theirs = kv.channel_pair()
        self.engine = ch.Channel(ours, lm.ToReceiver)
        self.channel = ch.Channel(theirs, lm.FromReceiver)
        self.slots = SlotPipe(kv.Arena.create(4, 4096))
        self.network = network
        self.side = DecodeSide(config, self.slots, self.channel, TransferCounters(), network.connect, nixl)

    def fetch(self, transfer_id: bytes, address: str = "[::1]:7000", incarnation: int = 9) -> None:
        self.side.engine(lm.FetchIn(transfer_id, b"p" * 16, address, incarnation, 0, ((0, 4),)))

    def told(self) -> list[Any]:
        """What the engine was."""
        self.channel.flush()
        return list(self.engine.receive())

    def down(self, reason: str) -> None:
        """The session ends, and its lanes."""
        session = cast("Session", self.network.session)
        self.side.session_down(session, reason, "")
        self.side.session_over(session)
        self.network.session, self.is_up = None, False

    def up(self) -> Peer:
        assert self.network.session is not None
        self.is_up = True
        self.side.session_up(cast("Session", self.network.session))
        return self.network.session

    def complete(self, transfer_id: bytes) -> None:
        """All of it comes, and the engine gives the slot back."""
        session = cast("Session", self.network.session)
        s = kv_slice(self.slots, transfer_id)
        self.come(session, s)
        self.side.control(session, Header(FrameType.COMMIT, transfer_id), Commit(kv.FirstToken(7), 1, 256))
        self.side.engine(lm.Emptied([s.slot]))

    def come(self, session: Session, s: Slice) -> None:
        """A frame, whole."""
        self.side.arrivals.begins(session, s)
        self.side.arrivals.came(s, True)

    def inject(self, transfer_id: bytes) -> None:
        """From FETCH to ACK."""
        self.fetch(transfer_id)
        if not self.is_up:
            self.up()
        self.complete(transfer_id)
        self.side.engine(lm.InjectedIn(transfer_id))

    def acked(self) -> list[bytes]:
        """The ACKs said in this session."""
        assert self.network.session is not None
        return [t for m, t in self.network.session.said if isinstance(m, Ack)]

    def attempts_until(self, stop: float) -> list[float]:
        """When it tries to connect, each time in vain, with a hundred ticks a second."""
        times = []
        for tick in range(round(self.now * 100) + 1, round(stop * 100) + 1):
            self.now, before = tick / 100, len(self.network.attempts)
            self.side.tick(self.now)
            if len(self.network.attempts) > before:
                times.append(self.now)
                if not self.network.refuses:
                    self.down("unreachable")
        return times


@pytest.mark.parametrize("refuses", [True, False], ids=["at once", "later"])
def test_it_connects_again_less_and_less_often_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    world = Side(monkeypatch, Network(refuses=refuses), unreachable=5.0)
    world.fetch(b"t" * 16)
    assert world.network.attempts == [(("::1", 7000), 4)]
    if not refuses:
        world.down("unreachable")
    times = [0.0, *world.attempts_until(4.99)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0], abs=0.011)
    assert world.told() == []
    assert world.attempts_until(7.0) == []
    assert world.told() == [lm.FailedIn(b"t" * 16, "unreachable", False)]
    assert not world.side.busy, "it waits for no peer"


def test_a_session_that_came_up_makes_the_next_attempts_frequent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Side(monkeypatch, Network(), unreachable=30.0)
    world.fetch(b"t" * 16)
    world.down("unreachable")
    assert len(world.attempts_until(10.0)) > 5
    while world.network.session is None:
        world.now += 0.01
        world.side.tick(world.now)
    session = world.up()
    assert [(type(m), t) for m, t in session.said if isinstance(m, Fetch)] == [(Fetch, b"t" * 16)]
    world.down("lost")
    assert world.told() == [lm.FailedIn(b"t" * 16, "lost", True)]
    world.fetch(b"u" * 16)
    assert world.network.session is not None, "the first attempt is due at once"
    world.down("unreachable")
    start = world.now
    gaps = [b - a for a, b in itertools.pairwise([start, *world.attempts_until(start + 0.5)])]
    assert gaps == pytest.approx([0.05, 0.1, 0.2], abs=0.021)


def test_an_outage_is_told_once_and_so_is_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = Side(monkeypatch, Network(refuses=True), unreachable=30.0)
    for outage in range(2):
        caplog.clear()
        world.fetch(bytes([outage]) * 16)
        tried = 1 + len(world.attempts_until(world.now + 5.0))
        assert tried > 5
        assert caplog.messages == ["cannot connect to [::1]:7000: no process listens"]
        world.network.refuses = False
        while world.network.session is None:
            world.now += 0.01
            world.side.tick(world.now)
        world.up()
        assert caplog.messages[1:] == [f"connected to [::1]:7000 after {tried} failures"]
        world.network.refuses = True
        world.down("lost")


def test_a_session_is_idle_without_a_transfer_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a prefill computes is not its business."""
    world = Side(monkeypatch, Network(), idle_close=60.0, unreachable=5.0)
    world.fetch(b"t" * 16)
    session = world.up()
    for now in range(1, 600):
        world.now = float(now)
        world.side.tick(world.now)
    assert not session.ended, "a transfer waits for it"
    world.side.engine(lm.CancelIn(b"t" * 16))
    for tick in range(59):
        world.now = 600.0 + tick
        world.side.tick(world.now)
    assert not session.ended
    world.now = 660.0
    world.side.tick(world.now)
    assert session.ended == "idle"


def test_many_peers_have_fewer_lanes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve in all, here, of at most four."""
    world = Side(monkeypatch, Network())
    for i in range(14):
        world.fetch(bytes([i]) * 16, incarnation=i)
    assert [lanes for _, lanes in world.network.attempts] == [4, 4, 4, 3, 2, 2, *[1] * 8]


def test_a_peer_with_two_addresses_has_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sessions the sender would end the older one. That one would open again, and end the other."""
    world = Side(monkeypatch, Network())
    one, other = "[::1]:7000", "127.0.0.1:7000"
    world.fetch(b"t" * 16, one)
    world.fetch(b"u" * 16, other)  # while the session comes up
    assert world.network.attempts == [(("::1", 7000), 4)]
    session = world.up()
    world.fetch(b"v" * 16, other)
    assert [t for m, t in session.said if isinstance(m, Fetch)] == [b"t" * 16, b"u" * 16, b"v" * 16]
    world.complete(b"t" * 16)
    world.side.engine(lm.InjectedIn(b"t" * 16))
    world.down("lost")
    world.side.tick(world.now)
    assert world.network.attempts[1:] == [(("127.0.0.1", 7000), 4)], "the address that was named last"
    world.up()
    assert world.acked() == [b"t" * 16], "whatever its FETCH named"


def test_credit_of_a_session_goes_to_no_other_before_its_lanes_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mover may have taken a slot for a frame that is not reported yet. A session with the credit of that
    slot would find none."""
    world = Side(monkeypatch, Network())
    sessions = []
    for i in range(3):
        world.fetch(bytes([i]) * 16, incarnation=i)
        sessions.append(world.up())
    lost, _, third = (cast("Session", session) for session in sessions)

    def credit(session: Any) -> list[Any]:
        return [message for message, _ in session.said if isinstance(message, Credit)]

    assert [credit(s) for s in sessions] == [[Credit(2), Credit(2, recall=True)], [Credit(2)], []]
    world.side.session_down(lost, "lost", "")
    s = kv_slice(world.slots, bytes([0]) * 16)
    assert credit(third) == []
    world.side.arrivals.begins(lost, s)
    world.side.arrivals.came(s, None)
    world.side.session_over(lost)
    assert credit(third) == [Credit(2)]
    assert world.side.slots_free() == 4
    for _ in range(4):
        world.slots.take()  # each credit finds its slot
    with pytest.raises(FrameError):
        world.slots.take()


def test_what_is_complete_is_injected_whatever_becomes_of_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session is lost, and who answers then is another incarnation."""
    world = Side(monkeypatch, Network())
    world.fetch(b"t" * 16)
    side = world.side
    world.up()
    world.complete(b"t" * 16)
    world.down("lost")
    side.tick(world.now)
    world.down("incarnation")
    assert [type(message) for message in world.told()] == [lm.Arrived, lm.Complete]
    side.engine(lm.InjectedIn(b"t" * 16))
    assert side.transfers_open == 0
    assert side.slots_free() == 4


def committed(world: Side, *transfers: bytes) -> Peer:
    """Their session; each has its COMMIT, which counts one frame that has not come."""
    for transfer in transfers:
        world.fetch(transfer)
    session = world.up()
    for transfer in transfers:
        commit = Commit(kv.FirstToken(7), 1, 256)
        world.side.control(cast("Session", session), Header(FrameType.COMMIT, transfer), commit)
    return session


def test_cards_of_a_peer_that_was_lost_are_all_used_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cards are not told as lost. One that is still lost then is."""
    world = Side(monkeypatch, Network())
    for bad, back in (({0, 1}, [0, 1]), (set[int](), [0, 1]), ({1}, [0, 0]), (set[int](), [0, 0])):
        world.fetch(b"t" * 16)
        assert world.network.session is not None
        world.network.session.bad = bad
        world.down("unreachable")
        world.now += 1
        world.side.tick(world.now)
        world.network.session.ways = back
        world.up()
        world.down("lost")
    assert [avoid for avoid, _ in world.network.tried][1::2] == [{0, 1}, set(), {1}, {1}]
    assert [message.partition("cards ")[2] for message in caplog.messages] == ["[1]", "[1]"]


def test_lanes_leave_out_a_card_that_carries_nothing_and_try_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Side(monkeypatch, Network())
    world.fetch(b"t" * 16)
    world.up().bad = {1}
    world.down("dead")
    world.fetch(b"u" * 16)
    session = world.up()
    world.complete(b"u" * 16)
    world.side.engine(lm.InjectedIn(b"u" * 16))
    world.side.tick(world.now + 59)
    assert not session.ended
    world.side.tick(world.now + 60)
    assert session.ended == "idle"
    world.down("idle")
    world.fetch(b"v" * 16)
    assert [avoid for avoid, _ in world.network.tried] == [set(), {1}, set()]


def test_small_packets_are_tried_where_lanes_come_up_and_no_frame_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = Side(monkeypatch, Network())
    for transfer, moved, reason in ((b"t", 3.0, "dead"), (b"u", 0.0, "eof"), (b"v", 0.0, "dead")):
        world.fetch(transfer * 16)
        world.up().kv_moved = moved
        world.down(reason)
    world.fetch(b"w" * 16)
    session = world.up()
    assert [narrow for _, narrow in world.network.tried] == [False, False, False, True]
    world.side.tick(world.now)
    assert "MTU" not in caplog.text
    session.kv_moved = 1.0
    world.side.tick(world.now)
    world.side.tick(world.now)
    assert caplog.text.count("Use the same MTU") == 1


def test_small_frames_behind_a_lost_packet_are_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has them all when the packet comes again: each is there when its header is read."""
    monkeypatch.setattr(link_rates, "ENOUGH", (1, 0.0))
    world = Side(monkeypatch, Network())
    world.now = 100.0
    session = cast("Session", committed(world, b"t" * 16, b"u" * 16))
    for transfer, now in ((b"t" * 16, 100.5), (b"u" * 16, 101.0)):
        s = kv_slice(world.slots, transfer)
        world.side.arrivals.begins(session, s)
        world.side.arrivals.lane_brought(session, s, True, now, now)
    assert world.side.links(101.0)[9][:2] == (pytest.approx(2 * 256 / 1.0), 0)


def test_a_transfer_whose_bytes_come_is_slow_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame for an hour, its own or one before it; then the line stands still."""
    world = Side(monkeypatch, Network(), progress=10.0)
    session = committed(world, b"t" * 16)
    for now in range(0, 3600, 9):
        session.kv_moved, world.now = float(now), now + 9.0
        world.side.tick(world.now)
    session.kv_moved, world.now = 3600.0, 3609.9
    world.side.tick(world.now)
    assert world.told() == []
    assert not session.ended
    world.now = 3610.0
    world.side.tick(world.now)
    assert session.ended == "lost", "what both sides count as on its way is lost"


@pytest.mark.parametrize(
    ("moved", "other", "dry"),
    [(0.0, False, True), (4.9, False, True), (5.1, False, False), (10.0, False, False), (0.0, True, False)],
)
def test_a_session_whose_bytes_come_is_not_dry(
    monkeypatch: pytest.MonkeyPatch, moved: float, other: bool, dry: bool
) -> None:
    """Prefill has given the transfer up: whether its frames were lost, or are behind others, decides whether
    its session goes, too. `moved`: when bytes last came; `other`: another transfer's frame came since."""
    world = Side(monkeypatch, Network(), progress=10.0)
    session = committed(world, b"t" * 16, b"u" * 16)
    side, peer = world.side, cast("Session", session)
    if other:
        world.now = 1.0
        world.come(peer, kv_slice(world.slots, b"u" * 16))
        world.told()
    session.kv_moved, world.now = moved, 10.0
    side.control(peer, Header(FrameType.ABORTED, b"t" * 16), Aborted("deadline", 1))
    assert session.ended == ("lost" if dry else "")
    assert world.told() == ([] if dry else [lm.FailedIn(b"t" * 16, "deadline", True)])
    assert not any(isinstance(message, Abort) for message, _ in session.said)


def test_a_prefill_that_never_came_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame left before the deadline of the sender."""
    world = Side(monkeypatch, Network(), progress=10.0)
    session = committed(world, b"t" * 16)
    session.kv_moved, world.now = 10.0, 10.0
    header = Header(FrameType.ABORTED, b"t" * 16)
    world.side.control(cast("Session", session), header, Aborted("deadline", 0))
    assert world.told() == [lm.FailedIn(b"t" * 16, "deadline", False)]


OLD, NEW = b"o" * 16, b"n" * 16


def test_an_ack_that_may_be_lost_with_its_session_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more if that session is lost, too; but not one that had arrived before anything was amiss."""
    world = Side(monkeypatch, Network(), peer_dead=5.0)
    world.inject(OLD)
    world.now = 9.0
    world.side.tick(world.now)
    world.inject(NEW)
    assert world.acked() == [OLD, NEW]
    world.now = 13.0  # twice peer_dead, and a margin, after the old one
    for _ in range(3):
        world.down("lost")
        world.side.tick(world.now)
        assert world.network.session is not None, "it connects for that alone"
        world.up()
        assert world.acked() == [NEW]
        world.now += 5.0
        world.side.tick(world.now)
    world.now += 15.0
    world.side.tick(world.now)
    world.down("lost")
    world.side.tick(world.now)
    assert not world.side.busy, "no peer can lack an ACK any more"


def test_an_ack_waits_for_a_session_as_long_as_a_prefill_is_held_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Side(monkeypatch, Network(), hold=30.0)
    world.inject(NEW)
    world.down("dead")
    times = world.attempts_until(40.0)
    assert 29.0 < times[-1] < 30.0
    assert not world.side.busy


@pytest.mark.parametrize("reason", ["idle", "stopped"])
def test_a_session_that_ended_in_order_stays_closed(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    world = Side(monkeypatch, Network())
    world.inject(NEW)
    world.down(reason)
    world.side.tick(world.now)
    assert len(world.network.attempts) == 1
    assert not world.side.busy


def test_a_session_is_not_idle_while_an_ack_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Side(monkeypatch, Network(), idle_close=1.0)
    world.inject(NEW)
    world.down("lost")
    world.side.tick(world.now)
    session = world.network.session
    assert session is not None
    world.now = 2.0
    world.side.tick(world.now)
    assert not session.ended
    world.up()
    assert world.acked() == [NEW]
    world.side.tick(world.now)
    assert session.ended == "idle"


@pytest.mark.parametrize("slot_bytes", [5000, 128 << 20])
def test_memory_with_slots_that_no_arena_has(monkeypatch: pytest.MonkeyPatch, slot_bytes: int) -> None:
    """Copies of a GPU rely on their alignment."""
    world = Side(monkeypatch, Network())
    world.fetch(b"t" * 16)
    session = cast("Session", world.up())
    export = Export("shared_memory", (b"",), 4, slot_bytes, bytes(16))
    with pytest.raises(ProtocolError, match=f"{slot_bytes} bytes"):
        world.side.control(session, Header(FrameType.EXPORT), export)


@pytest.mark.parametrize(("kind", "most"), [("shared_memory", 8192), ("nixl", 4096)])
def test_a_slice_is_at_most_as_large_as_its_slot(
    monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    """NIXL reads it into a slot of the receiver."""
    nixl = stand_in(
        NixlMemory, export=stand_in(Export, kind="nixl"), for_receiver=None, slot_bytes=4096,
        open=lambda *_: "", read=lambda *_: None,
    )  # fmt: skip
    world = Side(monkeypatch, Network(), nixl=nixl if kind == "nixl" else None)
    world.fetch(b"t" * 16)
    session = cast("Session", world.up())
    export = Export(kind, (b"a handle",), 4, 8192, bytes(16))
    world.side.control(session, Header(FrameType.EXPORT), export)
    world.side.engine(lm.Opened(session.number, True, ""))
    head, piece = Header(FrameType.SLICES, b"t" * 16), Piece(0, 0, 1, 0, 4)
    with pytest.raises(ProtocolError, match=f"{most + 64} bytes"):
        world.side.control(session, head, Slices(((0, 1, 0, most + 64, piece),)))
    world.side.control(session, head, Slices(((0, 1, 0, most, piece),)))


def test_a_slice_beyond_its_credit_ends_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the slot of another session, which gets it back."""
    world = Side(monkeypatch, Network())
    sessions: list[Peer] = []
    for i in range(2):
        world.fetch(bytes([i]) * 16, incarnation=i)
        sessions.append(world.up())
    session = cast("Session", sessions[0])
    monkeypatch.setattr(session, "end", partial(world.side.session_down, session))
    export = Export("shared_memory", (b"a handle",), 4, 4096, bytes(16))
    world.side.control(session, Header(FrameType.EXPORT), export)
    world.side.engine(lm.Opened(session.number, True, ""))
    # Two have credit. The third one ends the session, and what follows it is not looked at.
    slices = Slices(tuple((seq, 1, seq, 256, Piece(0, 0, 1, 0, 4)) for seq in range(4)))
    world.side.control(session, Header(FrameType.SLICES, bytes(16)), slices)
    assert lm.ExportGone(session.number) in world.told()
    world.side.session_over(session)
    assert world.side.slots_free() == 3  # the engine has the first one


def test_slices_beyond_all_slots_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL has begun to read none of them."""
    nixl = stand_in(
        NixlMemory, export=stand_in(Export, kind="nixl"), for_receiver=None, slot_bytes=4096,
        open=lambda *_: "", read=lambda *_: None, close=lambda _: None,
    )  # fmt: skip
    world = Side(monkeypatch, Network(), nixl=nixl)
    world.fetch(bytes(16))
    session, free = cast("Session", world.up()), world.side.slots_free()
    export = Export("nixl", (b"a handle",), 8, 4096, bytes(16))
    world.side.control(session, Header(FrameType.EXPORT), export)
    world.side.engine(lm.Opened(session.number, True, ""))
    slices = Slices(tuple((seq, 1, seq, 64, Piece(0, 0, 1, seq, 1)) for seq in range(8)))
    with pytest.raises(ProtocolError, match="no slot is laid out"):
        world.side.control(session, Header(FrameType.SLICES, bytes(16)), slices)
    world.side.session_down(session, "lost", "no slot")
    world.side.session_over(session)
    assert world.side.slots_free() == free == 4


def test_a_commit_is_due_from_the_last_frame_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Side(monkeypatch, Network())
    side = world.side

    def come(*frames: int) -> None:
        """Halves of a transfer."""
        for seq in frames:
            session = cast("Session", world.network.session)
            world.come(session, kv_slice(world.slots, b"t" * 16, 2 * seq, 2, seq))

    def commit() -> None:
        session = cast("Session", world.network.session)
        side.control(session, Header(FrameType.COMMIT, b"t" * 16), Commit(kv.FirstToken(7), 2, 256))

    world.fetch(b"t" * 16)
    world.up()
    come(1)
    assert side.fetches.commit_due == math.inf
    world.now = 1.0
    come(0)
    for world.now in (1.0, 1.001, 2.0):
        side.tick(world.now)
        assert side.fetches.commit_due == 1.0, "it may be late: the time stays the same"
    world.down("lost")
    assert side.fetches.commit_due == math.inf

    world.fetch(b"t" * 16)
    world.up()
    come(0)
    commit()
    come(1)
    assert side.fetches.commit_due == math.inf, "COMMIT came first"
