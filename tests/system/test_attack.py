"""Under attack the streams of other clients go on undisturbed, and nothing grows, restarts or leaks."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.bench.lab.harness.cluster import free_port, leaks_when_idle, status
from baton.bench.lab.harness.streams import Case, Stream, cases, new_session, read
from baton.worker.engine_process.loop import IDLE_TICK
from tests.memory import anonymous_bytes
from tests.shallow import LAYERS
from tests.within import WITHIN

from .attack import BLOWS, Target
from .machine import Machine, listening, resident_bytes, tree
from .serve import Serve

pytestmark = pytest.mark.all

KEY = "sk-of-a-client-who-is-served"
ATTACKERS = ("sk-of-the-one-who-floods", "sk-of-the-one-who-stalls", "sk-of-the-one-who-asks-for-much")
GRAMMARS = ("costly_schemas", "composed_grammars", "dear_grammars")
STREAMS = 6
STALLED = 30.0
"""Seconds without a token after which a stream stands still, in long tests: their machine has nothing else to
do. On two idle cores the longest are a tenth of that (docs/lab/tests.md)."""
PAUSE = 0.3
"""Seconds between two requests of a client in the short form. Without it clients compute as much as blows."""
BODIES = 512 << 20
"""Bytes that the router may have for bodies at any time: 16 of the largest, and copies of some."""
GROWTH = 64 << 20
"""Bytes by which a process may grow while it is attacked: allocators keep what they once had."""
POOL = 600 * 16 * LAYERS * 2 * 3 * 64 * 4
"""Bytes of the KV pool of an engine: blocks, tokens, layers, K and V, heads, their size, float32. Each page
gets memory when it is first used."""


@dataclass(frozen=True)
class Attacked:
    serve: Serve
    target: Target
    admin: str


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, shallow_model_path: Path) -> Iterator[Attacked]:
    """A cluster that asks for keys."""
    directory, machine = tmp_path_factory.mktemp("attacked"), Machine()
    keys, secret = directory / "keys.toml", directory / "secret"
    attackers = (f'[{key[14:]}]\nkey = "{key}"\nmax-requests = 16\nsalt = "another"' for key in ATTACKERS)
    keys.write_text("\n".join([f'[served]\nkey = "{KEY}"', *attackers]))
    secret.write_text("a secret of this cluster alone")
    grpc_port, admin_port = free_port(), free_port()
    admin = f"http://127.0.0.1:{admin_port}"
    serve = Serve(
        machine, "--model", str(shallow_model_path), "--advanced.num-threads", "1",
        "--advanced.num-blocks", "600",
        "--max-num-batched-tokens", "64", "--api-key-file", str(keys), "--cluster-secret-file", str(secret),
        "--grpc-port", str(grpc_port), "--admin-port", str(admin_port), "--tool-call-parser", "qwen3_coder",
    )  # fmt: skip
    try:
        serve.until_ready()
        ports = {
            name: listening([process for process in tree(serve.process.pid) if process.pid in pids])
            for name, pids in serve.processes().items()
        }
        workers = [worker["address"] for worker in status(admin)["workers"]]
        services = {port for role in ("prefill 0", "decode 0") for port in ports[role]}
        metrics = services - {int(address.rpartition(":")[2]) for address in workers}
        pages = [f"{admin}/{page}" for page in ("metrics", "status", "health", "ready")]
        pages += [f"http://127.0.0.1:{port}/metrics" for port in metrics]
        [kv_port] = ports["prefill 0 transfer"]
        target = Target(
            serve.url, grpc_port, *ATTACKERS, workers, sorted(set().union(*ports.values())), pages,
            kv_port, secret.read_text(), " ".join(case.prompt for case in cases(STREAMS, 1)),
        )  # fmt: skip
        yield Attacked(serve, target, admin)
        serve.stop(signal.SIGTERM)
        machine.assert_no_trace()
    finally:
        serve.kill()
        machine.remove()


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

    async def goes_on(self, seconds: float) -> None:
        """For so long, and until each blow was struck once more in each of its ways."""
        end = time.monotonic() + seconds
        while True:
            assert await self._from.readline() == b"\n", "the attack itself is broken"
            if time.monotonic() >= end:
                return

    async def end(self) -> None:
        self._to.close()
        *_, report = (await self._from.read()).splitlines()
        self.report = json.loads(report)
        assert await self._process.wait() == 0, "the attack itself is broken"


@asynccontextmanager
async def attack(target: Target, *blows: str) -> AsyncIterator[Attacker]:
    """It goes on while this is entered. `blows`: as of the module."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.system.attack", *blows, cwd=Path(__file__).parents[2],
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


