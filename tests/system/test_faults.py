"""Every kind of process of `baton serve` is killed and stopped, while clients read streams with known tokens.

Killed is SIGKILL, stopped is SIGSTOP: the process hangs. Nobody sends SIGCONT, but to `baton serve` itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.bench.chaos.cluster import free_port, leaks_when_idle, status
from baton.bench.chaos.faults import Happened
from baton.bench.chaos.load import Load, judge
from baton.bench.chaos.streams import Case, Stream, cases, expected, new_session, read

from .machine import Machine, until
from .recovery import MIXED
from .serve import Serve

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
CLIENTS = 4
BACK_S = 90.0
"""A worker that was killed often waits for up to 30 s. One that hangs is noticed after 10 s."""
RANKS = 3
PROCESSES = (
    "decode 0", "prefill 0", "router 0", "decode 0 engine", "prefill 0 engine", "router 0 bodies",
    "router 0 grammars", "decode 0 rank 1", "prefill 0 transfer", "router 0.0", "decode 0 transfer",
    "router 0.1", "decode 0 rank 2", "janitor",
)  # fmt: skip
"""All of a cluster but `baton serve`, by title. Neighbours are not of one role: a role that ends again soon
waits before its next start."""
SERVE = "serve"
REFUSED = ("takes more than", "has no process")
"""In the answers to a request that was being prepared, if the process for that is lost."""

ENDED = "the router is shutting down"
"""The error of a stream whose router process has lost its supervisor."""


@dataclass(frozen=True)
class Fault:
    process: str
    how: signal.Signals

    def ends(self, title: str) -> bool:
        """Whether the process with this title ends, too, and another one follows."""
        if self.process in (SERVE, "janitor"):
            return False
        if self.process == "router 0":
            return title.startswith("router 0")
        if self.process.startswith("router 0"):
            return title == self.process
        return title.startswith(" ".join(self.process.split()[:2]))

    @property
    def cuts(self) -> bool:
        """Whether clients lose their connections."""
        return self.process.removeprefix("router 0") in ("", ".0", ".1")


LONG = [pytest.mark.long, pytest.mark.timeout(600)]
SHORT = (
    Fault("router 0", STOP),
    Fault("router 0 grammars", STOP),
    Fault(SERVE, STOP),
    Fault("janitor", STOP),
)
"""Those that no other test causes."""
FAULTS = [Fault(process, how) for how in (KILL, STOP) for process in PROCESSES] + [Fault(SERVE, STOP)]


@dataclass
class Cluster:
    serve: Serve
    admin: str
    right: dict[Case, list[int]]

    async def until_back(self, fault: Fault, before: dict[str, set[int]]) -> None:
        """Every process is there, in place of those that ended, and workers and routers serve."""

        def back() -> bool | None:
            now = self.serve.processes()
            for title, pids in before.items():
                if title.endswith(("bodies", "grammars")):
                    continue  # of all processes of the router; those that a request needs are started for it
                if fault.ends(title) and (title not in now or now[title] & pids):
                    return None
            try:
                told = status(self.admin)
            except OSError:
                return None
            states = [worker["state"] for worker in told["workers"]]
            listening = len(told["processes"]) == 2 and told["router"]["ready"]
            return True if listening and states == ["ready"] * 2 else None

        await asyncio.to_thread(until, back, BACK_S, f"{fault} is over")


@pytest.fixture(scope="module")
def cluster(shallow_model_path: Path) -> Iterator[Cluster]:
    machine = Machine()
    admin = free_port()
    serve = Serve(
        machine, "--model", str(shallow_model_path), "--decode-tensor-parallel-size", str(RANKS),
        "--num-threads", "1", "--num-blocks", "600", "--max-num-batched-tokens", "64",
        "--router-processes", "2", "--admin-port", str(admin), "--engine-timeout", "4",
    )  # fmt: skip
    try:
        serve.until_ready()
        yield Cluster(serve, f"http://127.0.0.1:{admin}", asyncio.run(expected(serve.url, MIXED)))
        serve.stop(signal.SIGTERM)  # also with a janitor that hangs
        machine.assert_no_trace()
    finally:
        serve.kill()
        machine.remove()


async def prepared(url: str, number: int) -> Stream:
    """A request whose body and grammar are prepared in children: it is large, and no request had its
    grammar."""
    case = cases(1, 8)[0]
    grammar = {"structured_outputs": {"regex": f"([a-z]{{2,7}} ){{99}}|{number}"}, "ignore_eos": False}
    async with new_session() as http:  # a connection of its own: the kernel chooses the process
        return await read(http, url, case, **grammar, user="x" * 20_000)


async def asked(cluster: Cluster, fault: Fault) -> None:
    """Some such requests end as they should, whatever happened to the children."""
    first = time.monotonic_ns()
    streams = await asyncio.gather(*(prepared(cluster.serve.url, first + i) for i in range(6)))
    for stream in streams:
        if fault.cuts and (stream.cut or ENDED in stream.error):
            continue
        if stream.error and fault.process in ("router 0 bodies", "router 0 grammars"):
            assert any(words in stream.error for words in REFUSED), stream.error
            continue
        assert not stream.failed, stream.error
        assert len(stream.token_ids) == 8


def test_the_table_has_every_process(cluster: Cluster) -> None:
    asyncio.run(asked(cluster, Fault(SERVE, STOP)))  # grammars are prepared on demand
    movers = {
        title for title in cluster.serve.processes() if "transfer, lanes" in title
    }  # from eight CPUs on
    assert cluster.serve.processes().keys() - movers == {*PROCESSES, SERVE}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=LONG if fault not in SHORT else ()) for fault in FAULTS],
    ids=lambda fault: f"{fault.process} {fault.how.name}".replace(" ", "-"),
)
async def test_streams_go_on_and_the_process_comes_back(cluster: Cluster, fault: Fault) -> None:
    load, stop = Load(cluster.serve.url, list(cluster.right), random.Random(0)), asyncio.Event()
    loading = asyncio.create_task(load.run(CLIENTS, stop))
    await asyncio.to_thread(
        until, lambda: status(cluster.admin)["router"]["requests"] >= CLIENTS or None, 30, "a load"
    )
    before = await asyncio.to_thread(cluster.serve.processes)
    assert before[fault.process]
    at = time.monotonic()
    try:
        for pid in before[fault.process]:
            os.kill(pid, fault.how)
        async with asyncio.timeout(BACK_S):
            await asked(cluster, fault)
    finally:
        if fault.process == SERVE:
            os.kill(cluster.serve.process.pid, signal.SIGCONT)
    await cluster.until_back(fault, before)
    happened = [Happened("router", fault.process, at, time.monotonic())] if fault.cuts else []
    served = len(load.streams)
    while len(load.streams) < served + 2 * CLIENTS:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    stop.set()
    await loading
    for stream in load.streams:
        stream.cut |= fault.cuts and ENDED in stream.error
    verdict = judge(load.streams, cluster.right, happened)
    print(f"{fault.process} {fault.how.name}: {verdict.requests} streams, {time.monotonic() - at:.1f} s")
    assert (verdict.failed, verdict.lost_or_repeated, verdict.different) == (0, 0, 0), verdict.errors
    after = await asyncio.to_thread(cluster.serve.processes)
    children = ("bodies", "grammars")
    others = [title for title in before if not (fault.ends(title) or title.endswith(children))]
    assert {title: after.get(title) for title in others if title != "janitor" or fault.how is STOP} == {
        title: before[title] for title in others if title != "janitor" or fault.how is STOP
    }, "nothing else ended"
    assert await asyncio.to_thread(leaks_when_idle, cluster.admin) == {}
