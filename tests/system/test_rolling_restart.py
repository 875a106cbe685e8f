"""`baton serve` with two workers of each role restarts them all under load: clients see a pause at most."""

import asyncio
import random
import signal

import pytest

from baton.bench.lab.harness.streams import Load, cases, expected, judge

from .machine import Machine
from .serve import Serve

pytestmark = pytest.mark.all

CASES = cases(8, 24)


@pytest.mark.long
async def test_every_worker_is_restarted_under_load() -> None:
    machine = Machine()
    served = Serve(
        machine,
        "--prefill",
        "2",
        "--decode",
        "2",
        "--advanced.num-blocks",
        "600",
        "--advanced.num-threads",
        "1",
    )
    try:
        await asyncio.to_thread(served.until_ready)
        right = await expected(served.url, CASES, at_once=8)
        before = await asyncio.to_thread(served.incarnations)
        load = Load(served.url, CASES, random.Random(0))
        async with load.of(6):
            told = await asyncio.to_thread(machine.baton, "restart", "--url", served.url, within=600)
        assert told.returncode == 0, told.stderr
        names = "prefill 0", "prefill 1", "decode 0", "decode 1"
        assert set(told.stdout.splitlines()[1:]) == {f"{name}: restarted" for name in names}
        verdict = judge(load.streams, right)
        assert (verdict.failed, verdict.lost_or_repeated, verdict.different) == (0, 0, 0), verdict.errors
        assert verdict.requests > 6
        after = await asyncio.to_thread(served.incarnations)
        assert len(after) == 4
        assert not set(before.values()) & set(after.values())
        await asyncio.to_thread(served.assert_whole)
        await asyncio.to_thread(served.stop, signal.SIGTERM)
    finally:
        served.kill()
        machine.remove()
