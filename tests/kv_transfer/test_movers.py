"""Lanes in processes of their own: KV goes through them, and no process outlives another."""

import contextlib
import math
import os
import resource
import signal
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer.config import TransferConfig, TransferDeadlines
from baton.kv_transfer.process import lane as session_lane
from baton.kv_transfer.process import lane_messages, link_rates
from baton.kv_transfer.process.arrivals import Arrivals
from baton.kv_transfer.process.connection import Connection
from baton.kv_transfer.process.decode_side import DecodeSide, ReceivingSession
from baton.kv_transfer.process.prefill_side import PrefillSide, SendingSession
from baton.kv_transfer.process.tcp_session import Sessions
from baton.kv_transfer.protocol.messages import Identity
from baton.kv_transfer.wait import wait
from tests.layouts import kv_layout
from tests.stand_in import stand_in
from tests.within import WITHIN

from .second_wire import ACK, COMMIT, CREDIT, FETCH, KV, PING, FakePrefill, Lane, connect, frame, pack, unpack
from .test_connection import slice_of
from .transfer_process import deadlines

TWO: dict[str, Any] = {"movers": 2}


def movers(worker: Any) -> list[psutil.Process]:
    assert worker.port >= 0, "it is up"
    return psutil.Process(worker.process.pid).children()


def lanes(process: psutil.Process) -> int:
    return sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections("tcp"))


def transferred(pair: Any, n: int) -> None:
    """One transfer, bit for bit."""
    prefill_id = pair.prefill.hold(n)
    blocks = list(pair.prefill.held[prefill_id])
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, n)
    assert isinstance(pair.event(decode_id), kv.Injected)
    pair.assert_same(blocks, decode_id, 0, n)


def watched(worker: Any) -> list[int]:
    """A descriptor for each of its movers, readable when that one is gone."""
    return [os.pidfd_open(process.pid) for process in movers(worker)]


def assert_gone(watches: list[int]) -> None:
    for watch in watches:
        assert wait([watch], WITHIN), "it lives on"
        os.close(watch)


def test_movers_have_all_lanes_but_lane_0(make_pair: Any) -> None:
    pair = make_pair(TWO, TWO)
    transferred(pair, 300)
    for worker in (pair.prefill, pair.decode):
        assert worker.stats().lanes == 5
        # Each takes a lane when it reads that it shall. The other process then closes its own descriptor.
        processes = [psutil.Process(worker.process.pid), *movers(worker)]
        pair.until(lambda p=processes: [lanes(process) for process in p] == [1, 2, 2], "lanes in both")
    pair.assert_whole()


