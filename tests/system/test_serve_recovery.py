"""`baton serve` with one worker of each role: Ray brings the killed one back, and streams wait for it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from bench.chaos.streams import cases, expected

from .conftest import Server, start_server, stop_server
from .machine import titled
from .recovery import each_has, ride

CASES = cases(8, 24)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("serve"), "--num-blocks", "600", "--engine-timeout", "3")
    try:
        yield server
        server.assert_whole()
        assert stop_server(server) == 0, server.log.read_text()
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)


def incarnations(server: Server) -> dict[str, str]:
    return {w["role"]: w["incarnation"] for w in server.get("/status")["workers"] if w["state"] == "ready"}


async def test_streams_wait_for_the_next_incarnation(serving: Server) -> None:
    """Decode's engine is killed, and with it the prefill worker that has to compute it all again."""
    right = await expected(serving.url, CASES, at_once=8)
    before = await asyncio.to_thread(incarnations, serving)

    def kill() -> None:
        for title in ("decode 0 engine", "prefill 0"):
            victim = titled(serving.process.pid, f"baton: {title}")
            assert victim is not None
            os.kill(victim.pid, signal.SIGKILL)

    await ride(serving.url, right, CASES, (each_has(3), kill))
    after = await asyncio.to_thread(incarnations, serving)
    assert before.keys() == after.keys() == {"prefill", "decode"}
    assert not set(before.values()) & set(after.values())
    await asyncio.to_thread(serving.assert_whole)
