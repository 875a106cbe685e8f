"""What waits for streams ends when they do."""

import asyncio

import pytest

from baton.bench.lab.harness.streams import Case, Stream, until
from tests.within import within

CASE = Case("", 1, temperature=0.0, seed=1)


async def read(stream: Stream) -> Stream:
    return stream


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Stream(CASE, error="no worker"), "a stream failed: no worker"),
        (Stream(CASE), "a stream failed: it ended early"),
    ],
)
async def test_a_stream_that_failed_is_not_waited_for(ended: Stream, said: str) -> None:
    going_on = asyncio.create_task(asyncio.sleep(3600))
    failed = asyncio.create_task(read(ended))
    with pytest.raises(RuntimeError, match=said):
        await within(until(lambda: bool(ended.token_ids), [going_on, failed]))
    going_on.cancel()


async def test_streams_that_have_all_ended_are_not_waited_for() -> None:
    whole = asyncio.create_task(read(Stream(CASE, token_ids=[1], finish_reason="length")))
    with pytest.raises(RuntimeError, match="all streams have ended"):
        await within(until(lambda: False, [whole]))
    await until(lambda: True, [whole])