@pytest.mark.parametrize("movers", [0, 2])
def test_the_receiver_tells_what_the_link_carries_and_what_is_under_way(
    movers: int, make_pair: Any, until: Any
) -> None:
    settings = {
        "layout": kv_layout(3, 8, 128, "float32"), "slot_bytes": 768 << 10, "blocks": 64, "movers": movers,
    }  # fmt: skip
    pair = make_pair(settings, settings)
    transferred(pair, 100)
    assert pair.decode.stats().links == {}, "few bytes say nothing"
    transferred(pair, link_rates.ENOUGH[0] // pair.decode.layout.bytes_per_token)
    [(peer, (rate, waiting, used))] = pair.decode.stats().links.items()
    assert (peer, waiting) == (pair.prefill.incarnation, 0)
    assert 0 < rate < math.inf
    assert 0 < used <= 1
    assert pair.prefill.stats().links == {}, "the other direction"
    prefill_id = pair.prefill.open(50)
    pair.decode.fetch(pair.prefill, prefill_id, 50)
    under_way = 50 * pair.decode.layout.bytes_per_token
    until(lambda: pair.decode.stats().links[peer][1] == under_way, "the fetch", pair.decode.receiver)
    pair.decode.later(link_rates.RECENT)
    assert pair.decode.stats().links == {}, "long ago"


@pytest.mark.parametrize("most", [3, 1])
def test_lane_0_is_one_of_those_that_there_may_be(make_pair: Any, most: int) -> None:
    """Where it is the only one, KV goes down it, too."""
    pair = make_pair(TWO, TWO | {"max_lanes": most})
    transferred(pair, 50)
    assert pair.prefill.stats().lanes == pair.decode.stats().lanes == most
    pair.assert_whole()


@pytest.mark.parametrize("cut", [0, 30, 64, 100])
def test_what_comes_right_behind_the_proof_is_not_lost(make_prefill: Any, until: Any, cut: int) -> None:
    """Read by the transfer process: nothing, a part of a header, all of it, or (left in the socket) more."""
    prefill = make_prefill(**TWO)
    connect(prefill.port, session=b"s" * 16, lanes=2)
    pings = b"".join(frame(PING, pack(fields)) for fields in ([0], [0], [-1]))
    lane = connect(prefill.port, session=b"s" * 16, number=1, lanes=2, behind=pings[:cut])
    until(lambda: sum(map(lanes, movers(prefill))) == 1, "it to be handed over")
    lane.sock.sendall(pings[cut:])
    assert lane.read()[0] == 0, "the last one ends the session"
    stats = prefill.stats()
    assert (stats.refused, stats.checksum_failures) == ({"message": 1}, {})


# ---------------------------------------------------------------- peers that break the protocol, or off


class Peers:
    """A decode worker that has asked fake prefill workers, one for each of `ids`, for 10 positions."""

    def __init__(self, decode: Any, until: Any, ids: list[bytes]) -> None:
        self.decode = decode
        self.until = until
        self.fakes = {i: FakePrefill(incarnation=incarnation) for incarnation, i in enumerate(ids, 5)}
        for i, fake in self.fakes.items():
            blocks = decode.reserved[i] = decode.allocate(10)
            decode.receiver.fetch(
                i,
                prefill_id=i * 16,
                kv_address=fake.address,
                incarnation=fake.about["incarnation"],
                attempt=0,
                block_ids=blocks,
                num_tokens=10,
            )

    def asked(self, i: bytes) -> tuple[Lane, Lane, bytes]:
        """Lane 0, the other one, and the transfer id, once there is credit."""
        fake = self.fakes[i]
        self.until(lambda: self.decode.poll() or wait([fake.listener.fileno()], 0), "its session")
        found = {lane.number: lane for lane in (fake.accept(), fake.accept())}
        transfer, _ = found[0].expect(FETCH)
        assert (found[0].read()[0], found[0].granted) == (CREDIT, 5), "a frame a layer, and one a lane"
        return found[0], found[1], transfer

    def serve(self, i: bytes, control: Lane, data: Lane, transfer: bytes) -> None:
        """All of it, and it arrives."""
        bodies = [os.urandom(2560) for _ in range(3)]
        for layer, body in enumerate(bodies):
            data.send(KV, body, transfer, layer=layer, head_count=2, token_count=10, seq=layer)
        control.say(COMMIT, [[7, None, [], []], 3, 3 * 2560], transfer)
        control.sent = 3  # for the recall of what was not used
        self.until(lambda: self.decode.poll() or i in self.decode.events, "the fetch to end")
        assert isinstance(self.decode.events[i], kv.Injected)
        for layer, body in enumerate(bodies):
            expected = torch.frombuffer(bytearray(body), dtype=torch.int32).view(2, 10, 2, 16)
            rows = self.decode.rows(self.decode.reserved[i], layer, 0, 10).view(torch.int32)
            assert torch.equal(rows.cpu(), expected)
        assert sorted(control.read()[0] for _ in range(2)) == [CREDIT, ACK], "a recall, which `read` answers"

    def free(self, count: int) -> None:
        self.until(lambda: self.decode.stats().receiver_slots_free == count, f"{count} slots to be free")


def test_frames_beyond_their_credit_end_their_session_and_no_other(make_decode: Any, until: Any) -> None:
    """They take slots that were laid out for another session, whose credit is as good as before."""
    peers = Peers(make_decode(lanes=1, **TWO), until, [b"a", b"b"])
    honest, (control, data, transfer) = peers.asked(b"a"), peers.asked(b"b")
    slices = [{"head_count": 2, "token_start": i, "token_count": 1, "seq": i} for i in range(8)]
    data.sock.sendall(b"".join(frame(KV, bytes(256), transfer, **head) for head in slices))
    while control.read()[0]:
        pass
    until(lambda: peers.decode.stats().refused == {"credit": 1}, "it to be refused")
    peers.decode.poll()
    peers.free(16)
    peers.serve(b"a", *honest)
    peers.serve(b"b", *peers.asked(b"b"))
    peers.free(16)
    assert peers.decode.stats().refused == {"credit": 1}


def test_more_frames_than_there_are_slots(make_decode: Any, until: Any) -> None:
    """The mover itself has nowhere to put them."""
    peers = Peers(make_decode(lanes=1, **TWO), until, [b"a"])
    control, data, _ = peers.asked(b"a")
    with contextlib.suppress(OSError):  # closed meanwhile
        data.sock.sendall(frame(KV, bytes(256), os.urandom(16)) * 100)
    while control.read()[0]:
        pass
    assert peers.decode.stats().refused["credit"] >= 1
    peers.serve(b"a", *peers.asked(b"a"))
    peers.free(16)


@pytest.mark.all
def test_more_pings_than_are_read(make_prefill: Any, until: Any) -> None:
    """The transfer process has no time for its mover, who keeps a bounded number of them and no more."""
    prefill = make_prefill(movers=1)
    control, data = (connect(prefill.port, session=b"s" * 16, number=i, lanes=2) for i in (0, 1))
    until(lambda: sum(map(lanes, movers(prefill))) == 1, "lane 1 to be handed over")
    prefill.process.send_signal(signal.SIGSTOP)
    pings = frame(PING, pack([0])) * 1000
    with contextlib.suppress(OSError):  # closed by the mover
        for _ in range(200):
            data.sock.sendall(pings)
    prefill.process.send_signal(signal.SIGCONT)
    until(lambda: prefill.stats().refused == {"flood": 1}, "it to be refused")
    while control.read()[0]:
        pass


def test_a_session_that_ends_in_mid_frame(make_decode: Any, until: Any) -> None:
    peers = Peers(make_decode(lanes=1, **TWO), until, [b"a"])
    control, data, transfer = peers.asked(b"a")
    data.sock.sendall(frame(KV, bytes(2560), transfer, head_count=2, token_count=10)[:1000])
    peers.free(15)
    control.sock.close()
    peers.free(16)
    assert data.read()[0] == 0
    peers.serve(b"a", *peers.asked(b"a"))


def test_a_lane_that_a_mover_cannot_take(make_prefill: Any, until: Any) -> None:
    """Out of descriptors: the session ends, and the worker goes on."""
    prefill = make_prefill(movers=1)
    (process,) = movers(prefill)
    first = [connect(prefill.port, session=b"f" * 16, number=i, lanes=2) for i in (0, 1)]
    until(lambda: lanes(process) == 1, "it to have begun")
    first[0].sock.close()
    until(lambda: lanes(process) == 0, "its lane to be closed")
    limits = cast("tuple[int, int]", process.rlimit(resource.RLIMIT_NOFILE))
    used = {int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
    process.rlimit(resource.RLIMIT_NOFILE, (min({*range(999)} - used), limits[1]))
    both = [connect(prefill.port, session=b"a" * 16, number=i, lanes=2) for i in (0, 1)]
    assert [lane.read()[0] for lane in both] == [0, 0]
    assert not prefill.stats().deadlines, "at once"
    process.rlimit(resource.RLIMIT_NOFILE, limits)
    lane = connect(prefill.port, session=b"b" * 16, number=1, lanes=2)
    until(lambda: lanes(process) == 1, "the next session's lane")
    lane.sock.close()


def test_a_lane_is_not_heard_by_what_it_sends() -> None:
    """A peer that says nothing is found silent, however much is sent to it."""
    lane = session_lane.Lane(lambda _: None, 1, stand_in(SendingSession, left=lambda *_, **__: None))
    lane.report(lane_messages.Heard(1, 5.0, 0.0))
    lane.push_slice(slice_of(4, slot=3))
    lane.report(lane_messages.Gone(1, 3, True))
    assert (lane.heard, lane.unsent) == (5.0, 0)


@pytest.mark.parametrize(("heard", "bad"), [((1e9, 0.0), {1}), ((0.0, 0.0), set())])
def test_a_card_is_lost_if_its_lane_is_silent_and_another_one_is_heard(
    heard: tuple[float, float], bad: set[int]
) -> None:
    config = stand_in(TransferConfig, deadlines=TransferDeadlines())
    sessions = stand_in(Sessions, ended=lambda *_: None, config=config)
    session = SendingSession(stand_in(PrefillSide), sessions, 1, b"s" * 16, 2)
    session.ways, session._open = [0, 1], 2
    for number, at in enumerate(heard):
        session.lanes[number] = lane = session_lane.Lane(lambda _: None, number, session)
        lane.heard = at
    session.end("dead", "silent")
    assert session.bad == bad


@pytest.mark.parametrize(("joins", "bad"), [((), {0, 1}), ((1,), {0}), ((0, 1), set())])
def test_a_session_waits_until_it_is_known_which_cards_are_lost(
    joins: tuple[int, ...], bad: set[int]
) -> None:
    """A peer that refuses one lane after another is lost with all its cards."""
    layout = kv_layout(1, 1, 8, "float32")
    identity = stand_in(Identity, slot_bytes=4096, memory="", sums=False, dtypes=layout.dtypes)
    config = stand_in(
        TransferConfig, slot_bytes=4096, layout=layout, sums_lanes=False, deadlines=TransferDeadlines()
    )
    arrivals = stand_in(Arrivals, begins=lambda *_: None, lane_brought=lambda *_: None)
    handler = stand_in(DecodeSide, arrivals=arrivals, session_over=lambda _: None)
    sessions = stand_in(
        Sessions,
        ended=lambda *_: None,
        is_up=lambda _: None,
        memory="",
        config=config,
        lane=lambda number, _, session, summed: session_lane.Lane(lambda _: None, number, session),
        kv_lanes=lambda lanes: [*lanes.values()],
    )
    session = ReceivingSession(handler, sessions, 1, b"s" * 16, 2)
    session.ways = [0, 1]
    joining: list[Any] = [stand_in(Connection, close_soon=lambda *_: None) for _ in session.ways]
    session.joining += joining
    for number, connection in enumerate(joining):
        assert not session.ended
        if number in joins:
            session.joining.remove(connection)
            session.add(number, connection, identity)
        else:
            session.lane_failed(number, connection, "refused")
    assert (session.up, session.ended) == (not bad, bool(bad))
    assert session.bad == bad


def test_lanes_take_the_frame_that_is_next_once_they_have_room() -> None:
    """The lane with the fewest unsent bytes, which has two at most: the others wait, and whatever becomes of
    them is told once."""
    told: list[Any] = []
    sent: list[int] = []
    dropped: list[int] = []
    handler = stand_in(
        PrefillSide,
        begins=lambda s: s.slot != 8,
        sent=lambda session, s: sent.append(s.slot),
        dropped=lambda s: dropped.append(s.slot),
        session_over=lambda session: sent.append(-1),
    )
    sessions = stand_in(Sessions, ended=lambda *_: None)
    session = SendingSession(handler, sessions, 1, b"s" * 16, 4)
    far = [session_lane.Lane(told.append, number, session) for number in range(3)]
    session.lanes.update({n + 1: lane for n, lane in enumerate(far)})
    session.kv_lanes.extend(far)
    session._open = 3

    def moves() -> list[tuple[int, int]]:
        """(lane, slot) that the movers were told since the last time."""
        found = [(m.lane, m.slice.slot) for m in told if isinstance(m, lane_messages.Move)]
        told.clear()
        return found

    sizes = enumerate((5000, 1000, 3000, 1000, 10))
    session.move([slice_of(size, slot=slot) for slot, size in sizes])
    assert moves() == [(0, 0), (1, 1), (2, 2), (1, 3)], "by unsent bytes, and two at most"
    far[1].report(lane_messages.Gone(1, 1, True))
    assert moves() == [(1, 4)], "it was that lane's turn"
    far[0].report(lane_messages.Gone(0, 0, True))
    session.move([slice_of(9000, slot=slot) for slot in (8, 5, 6, 7)])
    assert moves() == [(0, 5)], "lane 1 has least to send then, and as much as it may; 8 has ended"
    session.end("lost", "")
    assert sorted(dropped) == [6, 7], "those that no lane had"
    for number, lane in enumerate(far):
        for slot in list(lane._leaving):
            lane.report(lane_messages.Gone(number, slot, False))
        assert -1 not in sent, "the session is over before its lanes are"
        lane.report(lane_messages.LaneClosed(number, "lost", ""))
    assert (sorted(dropped), sent) == ([2, 3, 4, 5, 6, 7], [1, 0, -1])


def test_a_session_that_ends_while_frames_wait_for_a_mover(make_prefill: Any, until: Any) -> None:
    """Two are with its lane, ten are not: every slot comes home, and the next session has them."""
    prefill = make_prefill(movers=1, slots=64)
    (process,) = movers(prefill)
    prefill_id = prefill.hold(300)
    control, data = (connect(prefill.port, session=b"s" * 16, number=i, lanes=2) for i in (0, 1))
    until(lambda: lanes(process) == 1, "lane 1 to be handed over")
    process.suspend()
    control.say(FETCH, [prefill_id, 0, [[0, 300]]], b"t" * 16)
    control.say(CREDIT, [12, False])
    until(lambda: prefill.stats().sender_slots_free == 64 - 12, "as many as there is credit for")
    control.sock.close()
    until(lambda: prefill.stats().sessions == 0, "the session to end")
    process.resume()
    until(lambda: prefill.stats().sender_slots_free == 64, "the slots to come home")
    assert [data.read()[0] for _ in range(3)][-1] == 0, "at most what its lane had left"
    prefill.sender.close(prefill_id, "cancelled")
    until(lambda: prefill.poll() or prefill.sender.idle, "the pump to have them", prefill.sender)


# ---------------------------------------------------------------- silent and slow lanes


def gives_up(worker: Any, control: Any) -> bool:
    """A peer that it hears on lane 0 all the time."""
    if not worker.stats().deadlines:
        with contextlib.suppress(OSError):  # closed meanwhile
            control.send(PING, pack([0]))
        worker.later(20.0)
    return worker.stats().deadlines == {"peer_dead": 1}


def test_a_lane_that_falls_silent_in_mid_frame(make_decode: Any, until: Any) -> None:
    """Before COMMIT, so that nothing else is due; lane 0 is heard all the time. The slot comes home."""
    decode = make_decode(lanes=1, movers=1, deadlines=deadlines(peer_dead=50.0))
    peers = Peers(decode, until, [b"a"])
    control, data, transfer = peers.asked(b"a")
    data.sock.sendall(frame(KV, bytes(2560), transfer, head_count=2, token_count=10)[:1000])
    peers.free(15)
    until(lambda: gives_up(decode, control), "decode to notice")
    peers.free(16)
    peers.serve(b"a", *peers.asked(b"a"))


@pytest.mark.cases(1)
def test_every_lane_is_pinged(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill(movers=1, deadlines=deadlines(ping=0.05))
    both = [connect(prefill.port, session=b"s" * 16, number=i, lanes=2) for i in (0, 1)]
    until(lambda: sum(map(lanes, movers(prefill))) == 1, "lane 1 to be handed over")
    for lane in both:
        for _ in range(2):
            head = lane._exactly(64)
            assert head is not None
            assert head[5] == PING
            length = int.from_bytes(head[44:48], "little")
            body = lane._exactly(length + 8)
            assert body is not None
            assert unpack(body[:length]) == [0]


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_one_of_its_movers_a_transfer_process_ends(make_pair: Any, role: str) -> None:
    pair = make_pair(TWO, TWO)
    transferred(pair, 50)
    worker = getattr(pair, role)
    watches = watched(worker)
    movers(worker)[1].kill()
    assert worker.process.wait(WITHIN) == 1
    assert_gone(watches)


def test_movers_die_with_the_transfer_process(make_pair: Any) -> None:
    pair = make_pair(TWO, TWO)
    transferred(pair, 50)
    watches = watched(pair.decode)
    pair.decode.process.kill()
    assert_gone(watches)


def test_a_mover_that_hangs_ends_its_transfer_process(make_pair: Any, until: Any) -> None:
    """Its sessions fall silent and end, but what its lanes hold never comes back."""
    pair = make_pair(TWO, TWO | {"deadlines": deadlines(peer_dead=50.0)})
    transferred(pair, 50)
    watches = watched(pair.decode)
    movers(pair.decode)[0].suspend()
    until(lambda: pair.decode.later(20.0) or pair.decode.process.poll() is not None, "its end")
    assert pair.decode.process.wait() == 1
    assert_gone(watches)


@pytest.mark.all
def test_a_mover_that_hangs_does_not_hold_up_the_end(make_pair: Any) -> None:
    pair = make_pair(TWO, TWO)
    transferred(pair, 50)
    watches = watched(pair.decode)
    movers(pair.decode)[0].suspend()
    pair.decode.process.terminate()
    assert pair.decode.process.wait(WITHIN) == 0
    assert_gone(watches)


def test_signals_to_all_of_them(make_pair: Any, until: Any) -> None:
    """As from a terminal or a supervisor: only the transfer process listens, and ends its movers."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # some parents do, and it is inherited
    pair = make_pair(TWO, TWO)
    signal.signal(signal.SIGCHLD, before)
    transferred(pair, 50)
    watches = watched(pair.decode)
    for number in (signal.SIGINT, signal.SIGTERM):
        for process in movers(pair.decode):
            process.send_signal(number)
    transferred(pair, 50)
    pair.decode.process.terminate()
    assert pair.decode.process.wait(WITHIN) == 0
    assert_gone(watches)
    until(lambda: pair.prefill.stats().lanes == 0, "the lanes to close")
