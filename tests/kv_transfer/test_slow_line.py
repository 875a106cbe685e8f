"""Lines on which one frame takes longer than every deadline: as long as bytes flow, nothing ends."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import baton.kv_transfer as kv
from tests.layouts import kv_layout
from tests.proxy import Proxy

from .transfer_process import deadlines

LAYOUT = kv_layout(3, 8, 128, "float32")  # 8 KiB a position and layer
SLOT_BYTES = 768 << 10
TOKENS = SLOT_BYTES // LAYOUT.arrays[0].bytes  # a frame a layer
RATE = 800_000.0  # bytes a second, of all lanes: three frames at once take 2.9 s
PROGRESS = 0.8
SHORT = deadlines(progress=PROGRESS, hold=1.5)
KINDS = pytest.mark.parametrize("movers", [0, 1])
_CHUNK = 1 << 13


class SlowLine(Proxy):
    """Carries lanes to a prefill worker; what comes back is throttled, byte by byte, as one line is."""

    def __init__(self, port: int) -> None:
        self.rate = RATE
        self.carried = 0  # bytes, back
        self._port = port
        self._turn = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        super().__init__()

    def stand_still(self) -> None:
        self._loop.call_soon_threadsafe(self._open.clear)

    def go_on(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

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
                await self._open.wait()
                await asyncio.sleep(len(data) / self.rate)
            self.carried += len(data)
            to.write(data)
            await to.drain()


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
    prefill_id = pair.prefill.hold(TOKENS)
    return prefill_id, pair.decode.fetch(pair.prefill, prefill_id, TOKENS, kv_address=line.address)


@pytest.mark.all
@KINDS
def test_a_frame_that_takes_several_deadlines(make_line: Any, movers: int) -> None:
    """The whole transfer takes longer than `hold`, too."""
    pair, line = make_line(movers, SHORT)
    prefill_id, decode_id = fetched(pair, line)
    blocks = pair.prefill.held[prefill_id]
    event = pair.event(decode_id)
    assert isinstance(event, kv.Injected), event
    assert line.carried / RATE > 3 * PROGRESS, "it was no slow line"
    pair.assert_same(blocks, decode_id, 0, TOKENS)
    pair.assert_whole()
    for stats, ended in ((pair.prefill.stats(), "acked"), (pair.decode.stats(), "injected")):
        assert (stats.deadlines, stats.transfers, stats.frames_sent + stats.frames_received) == (
            {},
            {ended: 1},
            3,
        )


@pytest.mark.all
@KINDS
def test_a_line_that_stands_still(make_line: Any, movers: int) -> None:
    """In mid-frame: one side gives the transfer up after `progress`. Then it goes on, and all is well."""
    pair, line = make_line(movers, deadlines(progress=50.0))
    prefill_id, decode_id = fetched(pair, line)
    blocks = pair.prefill.held[prefill_id]
    pair.until(lambda: line.carried > SLOT_BYTES // 2, "it to be in mid-frame")
    assert pair.prefill.stats().deadlines == pair.decode.stats().deadlines == {}
    line.stand_still()
    for worker in (pair.prefill, pair.decode):
        worker.later(20.0)  # a little of it came just before
        assert [worker.stats().deadlines for _ in range(2)] == [{}, {}]

    def ends() -> dict[str, int]:
        """No time passes once a side has given up: its mover would have closed the lane by then."""
        for worker in (pair.prefill, pair.decode):
            worker.later(10.0)
            found = [each.stats().deadlines for each in (pair.prefill, pair.decode) for _ in range(2)]
            if any(found):
                return next(filter(None, found))
        return {}

    assert pair.until(ends, "its end") == {"progress": 1}
    line.rate = 1e9
    line.go_on()
    assert isinstance(pair.event(decode_id), kv.Injected)
    pair.assert_same(blocks, decode_id, 0, TOKENS)
    pair.assert_whole()


def test_a_cancel_ends_what_flows_slowly(make_line: Any) -> None:
    """The blocks are free at once, though frames of it are under way for long."""
    pair, line = make_line(0, SHORT)
    prefill_id, _ = fetched(pair, line)
    pair.until(lambda: line.carried > SLOT_BYTES // 4, "it to be in mid-frame")
    pair.prefill.sender.close(prefill_id, "cancelled")
    pair.until(lambda: pair.prefill.released == {prefill_id: "cancelled"}, "its blocks")
    assert line.carried < 3 * SLOT_BYTES, "at once"
    stats = pair.prefill.stats()
    assert (stats.prefills_held, stats.transfers_open) == (0, 0)
