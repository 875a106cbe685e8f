"""Under attack the streams of other clients go on undisturbed, and nothing grows, restarts or leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.bench.chaos.cluster import LocalCluster, free_port, leaks_when_idle
from baton.bench.chaos.processes import resident_bytes
from baton.bench.chaos.streams import Case, Stream, cases, new_session, read
from tests.shallow import LAYERS

from .attack import BLOWS, Target
from .machine import command_lines
from .recovery import FLAGS

KEY, ATTACKER = "sk-of-a-client-who-is-served", "sk-of-the-client-who-attacks"
STREAMS = 4
GROWTH = 64 << 20
"""Bytes by which a process may grow while it is attacked: allocators keep what they once had."""
POOL = 600 * 16 * LAYERS * 2 * 3 * 64 * 4
"""Bytes of the KV pool of an engine: blocks, tokens, layers, K and V, heads, their size, float32. Each page
gets memory when it is first used."""


@pytest.fixture(scope="module")
def attacked(
    tmp_path_factory: pytest.TempPathFactory, shallow_model: list[str]
) -> Iterator[tuple[LocalCluster, int]]:
    """A cluster that asks for keys, and its gRPC port."""
    directory = tmp_path_factory.mktemp("attacked")
    keys, port = directory / "keys.toml", free_port()
    keys.write_text(
        f'[served]\nkey = "{KEY}"\n[attacker]\nkey = "{ATTACKER}"\nmax-requests = 16\nsalt = "another"\n'
    )
    flags = ("--api-key-file", str(keys), "--grpc-port", str(port))
    with LocalCluster(
        directory, prefill=1, decode=1, worker_flags=[*FLAGS, *shallow_model], router_flags=flags, key=KEY
    ) as cluster:
        yield cluster, port


class Attacker:
    """The process of an attack with all blows."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.report: dict[str, Any] = {}
        """Once it has ended."""
        self._process, self._to, self._from = process, process.stdin, process.stdout

    def begin(self, target: Target) -> None:
        self._to.write(json.dumps(asdict(target)).encode() + b"\n")

    async def rounds(self, count: int) -> None:
        """Until each blow was struck so many times more."""
        for _ in range(count):
            assert await self._from.readline() == b"\n", "the attack itself is broken"

    async def end(self) -> None:
        self._to.close()
        *_, report = (await self._from.read()).splitlines()
        self.report = json.loads(report)
        assert await self._process.wait() == 0, "the attack itself is broken"


@asynccontextmanager
async def attack(target: Target) -> AsyncIterator[Attacker]:
    """It goes on while this is entered."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.system.attack", cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        attacker = Attacker(process)
        attacker.begin(target)
        yield attacker
        await attacker.end()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def known(cluster: LocalCluster) -> dict[Case, list[int]]:
    """Requests, and the tokens of their answers before the attack."""
    asked = cases(STREAMS, 16)
    async with new_session(KEY) as http:
        streams = await asyncio.gather(*(read(http, cluster.url, case) for case in asked))
    for stream in streams:
        assert len(stream.token_ids) == stream.case.max_tokens, stream.error
    return {stream.case: stream.token_ids for stream in streams}


async def served(
    cluster: LocalCluster, right: dict[Case, list[int]], meanwhile: Coroutine[Any, Any, None]
) -> float:
    """Clients ask one known thing after another until `meanwhile` is done, and at least once. Every token is
    the right one. Returns the longest time in seconds that any of them waited for a token."""
    other = asyncio.create_task(meanwhile)

    async def client(case: Case) -> float:
        longest = 0.0
        async with new_session(KEY) as http:
            while longest == 0 or not other.done():
                stream = await read(http, cluster.url, case)
                assert not stream.failed, stream.error
                assert stream.token_ids == right[case]
                longest = max(longest, pause(stream))
        return longest

    pauses = await asyncio.gather(*(client(case) for case in right))
    await other
    return max(pauses)


def pause(stream: Stream) -> float:
    moments = [stream.started, *stream.arrivals, stream.ended]
    return max(after - before for before, after in pairwise(moments))


def memory(cluster: LocalCluster) -> Counter[str]:
    """Bytes of the processes of the cluster, by title: the compiler of grammars is replaced now and then."""
    found: Counter[str] = Counter()
    for role in ("prefill", "decode", "router"):
        [worker] = cluster.of(role)
        service = worker.processes()["service"]
        found[role] = resident_bytes(service)
        for process, line in command_lines(service).items():
            with contextlib.suppress(OSError):  # gone
                found[line.partition("\0")[0].strip()] += resident_bytes(process.pid)
    return found


def may_grow(title: str) -> int:
    if title.endswith("bodies"):
        return 2 * GROWTH  # two processes have this title
    return GROWTH + POOL if title.endswith("engine") else GROWTH


@pytest.mark.parametrize(
    ("warm_up", "rounds"),
    [(1, 0), pytest.param(30, 300, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
async def test_known_streams_go_on(attacked: tuple[LocalCluster, int], warm_up: int, rounds: int) -> None:
    """Every blow is struck in each round of the attack, and every client reads whole streams meanwhile."""
    cluster, grpc_port = attacked
    right = await known(cluster)
    lives = [worker.lives[-1] for worker in cluster.workers]
    target = Target(
        cluster.url, grpc_port, ATTACKER, [life["address"] for life in lives],
        int(next(life["kv_address"] for life in lives if life.get("kv_address")).rpartition(":")[2]),
        cluster.secret, " ".join(case.prompt for case in right),
    )  # fmt: skip
    async with attack(target) as attacker:
        await served(cluster, right, attacker.rounds(warm_up))
        before = memory(cluster)
        longest = await served(cluster, right, attacker.rounds(rounds))
    report = attacker.report
    print(f"longest pause {longest:.2f} s;", report)
    assert report["believed"] == {}
    assert report["struck"].keys() == BLOWS.keys()
    assert min(report["struck"].values()) >= warm_up + rounds
    places = [*cluster.workers, *cluster.of("router")]
    assert [(len(place.lives), place.exits) for place in places] == [(1, [])] * 3, "none was started again"
    assert await asyncio.to_thread(leaks_when_idle, cluster.url, KEY) == {}

    def grown() -> dict[str, int]:
        """MiB by which processes have grown too much."""
        after = memory(cluster)
        return {name: size >> 20 for name, size in (after - before).items() if size > may_grow(name)}

    # A child may still prepare a body whose client has gone.
    deadline = time.monotonic() + 20
    while (too_much := grown()) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    assert too_much == {}, "MiB"
