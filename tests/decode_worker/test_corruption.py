"""Bytes damaged between prefill's checksum and decode's: caught, sent again, and the answer is right.

Whole workers with the embedded model; between them a wire that damages what the test tells it to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rpc import worker_pb2 as pb
from tests.cluster_helpers import (
    Pair,
    WorkerProcess,
    assert_whole,
    attached,
    metrics,
    request,
    sampling,
    start_worker,
)

HEADER, KV = 64, 4
PROMPT = [504, 3575, 282, 4649, 314] * 12
PARAMS = sampling(max_tokens=12, ignore_eos=True)


@dataclass
class Wire:
    """Forwards lanes to a prefill worker. `damage` has where to flip a bit of the next KV frames, in turn."""

    port: int
    damage: list[int] = field(default_factory=list)
    address: str = ""

    async def carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One lane, both ways, until either end closes."""
        far, forth = await asyncio.open_connection("127.0.0.1", self.port)
        ways = [asyncio.create_task(way) for way in (self._plain(near, forth), self._frames(far, back))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (forth, back):
            end.close()

    async def _plain(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            to.write(data)
            await to.drain()

    async def _frames(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await source.readexactly(HEADER)
                frame = bytearray(head + await source.readexactly(int.from_bytes(head[44:48], "little")))
                if head[5] == KV and self.damage:
                    frame[self.damage.pop(0) % len(frame)] ^= 0x10
                to.write(frame)
                await to.drain()


@pytest.fixture(scope="module")
def workers(
    tmp_path_factory: pytest.TempPathFactory, embedded_model_path: Path
) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    directory = tmp_path_factory.mktemp("wire")
    started = [
        start_worker(role, embedded_model_path, directory, engine={"max_num_batched_tokens": 64})
        for role in ("prefill", "decode")
    ]
    try:
        prefill, decode = (worker.wait_ready() for worker in started)
        yield prefill, decode
        assert [worker.stop() for worker in started] == [0, 0]
    finally:
        for worker in started:
            worker.popen.kill()


@pytest.fixture
async def wire(workers: tuple[WorkerProcess, WorkerProcess]) -> AsyncIterator[Wire]:
    wire = Wire(int(workers[0].ready["kv_address"].rpartition(":")[2]))
    async with await asyncio.start_server(wire.carry, "127.0.0.1", 0) as server:
        wire.address = "127.0.0.1:" + str(server.sockets[0].getsockname()[1])
        yield wire


@contextlib.asynccontextmanager
async def over(wire: Wire, workers: tuple[WorkerProcess, WorkerProcess]) -> AsyncIterator[Pair]:
    prefill, decode = workers
    async with attached(prefill) as p, attached(decode) as d:
        yield Pair(p, d, wire.address, prefill.ready["incarnation"])


async def right_answer(pair: Pair) -> list[int]:
    return (await pair.generate(PROMPT, PARAMS)).tokens


@pytest.mark.parametrize(
    ("where", "kind"), [(HEADER, "payload"), (10_000, "payload"), (1 << 15, "payload"), (30, "header")]
)
async def test_damage_is_caught_and_mended(
    workers: tuple[WorkerProcess, WorkerProcess], wire: Wire, where: int, kind: str
) -> None:
    """A damaged payload costs the transfer, a damaged header the session: decode asks again, unasked."""
    counter = f'baton:kv_checksum_failures_total{{kind="{kind}"}}'
    decode = workers[1]
    async with over(wire, workers) as pair:
        right = await right_answer(pair)
        before = metrics(decode).get(counter, 0)
        wire.damage = [where]
        assert await right_answer(pair) == right
        assert not wire.damage
        await assert_whole(*workers)
        assert metrics(decode)[counter] == before + 1


async def test_damage_without_end_fails_the_kv_and_not_the_request(
    workers: tuple[WorkerProcess, WorkerProcess], wire: Wire
) -> None:
    """After two more FETCHes the router decides; the reservation is kept for its next prefill."""
    async with over(wire, workers) as pair:
        right = await right_answer(pair)
        wire.damage = [1000] * 1000
        prefill_id, decode_id = await pair.submit(request(PROMPT, PARAMS))
        await pair.decode.reserved(decode_id)
        failure = await pair.decode.failure(decode_id)
        assert (failure.code, failure.message) == (pb.FAILURE_CODE_KV_FAILED, "integrity")
        wire.damage = []
        await pair.prefill.cancel(prefill_id)
        again = await pair.prefill.submit_prefill(request(PROMPT, PARAMS), handover=True)
        await pair.decode.send(retarget=pb.Retarget(decode_id=decode_id, source=pair.source(again)))
        tokens = await pair.decode.tokens(decode_id)
        assert [token.token_id for token, _ in tokens] == right
        await assert_whole(*workers)
