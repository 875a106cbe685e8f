"""Every kind of process of `baton serve` is killed and stopped, while clients read streams with known tokens.

Killed is SIGKILL, stopped is SIGSTOP: the process hangs. It goes on only if the cluster does not end it.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.bench.lab.harness.cluster import free_port, leaks_when_idle, status
from baton.bench.lab.harness.streams import (
    Case,
    Happened,
    Load,
    Stream,
    cases,
    expected,
    judge,
    new_session,
    read,
)
from baton.kv_transfer import TransferDeadlines
from tests.within import WITHIN, eventually

from .machine import Machine, until
from .recovery import MIXED, PATIENT
from .serve import Serve

pytestmark = pytest.mark.all

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
CLIENTS = 2
PAUSE, WAITING = 0.5, 2.0
"""Seconds between two requests of a client, and while a fault lasts. Without them both cores compute all the
time, and the three ranks of a decode worker mostly wait for each other."""
BACK_S = 150.0
"""A worker that was killed often waits for up to 30 s. One that hangs is noticed after 10 s, and a process
that prepares requests after a minute."""
WHOLE_S = TransferDeadlines().hold + WITHIN
"""A transfer process that hangs sends no ACK for KV that its engine has. The prefill is then held until the
deadline, since another worker may fetch it."""
RANKS = 3
SERVE, JANITOR = "serve", "janitor"
HELPER = "router 0 processes"
"""Forks processes of a router. Its own end is tested in tests/router/test_process_ends.py."""
CHILDREN = (
    "router 0 bodies", "router 0 grammars", "decode 0 engine grammars", "prefill 0 engine grammars",
)  # fmt: skip
"""Several processes of one title. Requests start them."""
PROCESSES = (
    "decode 0", "prefill 0", "router 0", "decode 0 engine", "prefill 0 engine", "router 0 bodies",
    "router 0 grammars", "decode 0 rank 1", "prefill 0 transfer", "router 0.0", "decode 0 transfer",
    "router 0.1", "decode 0 rank 2", "router 0 forks", JANITOR, "prefill 0 engine grammars",
    "decode 0 engine grammars",
)  # fmt: skip
"""All of a cluster but `baton serve`, by title. Neighbours are not of one role: a role that ends again soon
waits before its next start."""
REFUSED = ("takes more than", "too much to compile")
"""In the answers to a request that was being prepared, if the process for that hangs."""
ENDED = "the router is shutting down"
"""The error of a stream whose router process has lost its supervisor."""


@dataclass(frozen=True)
class Fault:
    process: str
    how: signal.Signals

    def ends(self, title: str) -> bool:
        """Whether the process with this title ends, too."""
        if self.process in (SERVE, JANITOR):
            return title == self.process and self.how is KILL
        if self.process == "router 0":
            return title.startswith("router 0")
        if self.process.startswith("router 0") or self.process in CHILDREN:
            return title == self.process
        return title.startswith(" ".join(self.process.split()[:2]))

    @property
    def cuts(self) -> bool:
        """Whether clients lose their connections."""
        return self.process in ("router 0", "router 0.0", "router 0.1")


SHORT = (Fault(SERVE, STOP),)
"""What no other test causes: `tests/cluster/test_health.py` has roles that hang."""
FAULTS = [Fault(SERVE, STOP)] + [Fault(process, how) for how in (STOP, KILL) for process in PROCESSES]


@dataclass
class Cluster:
    serve: Serve
    admin: str
    right: dict[Case, list[int]]

    def lasting(self, fault: Fault) -> dict[str, set[int]]:
        """The processes that the fault leaves alone, one of each title."""
        children = (*CHILDREN, sys.executable)  # the last is one that has just been started

        def found() -> dict[str, set[int]] | None:
            now = self.serve.processes().items()
            lasting = {title: pids for title, pids in now if not fault.ends(title) and title not in children}
            return lasting if all(len(pids) == 1 for pids in lasting.values()) else None

        return until(found, WITHIN, "titles of children, which have that of their parent at first")

    async def until_back(self, fault: Fault, before: dict[str, set[int]]) -> None:
        """Another process is there for each that ended, and workers and routers serve."""

        def back() -> bool | None:
            now = self.serve.processes()
            for title, pids in before.items():
                gone = fault.ends(title) and title not in (*CHILDREN, JANITOR)
                if gone and (title not in now or now[title] & pids):
                    return None
            try:
                told = status(self.admin)
            except OSError:
                return None
            states = [worker["state"] for worker in told["workers"]]
            listening = len(told["processes"]) == 2 and told["router"]["ready"]
            return True if listening and states == ["ready"] * 2 else None

        await asyncio.to_thread(until, back, BACK_S, f"{fault} is over")


@contextlib.contextmanager
def struck(serve: Serve, fault: Fault) -> Iterator[None]:
    """A process that still hangs in the end goes on."""
    pids = serve.processes()[fault.process]
    for pid in pids:
        os.kill(pid, fault.how)
    try:
        yield
    finally:
        for pid in pids & serve.processes().get(fault.process, set()):
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def cluster(shallow_model_path: Path) -> Iterator[Cluster]:
    machine = Machine()
    admin = free_port()
    serve = Serve(
        machine, "--model", str(shallow_model_path), "--decode-tensor-parallel-size", str(RANKS),
        "--advanced.num-threads", "1", "--advanced.num-blocks", "600", "--max-num-batched-tokens", "64",
        "--router-processes", "2", "--admin-port", str(admin), "--failure-timeout", "20",
        *PATIENT,
    )  # fmt: skip
    try:
        serve.until_ready()
        yield Cluster(serve, f"http://127.0.0.1:{admin}", asyncio.run(expected(serve.url, MIXED)))
        serve.stop(signal.SIGTERM)
        machine.assert_no_trace()
    finally:
        serve.kill()
        machine.remove()


async def asked(url: str, fault: Fault | None) -> None:
    """Requests that children prepare end as they must: their bodies are large, and their grammars new."""
    first = time.monotonic_ns()

    async def ask(number: int) -> Stream:
        grammar = {"structured_outputs": {"regex": f"([a-z]{{2,7}} ){{99}}|{first + number}"}}
        async with new_session() as http:  # a connection of its own: the kernel chooses the process
            return await read(http, url, cases(1, 8)[0], **grammar, ignore_eos=False, user="x" * 20_000)

    for stream in await asyncio.gather(*map(ask, range(6))):
        if fault is not None and fault.cuts and (stream.cut or ENDED in stream.error):
            continue
        if fault is not None and fault.how is STOP and fault.process in CHILDREN and stream.error:
            assert any(words in stream.error for words in REFUSED), stream.error
            continue
        assert not stream.failed, stream.error
        assert len(stream.token_ids) == 8


async def test_the_table_has_every_process(cluster: Cluster) -> None:
    titles: set[str] = set()
    async with asyncio.timeout(WITHIN):
        while not titles.issuperset(PROCESSES):  # a prefill worker may have decoded all of them
            await asked(cluster.serve.url, None)
            titles = set(cluster.serve.processes())
    movers = {title for title in titles if "transfer, lanes" in title}  # from eight CPUs on
    assert titles - movers == {*PROCESSES, SERVE, HELPER}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.long] * (fault not in SHORT)) for fault in FAULTS],
    ids=lambda fault: f"{fault.process} {fault.how.name}".replace(" ", "-"),
)
async def test_streams_go_on_and_the_process_comes_back(cluster: Cluster, fault: Fault) -> None:
    serve, admin = cluster.serve, cluster.admin
    load = Load(serve.url, list(cluster.right), random.Random(0), PAUSE)
    async with load.of(CLIENTS):
        before, lasting = serve.processes(), await asyncio.to_thread(cluster.lasting, fault)
        await asyncio.to_thread(until, lambda: status(admin)["router"]["requests"] or None, WITHIN, "a load")
        at = time.monotonic()
        with struck(serve, fault):
            load.pause = WAITING
            async with asyncio.timeout(BACK_S):
                await asked(serve.url, fault)
            if fault.process != SERVE:
                await cluster.until_back(fault, before)
            over, served, load.pause = time.monotonic(), len(load.streams), PAUSE
            await eventually(lambda least=served + 2 * CLIENTS: len(load.streams) >= least, BACK_S)
            await asked(serve.url, None)
    for stream in load.streams:
        stream.cut |= fault.cuts and ENDED in stream.error
    verdict = judge(load.streams, cluster.right, [Happened("router", fault.process, at, over)] * fault.cuts)
    print(f"{fault.process} {fault.how.name}: {verdict.requests} streams, {over - at:.1f} s")
    assert (verdict.failed, verdict.lost_or_repeated, verdict.different) == (0, 0, 0), verdict.errors
    assert await asyncio.to_thread(cluster.lasting, fault) == lasting, "nothing else ended"
    assert await asyncio.to_thread(leaks_when_idle, admin, within=WHOLE_S) == {}
