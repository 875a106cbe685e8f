"""`baton serve` with two workers of each role restarts them all under load: clients see a pause at most."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from bench.chaos.load import Load, judge
from bench.chaos.streams import cases, expected

from .conftest import Server, start_server, stop_server

CASES = cases(8, 24)


def workers(server: Server) -> set[str]:
    """The incarnations that serve."""
    return {w["incarnation"] for w in server.get("/status")["workers"] if w["state"] == "ready"}


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_every_worker_is_restarted_under_load(tmp_path: Path) -> None:
    flags = ("--prefill", "2", "--decode", "2", "--num-blocks", "600", "--num-threads", "1")
    server = await asyncio.to_thread(start_server, tmp_path, *flags)
    try:
        right = await expected(server.url, CASES, at_once=8)
        before = await asyncio.to_thread(workers, server)
        load, stop = Load(server.url, CASES, random.Random(0)), asyncio.Event()
        loading = asyncio.create_task(load.run(6, stop))
        os.kill(server.process.pid, signal.SIGUSR1)
        while b"Every worker is a new one." not in await asyncio.to_thread(server.log.read_bytes):
            assert server.process.poll() is None
            await asyncio.sleep(0.2)
        stop.set()
        await loading
        verdict = judge(load.streams, right)
        assert (verdict.failed, verdict.lost_or_repeated, verdict.different) == (0, 0, 0), verdict.errors
        assert verdict.requests > 6
        after = await asyncio.to_thread(workers, server)
        assert len(after) == 4
        assert not before & after
        await asyncio.to_thread(server.assert_whole)
        assert await asyncio.to_thread(stop_server, server) == 0, server.log.read_text()
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
