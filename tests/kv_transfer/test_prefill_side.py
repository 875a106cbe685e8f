"""The sending side of a transfer process, beside an engine that reads nothing."""

import math
import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import baton.kv_transfer as kv
from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.layout import Dtypes, Piece
from baton.kv_transfer.nixl.memory import NixlMemory
from baton.kv_transfer.process import prefill_side
from baton.kv_transfer.process.prefill_side import PrefillSide, SendingSession
from baton.kv_transfer.process.stats import TransferCounters
from baton.kv_transfer.protocol.frame import NO_TRANSFER, FrameType, Header
from baton.kv_transfer.protocol.local_messages import (
    CommitOut,
    Exported,
    FromSender,
    Offer,
    SlicesOut,
)
from baton.kv_transfer.protocol.messages import Credit, Export, Fetch, Identity, ProtocolError, Reach, encode
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.spawn import MAX_MESSAGE
from tests.layouts import kv_layout
from tests.stand_in import implements, stand_in


@implements(SendingSession)
class Peer:
    slot_bytes, lane_count, kv_moved, why_lanes, dtypes = 1 << 20, 1, 0.0, "", Dtypes("float32")

    def __init__(self, number: int) -> None:
        self.number = number
        self.peer = stand_in(Identity, name=f"decode {number}")
        self.said: list[Any] = []

    def send(self, message: Any, transfer_id: bytes = NO_TRANSFER) -> None:
        self.said.append(message)

    def move(self, slices: Any) -> None:
        self.said += slices

    def feed(self) -> None:
        pass


CONFIG = kv.TransferConfig(
    name="prefill 0",
    incarnation=1,
    model_fingerprint="m",
    layout=kv_layout(1, 1, 16, "float32"),
    num_slots=4,
    slot_bytes=4096,
)


def test_a_peer_that_floods_the_engine_loses_its_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_side, "_MOST_UNREAD", 64 << 10)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        channel = Channel(ours, FromSender)
        arena: Any = None
        side = PrefillSide(CONFIG, arena, channel, TransferCounters())
        flooding, quiet = Peer(1), Peer(2)

        message = Credit(7)
        header = Header(FrameType.CREDIT, NO_TRANSFER, length=len(encode(message)))

        def credit(peer: Any, times: int = 1) -> None:
            for _ in range(times):
                side.control(peer, header, message)

        while not channel.full:
            credit(flooding)
            channel.flush()
        before = len(channel.pending)
        with pytest.raises(ProtocolError, match="while the engine reads none") as error:
            credit(flooding, 100_000)
        assert error.value.kind == "flood"
        credit(quiet)
        assert len(channel.pending) - before < 1000

        while channel.pending:
            theirs.recv(1 << 20)
            channel.flush()
        credit(flooding)


def test_memory_is_offered_with_the_first_fetch() -> None:
    """Before, the peer may wait for some of its lanes, and then takes no control message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        arena: Any = None
        side = PrefillSide(CONFIG, arena, Channel(ours, FromSender), TransferCounters())
        export = Export("shared_memory", (b"",), 4, 4096, bytes(16))
        side.engine(Exported(export, ""))
        peers: list[Any] = [Peer(1), Peer(2)]
        fetch = Fetch(b"p" * 16, 0, ())
        header = Header(FrameType.FETCH, b"t" * 16, length=len(encode(fetch)))
        for peer in peers:
            side.session_up(peer)
            assert peer.said == []
        side.control(peers[0], header, fetch)
        side.control(peers[0], header, fetch)
        assert [message for message in peers[0].said if message == export] == [export]
        assert side.transports() == {"decode 1": "tcp: the test copy is under way", "decode 2": "tcp"}
        reach = Header(FrameType.REACH, NO_TRANSFER)
        with pytest.raises(ProtocolError, match="REACH without EXPORT"):
            side.control(peers[1], reach, Reach(True, ""))
        side.control(peers[0], reach, Reach(True, ""))
        assert side.transports()["decode 1"] == "shared_memory"


@pytest.mark.parametrize("adopted", [False, True])
def test_metadata_of_nixl_that_no_message_takes_is_not_sent(adopted: bool) -> None:
    """A host has many network devices, for example. The peer would end each session for such an EXPORT."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        export = Export("nixl", (bytes(5000),), 4, 4096, bytes(16))
        nixl = object.__new__(NixlMemory)
        nixl.export, nixl.for_sender = export, export if adopted else None
        arena: Any = None
        side = PrefillSide(CONFIG, arena, Channel(ours, FromSender), TransferCounters(), nixl)
        if adopted:
            side.engine(Exported(export, ""))
        peer: Any = Peer(1)
        side.session_up(peer)
        fetch = Fetch(b"p" * 16, 0, ())
        side.control(peer, Header(FrameType.FETCH, b"t" * 16, length=len(encode(fetch))), fetch)
        assert export not in peer.said
        why = "NIXL's metadata has 5000 of at most 4096 bytes: name few UCX_NET_DEVICES"
        assert side.transports() == {"decode 1": f"tcp: {why}"}


def test_statistics_of_the_most_sessions_fit_into_one_message() -> None:
    """A longer one would end the worker. Peers choose their names, and say why they use TCP."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        arena: Any = None
        side = PrefillSide(CONFIG, arena, Channel(ours, FromSender), TransferCounters())
        side.engine(Exported(Export("shared_memory", (b"",), 4, 4096, bytes(16)), ""))
        fetch, reach = Fetch(b"p" * 16, 0, ()), Reach(False, "\U0001f600" * 512)
        for number in range(CONFIG.max_sessions):
            peer: Any = Peer(number)
            peer.peer.name = f"{number} " + "\U0001f600" * 508
            side.session_up(peer)
            for kind, message in ((FrameType.FETCH, fetch), (FrameType.REACH, reach)):
                side.control(peer, Header(kind, number.to_bytes(16), length=len(encode(message))), message)
        transports = side.transports()
        assert len(transports) == CONFIG.max_sessions
        assert len(msgspec.msgpack.encode(transports)) < MAX_MESSAGE - 8192


def test_a_commit_is_due_from_the_last_slice_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer of an earlier chunk is not the last slice."""
    monkeypatch.setattr(prefill_side, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    clock, transfer_id = [0.0], b"t" * 16

    def came(layer: int, start: int, stop: int) -> Slice:
        return Slice(Piece(layer, 0, 1, start, stop - start), transfer_id, 0, 64)

    with ours, theirs:
        config = msgspec.structs.replace(CONFIG, layout=kv_layout(2, 1, 16, "float32"))
        arena = stand_in(Arena, slot=lambda size: memoryview(bytes(size)))
        side = PrefillSide(config, arena, Channel(ours, FromSender), TransferCounters())
        peer: Any = Peer(1)
        side.session_up(peer)
        side.engine(Offer(b"p" * 16))
        fetch = Fetch(b"p" * 16, 0, ((0, 3), (5, 9)))
        side.control(peer, Header(FrameType.FETCH, transfer_id, length=len(encode(fetch))), fetch)
        for layer, start, stop in ((0, 0, 3), (1, 0, 3), (0, 5, 9)):
            side.engine(SlicesOut([came(layer, start, stop)]))
            assert side.table.commit_due == math.inf
        clock[0] = 4.0
        side.engine(SlicesOut([came(1, 5, 9)]))
        for clock[0] in (4.0, 4.001, 5.0):
            side.tick(clock[0])
            assert side.table.commit_due == 4.0, "it may be late: the time stays the same"
        side.engine(CommitOut(transfer_id, kv.FirstToken(7), 4, 256))
        assert side.table.commit_due == math.inf