async def known(url: str, seconds: float) -> dict[Case, list[int]]:
    """Requests, and the tokens of their answers before the attack. The short form has fewer clients: they
    compute as much as the machine can."""
    asked = cases(STREAMS if seconds else 2, 16)
    async with new_session(KEY) as http:
        streams = await asyncio.gather(*(read(http, url, case) for case in asked))
    for stream in streams:
        assert len(stream.token_ids) == stream.case.max_tokens, stream.error
    return {stream.case: stream.token_ids for stream in streams}


async def served(
    url: str, right: dict[Case, list[int]], meanwhile: Coroutine[Any, Any, None], rest: float
) -> float:
    """Clients ask one known thing after another until `meanwhile` is done, and at least once. Every token is
    the right one. Returns the longest time in seconds that any of them waited for a token. `rest`: seconds
    between two requests of a client."""
    other = asyncio.create_task(meanwhile)

    async def client(case: Case) -> float:
        longest = 0.0
        async with new_session(KEY) as http:
            while longest == 0 or not other.done():
                stream = await read(http, url, case)
                assert not stream.failed, stream.error
                assert stream.token_ids == right[case]
                longest = max(longest, pause(stream))
                await asyncio.sleep(rest)
        return longest

    pauses = await asyncio.gather(*(client(case) for case in right))
    await other
    return max(pauses)


def pause(stream: Stream) -> float:
    moments = [stream.started, *stream.arrivals, stream.ended]
    return max(after - before for before, after in pairwise(moments))


def memory(serve: Serve) -> Counter[str]:
    """Bytes of the processes of the cluster, by title: the compiler of grammars is replaced now and then."""
    found: Counter[str] = Counter()
    for title, pids in serve.processes().items():
        for pid in pids:
            with contextlib.suppress(psutil.Error):  # gone
                found[title] += resident_bytes(pid)
    return found


async def fill_pools(url: str) -> None:
    """Each block of an engine's pool is used once, and gets its memory."""
    async with new_session(KEY) as http:
        for first in range(0, 600, 20):
            prompt = [1000 + first + i // 16 for i in range(16 * 20)]
            asked = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
            async with http.post(f"{url}/v1/completions", json=asked) as response:
                assert response.status == 200, await response.text()


async def compute_all_sizes(url: str) -> None:
    """Products of all numbers of rows that an attack may bring: code for each takes memory once."""
    async with new_session(KEY) as http:

        async def ask(tokens: int, max_tokens: int, choices: int = 1) -> None:
            prompt = [1000 + max_tokens + i for i in range(tokens)]
            asked = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1}
            asked["n"] = choices
            async with http.post(f"{url}/v1/completions", json=asked) as response:
                assert response.status == 200, await response.text()

        for rows in range(1, 65):
            await ask(rows, 1)
            await ask(1, 1, choices=rows)  # a step of a prefill worker samples a token for each
        await asyncio.gather(*(ask(1, steps) for steps in range(2, 130)))


async def memory_at_rest(serve: Serve) -> Counter[str]:
    """As `memory`, once idle engines have given back what they can."""
    last = memory(serve)
    while True:
        await asyncio.sleep(3 * IDLE_TICK)
        now = memory(serve)
        if all(size > last[title] - (1 << 20) for title, size in now.items()):
            return now
        last = now


def lives(serve: Serve) -> dict[str, set[int]]:
    """Processes that no attack may end, by title."""
    children = ("bodies", "grammars")
    return {title: pids for title, pids in serve.processes().items() if not title.endswith(children)}


def may_grow(title: str) -> int:
    if title.endswith("bodies"):
        return 2 * GROWTH  # two processes have this title
    return GROWTH + POOL if title.endswith("engine") else GROWTH


