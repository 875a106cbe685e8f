"""Clients that go at any moment: nothing fails or leaks."""

import asyncio
import random
from dataclasses import replace

import pytest

from baton.bench.lab.harness.cluster import status
from baton.bench.lab.harness.streams import Case, Stream, cases, new_session, read

from .recovery import Broken

pytestmark = pytest.mark.all

ENDLESS = 500
"""Tokens of an answer that is not over when its client goes."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("requests", [32, pytest.param(500, marks=pytest.mark.long)])
async def test_half_of_all_clients_go_at_random_moments(broken: Broken, requests: int) -> None:
    """In the queue, in the prefill, in the transfer, while decoding: nothing of them stays anywhere."""
    await asyncio.to_thread(broken.all_back)
    rng = random.Random(requests)
    asked = cases(requests, 8)
    typical = asyncio.get_running_loop().create_future()
    at_once = asyncio.Semaphore(24)
    gone = 0

    async def client(case: Case) -> Stream | None:
        nonlocal gone
        async with at_once:
            goes = rng.random() < 0.5
            case = replace(case, max_tokens=ENDLESS) if goes else case
            reading = asyncio.create_task(read(http, broken.cluster.url, case))
            if goes:
                usual = typical.result() if typical.done() else 1.0
                await asyncio.wait({reading}, timeout=rng.uniform(0, usual))
                if not reading.done():
                    gone += 1
                    reading.cancel()
                    await asyncio.wait({reading})
                    return None
            stream = await reading
            if not typical.done():
                typical.set_result(stream.ended - stream.started)
            return stream

    decoded = await asyncio.to_thread(broken.tokens_decoded)
    async with new_session() as http:
        streams = await asyncio.gather(*(client(case) for case in asked))
    for stream in filter(None, streams):
        assert not stream.failed, stream
        assert len(stream.token_ids) == stream.case.max_tokens, stream
    assert gone > requests / 4
    await broken.settled()
    decoded = await asyncio.to_thread(broken.tokens_decoded) - decoded
    assert decoded < gone * ENDLESS / 2, "an answer ends when its client has gone"
    assert status(broken.cluster.url)["router"]["requests"] == 0
