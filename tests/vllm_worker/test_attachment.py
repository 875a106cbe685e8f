"""The engine process of a worker and connectors, over real sockets. A connector is a process of its own."""

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from baton.kv_transfer import FetchFailed, Heartbeat, Injected, InjectStats, Released
from baton.kv_transfer.channel import ChannelClosed
from baton.kv_transfer.protocol.messages import FirstToken
from baton.vllm_worker import attachment
from baton.vllm_worker.attachment import Attach, Close, ConnectorLink, Pool, WorkerLink
from tests.layouts import kv_layout
from tests.vllm_worker.arenas import make_arenas
from tests.within import WITHIN

SLOTS, SLOT_BYTES = 2, 1 << 16
SAYS = Attach(0, kv_layout(3, 2, 8, "float32"), Pool(16, 40, 3, ((16, 2),)), "model")
SAYS_2 = Attach(2, SAYS.layout, SAYS.pool, SAYS.model_fingerprint)
FIRST = FirstToken(7, -0.5, (7,), (-0.5,))
STATS = InjectStats(1, 2, 3, *map(float, range(7)))
MESSAGES = 20_000
# A fork of the test's own process would hold its descriptors, and locks of its threads.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload([__name__])


class Worker:
    """What a service process makes and an engine process inherits, for `ranks` connectors."""

    def __init__(self, directory: Path, ranks: int = 1) -> None:
        self.heartbeat = Heartbeat.create()
        arenas, self.transfer = make_arenas(ranks, SLOTS, SLOT_BYTES)
        self.link = ConnectorLink(arenas, self.heartbeat.fd, directory)


@pytest.fixture
def directory() -> Iterator[Path]:
    """What the service gives the engine process for sockets. Their paths must be short."""
    with TemporaryDirectory() as name:
        yield Path(name)


def attach(path: str, rank: int, then: Callable[[WorkerLink], None]) -> None:
    says = Attach(rank, SAYS.layout, SAYS.pool, SAYS.model_fingerprint)
    then(WorkerLink.open(path, says))


def connector(path: str, rank: int, then: Callable[[WorkerLink], None]) -> Any:
    """Starts a process with one end. It has no other descriptor of the worker than those that it is given."""
    process = processes.Process(target=attach, args=(path, rank, then))
    process.start()
    return process


def answers(link: WorkerLink) -> None:
    sending, receiving = link.arenas.ends()
    sending.arena.slot(1)[:4] = b"sent"
    link.heartbeat.tick()
    for rank in link.arenas.ranks():
        rank.send(b"from rank 0")
    sending.channel.send(b"ready")
    link.channel.sock.setblocking(True)
    received: list[Any] = []
    while len(received) < 2:
        received += link.channel.receive()
    assert received == [Close(b"p"), Close(b"q", "finished")]
    assert link.arenas.exports
    assert receiving.channel.recv(100) == b"to the engine"
    link.channel.send(Injected(b"d", FIRST, STATS), FetchFailed(b"e", "gone"), Released(b"p", "acked"))


@pytest.mark.all
async def test_the_connector_gets_arenas_and_heartbeat_and_both_say_what_happens(directory: Path) -> None:
    worker = Worker(directory)
    process = connector(worker.link.path, 0, answers)
    assert await worker.link.attached() == SAYS
    Path(worker.link.path).unlink()  # the service removes the directory then
    sending, receiving = worker.transfer
    assert sending.channel.recv(100) == b"ready"
    assert bytes(sending.arena.slot(1)[:4]) == b"sent"
    assert worker.heartbeat.ticks == 1
    receiving.channel.send(b"to the engine")
    worker.link.send(Close(b"p"))
    worker.link.send(Close(b"q", "finished"))
    found: list[Any] = []
    while len(found) < 3:
        found += await worker.link.receive()
    assert found == [Injected(b"d", FIRST, STATS), FetchFailed(b"e", "gone"), Released(b"p", "acked")]
    with pytest.raises(ChannelClosed):
        await worker.link.receive()
    assert sending.channel.recv(100) == b"", "no other process has this end"
    process.join(WITHIN)
    assert process.exitcode == 0
    worker.link.close()


def waits(link: WorkerLink) -> None:
    signal.pause()


def first(link: WorkerLink) -> None:
    [rank] = link.arenas.ranks()
    assert rank.recv(100) == b"from rank 1"


def second(link: WorkerLink) -> None:
    [rank] = link.arenas.ranks()
    assert not link.arenas.transfer_fds
    rank.send(b"from rank 1")


async def test_each_rank_gets_its_own_arenas(directory: Path) -> None:
    worker = Worker(directory, 2)
    ranks = [connector(worker.link.path, 1, second), connector(worker.link.path, 0, first)]
    assert await worker.link.attached() == SAYS
    for process in ranks:
        process.join(WITHIN)
        assert process.exitcode == 0
    worker.link.close()


def reads(link: WorkerLink) -> None:
    sending, _ = link.arenas.ends()
    assert sending.channel.recv(100) == b"", "the test closes the other end"
    link.channel.sock.setblocking(True)
    received: list[Close] = []
    while len(received) < MESSAGES:
        received += link.channel.receive()
    assert received == [Close(i.to_bytes(16)) for i in range(MESSAGES)]
    link.channel.send(Released(b"p", "all read"))


async def test_messages_wait_while_the_connector_does_not_read(directory: Path) -> None:
    worker = Worker(directory)
    process = connector(worker.link.path, 0, reads)
    await worker.link.attached()
    for i in range(MESSAGES):
        worker.link.send(Close(i.to_bytes(16)))
    for end in worker.transfer:
        end.channel.close()
    assert await worker.link.receive() == [Released(b"p", "all read")]
    process.join(WITHIN)
    assert process.exitcode == 0
    worker.link.close()


@pytest.mark.parametrize(
    ("says", "why"),
    [(b"", "truncated"), (msgspec.msgpack.encode(SAYS_2), "there are 2 ranks")],
    ids=["ends", "rank"],
)
async def test_a_connector_that_does_not_attach(says: bytes, why: str, directory: Path) -> None:
    """Another one, which waits for an answer, ends at once."""
    worker = Worker(directory, 2)
    with (
        closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as wrong,
        closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as other,
    ):
        for each in (wrong, other):
            each.settimeout(WITHIN)
            each.connect(worker.link.path)
        wrong.send(says) if says else wrong.shutdown(socket.SHUT_WR)
        with pytest.raises(ValueError, match=f"does not attach: .*{why}"):
            await worker.link.attached()
        for each in (wrong, other):
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(100) == b""
    worker.link.close()


async def test_another_user_gets_nothing(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    worker = Worker(directory)
    uids = iter([os.getuid() + 1, os.getuid()])
    monkeypatch.setattr(attachment, "_uid_of_peer", lambda sock: next(uids))
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as stranger:
        stranger.connect(worker.link.path)
        process = connector(worker.link.path, 0, waits)
        await worker.link.attached()
        assert stranger.recv(100) == b""
    process.kill()
    process.join()
    worker.link.close()