async def peak(pid: int) -> int:
    """The most `anonymous_bytes` that a process has at any time, until this is cancelled."""
    most = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            most = max(most, anonymous_bytes(pid))
            await asyncio.sleep(0.1)
    return most


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(0, marks=pytest.mark.timeout(1800)),
        pytest.param(600, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
async def test_known_streams_go_on(attacked: Attacked, seconds: float) -> None:
    """Every blow is struck in each of its ways, and every client reads whole streams meanwhile.

    In the short form the next test strikes those of grammars.
    """
    serve, blows = attacked.serve, {*BLOWS} if seconds else {*BLOWS}.difference(GRAMMARS)
    rest = 0 if seconds else PAUSE
    right = await known(serve.url, seconds)
    before = await asyncio.to_thread(lives, serve)
    [router] = before["router 0.0"]
    idle, watching = anonymous_bytes(router), asyncio.create_task(peak(router))
    async with attack(replace(attacked.target, once=not seconds), *blows) as attacker:
        pauses = [await served(serve.url, right, attacker.goes_on(seconds / 10), rest)]
        warm = memory(serve)
        if seconds:
            pauses.append(await served(serve.url, right, attacker.goes_on(seconds), rest))
    watching.cancel()
    grew, report = await watching - idle, attacker.report
    print(f"longest pause {max(pauses):.2f} s, the router grew by {grew >> 20} MiB;", report)
    assert grew <= BODIES
    assert report["believed"] == report["unanswered"] == {}
    assert report["struck"].keys() == blows
    assert report["frames"] > 0
    # A child that begins has its parent's title for a moment, so only processes of before count.
    after = await asyncio.to_thread(lives, serve)
    kept = {title: pids & after.get(title, set()) for title, pids in before.items()}
    assert kept == before, "nothing was started again"
    assert await asyncio.to_thread(leaks_when_idle, attacked.admin) == {}

    def grown() -> dict[str, int]:
        """MiB by which processes have grown too much."""
        after = memory(serve)
        return {name: size >> 20 for name, size in (after - warm).items() if size > may_grow(name)}

    # A child may still prepare a body whose client has gone.
    deadline = time.monotonic() + WITHIN
    while (too_much := grown()) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    assert too_much == {}, "MiB"
    assert not seconds or max(pauses) < STALLED


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0, pytest.param(600, marks=pytest.mark.timeout(1800))])
async def test_grammars_of_others_neither_end_an_engine_nor_hold_up_a_small_schema(
    attacked: Attacked, seconds: float
) -> None:
    serve, rest = attacked.serve, 0 if seconds else PAUSE
    right = await known(serve.url, seconds)
    if seconds:
        await fill_pools(serve.url)
        await compute_all_sizes(serve.url)
    before = await asyncio.to_thread(lives, serve)
    pauses: list[float] = []
    waits: list[float] = []

    async def small_schemas(attacker: Attacker, seconds: float) -> None:
        """A client asks for one small schema after another, each for the first time."""
        attacking = asyncio.create_task(attacker.goes_on(seconds))
        async with new_session(KEY) as http:
            while not attacking.done() or not waits:
                schema = {"type": "object", "properties": {f"p{len(waits)}": {"type": "integer"}}}
                asked = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema}}
                began = time.monotonic()
                async with http.post(f"{serve.url}/v1/completions", json=asked) as response:
                    assert response.status == 200, await response.text()
                waits.append(time.monotonic() - began)
                await asyncio.sleep(rest)
        await attacking

    memories: list[Counter[str]] = []
    for part in (seconds / 10, seconds) if seconds else (seconds,):
        async with attack(replace(attacked.target, once=not seconds), *GRAMMARS) as attacker:
            pauses.append(await served(serve.url, right, small_schemas(attacker, part), rest))
        assert attacker.report["unanswered"] == {}
        assert await asyncio.to_thread(leaks_when_idle, attacked.admin) == {}
        memories.append(await memory_at_rest(serve))
    after = await asyncio.to_thread(lives, serve)
    kept = {title: pids & after.get(title, set()) for title, pids in before.items()}
    assert kept == before, "nothing was started again"
    # In the first part the caches of grammars are filled.
    warm, last = memories[0], memories[-1]
    grown = {title: size / warm[title] - 1 for title, size in last.items() if title.endswith("engine")}
    waited = f"{len(waits)} small schemas waited for {max(waits):.2f} s at most"
    print(f"longest pause {max(pauses):.2f} s; {waited}; engines grew by {grown};", attacker.report)
    if seconds:
        assert max(*pauses, *waits) < STALLED
        assert max(grown.values()) <= 0.05
