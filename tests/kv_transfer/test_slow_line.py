"""Lines on which one frame takes longer than every deadline: as long as bytes flow, nothing ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import baton.kv_transfer as kv
from tests.proxy import Proxy

from .transfer_process import deadlines

LAYOUT = kv.KVLayout(3, 8, 128, "float32")  # 8 KiB a position and layer
SLOT_BYTES = 768 << 10
TOKENS = SLOT_BYTES // LAYOUT.bytes_per_token_layer  # a frame a layer
PROGRESS = 0.8
SHORT = deadlines(progress=PROGRESS, hold=1.5)
STEP_S = 0.2
STEP_BYTES = LAYOUT.num_layers * SLOT_BYTES // 16  # of all lanes: three frames at once take 3.2 s
KINDS = pytest.mark.parametrize("movers", [0, 1])
_CHUNK = 1 << 13


class SlowLine(Proxy):
    """Carries lanes to a prefill worker; so much comes back as a test lets through, in turns of the lanes."""

    def __init__(self, port: int) -> None:
        self.carried = 0  # bytes, back
        self._most = 0.0
        self._port = port
        self._turn = asyncio.Lock()
        self._open = asyncio.Event()
        super().__init__()

    def let_through(self, more: float) -> None:
        """So many bytes more. Then the line stands still."""
        self._most += more
        self._loop.call_soon_threadsafe(self._open.set)

    @property
    def stands_still(self) -> bool:
        return self.carried >= self._most

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError), socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # what is on its way is prefill's
            sock.setblocking(False)
            await self._loop.sock_connect(sock, ("127.0.0.1", self._port))
            ways = [asyncio.create_task(way) for way in (self._forth(near, sock), self._back(sock, back))]
            _, others = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in others:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        back.close()

    async def _forth(self, near: asyncio.StreamReader, sock: socket.socket) -> None:
        while data := await near.read(1 << 16):
            await self._loop.sock_sendall(sock, data)

    async def _back(self, sock: socket.socket, to: asyncio.StreamWriter) -> None:
        while data := await self._loop.sock_recv(sock, _CHUNK):
            async with self._turn:  # lanes take turns
                while self.stands_still:
                    self._open.clear()
                    await self._open.wait()
                to.write(data)
                await to.drain()
                self.carried += len(data)


@pytest.fixture
def make_line(make_pair: Any) -> Iterator[Callable[..., tuple[Any, SlowLine]]]:
    made: list[SlowLine] = []

    def make(movers: int, limits: kv.TransferDeadlines) -> tuple[Any, SlowLine]:
        settings = {
            "layout": LAYOUT, "slot_bytes": SLOT_BYTES, "blocks": 16, "movers": movers,
            "lanes": 3, "deadlines": limits,
        }  # fmt: skip
        pair = make_pair(settings, settings)
        made.append(SlowLine(pair.prefill.port))
        return pair, made[-1]

    yield make
    for line in made:
        line.close()


def fetched(pair: Any, line: SlowLine) -> tuple[bytes, bytes]:
    """From now on time passes by `later` alone."""
    for worker in (pair.prefill, pair.decode):
        assert worker.stats().lanes == 0, "it is up"
        worker.clock.stop()
    prefill_id = pair.prefill.hold(TOKENS)
    return prefill_id, pair.decode.fetch(pair.prefill, prefill_id, TOKENS, kv_address=line.address)


@KINDS
def test_a_frame_that_takes_several_deadlines(make_line: Any, movers: int) -> None:
    """The whole transfer takes longer than `hold`, too."""
    pair, line = make_line(movers, SHORT)
    prefill_id, decode_id = fetched(pair, line)
    blocks = pair.prefill.held[prefill_id]
    seconds = 0.0
    while decode_id not in pair.decode.events:
        line.let_through(STEP_BYTES)
        pair.until(lambda: line.stands_still or decode_id in pair.decode.events, "bytes")
        for worker in (pair.prefill, pair.decode):
            for _ in range(2):
                worker.stats()  # it has handled what came before
            worker.later(STEP_S)
        seconds += STEP_S
    assert isinstance(event := pair.event(decode_id), kv.Injected), event
    assert seconds > 3 * PROGRESS, "it was no slow line"
    line.let_through(math.inf)
    pair.assert_same(blocks, decode_id, 0, TOKENS)
    pair.assert_whole()
    for stats, ended in ((pair.prefill.stats(), "acked"), (pair.decode.stats(), "injected")):
        assert (stats.deadlines, stats.transfers, stats.frames_sent + stats.frames_received) == (
            {},
            {ended: 1},
            3,
        )


@KINDS
def test_a_line_that_stands_still(make_line: Any, movers: int) -> None:
    """In mid-frame: one side gives the transfer up after `progress`. Then it goes on, and all is well."""
    pair, line = make_line(movers, deadlines(progress=50.0))
    prefill_id, decode_id = fetched(pair, line)
    blocks = pair.prefill.held[prefill_id]
    line.let_through(SLOT_BYTES // 2)
    pair.until(lambda: line.stands_still, "it to be in mid-frame")
    assert pair.prefill.stats().deadlines == pair.decode.stats().deadlines == {}
    for worker in (pair.prefill, pair.decode):
        worker.later(20.0)  # a little of it came just before
        assert [worker.stats().deadlines for _ in range(2)] == [{}, {}]

    def ends() -> dict[str, int]:
        for worker in (pair.prefill, pair.decode):
            worker.later(10.0)
        return pair.prefill.stats().deadlines or pair.decode.stats().deadlines

    assert pair.until(ends, "its end") == {"progress": 1}
    line.let_through(math.inf)
    assert isinstance(pair.event(decode_id), kv.Injected)
    pair.assert_same(blocks, decode_id, 0, TOKENS)
    pair.assert_whole()


def test_a_cancel_ends_what_flows_slowly(make_line: Any) -> None:
    """The blocks are free at once, though frames of it are under way for long."""
    pair, line = make_line(0, SHORT)
    prefill_id, _ = fetched(pair, line)
    line.let_through(SLOT_BYTES // 4)
    pair.until(lambda: line.stands_still, "it to be in mid-frame")
    pair.prefill.sender.close(prefill_id, "cancelled")
    pair.until(lambda: pair.prefill.released == {prefill_id: "cancelled"}, "its blocks")
    stats = pair.prefill.stats()
    assert (stats.prefills_held, stats.transfers_open) == (0, 0)
