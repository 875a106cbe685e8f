"""A cluster to be broken, and streams that must not notice: what the tests of recovery share."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from baton.bench.lab.harness.cluster import LocalCluster, Worker, leaks_when_idle, status
from baton.bench.lab.harness.processes import kill
from baton.bench.lab.harness.streams import Case, Stream, cases, new_session, read
from baton.bench.lab.harness.workers import metric
from tests.within import WITHIN

UNHURRIED = ("--failure-timeout", "60")
"""However slow the machine is, no process counts as dead. A prefill that leaks is held for longer than tests
wait for whole pools."""
PATIENT = ("--max-wait", "600")
"""Of a router: on a slow machine prompts seem to wait for a minute."""
FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--advanced.num-threads", "1", "--advanced.num-blocks", "600",
    "--max-num-batched-tokens", "64", "--drain-timeout", "1", *UNHURRIED,
    "--speculative-config", '{"num_speculative_tokens": 3}',
    "--no-enable-prefix-caching",  # a prompt that comes again must still be under way when something breaks
)  # fmt: skip
SHORT = cases(8, 24)  # half of them greedy, half seeded
GRAMMAR = '{"structured_outputs": {"regex": "([a-z]{2,7} ){99}"}, "ignore_eos": false}'
SHORT[1:3] = [replace(case, options=GRAMMAR) for case in SHORT[1:3]]  # one of each kind
LONG = cases(4, 6, repeat=5)  # prompts of some hundred tokens, in chunks of 64: a second and more of prefill
LONGEST = cases(4, 6, repeat=20)[2]
"""Its prefill takes so long that a decode worker can be stopped before all of its KV has come."""
MIXED = [*LONG, *SHORT[:4]]
_STEP = 0.02  # seconds between looks at what no event tells


Moment = Callable[[list[Stream]], bool]


async def ride(
    url: str,
    right: dict[Case, list[int]],
    asked: list[Case],
    *faults: tuple[Moment, Callable[[], Any]],
    felt: Callable[[], float] | None = None,
) -> list[Stream]:
    """Asks all cases at once, and asserts that every stream says what it has to say.

    A fault is a moment, told by looking at the streams or at the cluster, and what happens then. Both may
    block. All cases are asked again until each fault has happened: all streams may end before its moment.
    `felt`: a count that grows if the last fault strikes a stream. Until then all of it happens again: streams
    may end between its moment and the fault.
    """
    left, before = list(faults), 0.0
    while True:
        streams = [Stream(case) for case in asked]
        async with new_session() as http:
            reading = [asyncio.create_task(read(http, url, stream.case, into=stream)) for stream in streams]
            try:
                while left and not all(task.done() for task in reading):
                    moment, happens = left[0]
                    if await asyncio.to_thread(moment, streams):
                        del left[0]
                        if felt is not None and not left:
                            before = await asyncio.to_thread(felt)
                        await asyncio.to_thread(happens)
                    else:
                        await asyncio.sleep(_STEP)
                await asyncio.gather(*reading)
            finally:
                for task in reading:
                    task.cancel()
        for stream in streams:
            assert not stream.failed, f"{stream.case}: {stream.error}"
            assert stream.token_ids == right[stream.case], stream.case
        if not left:
            if felt is None or await asyncio.to_thread(felt) > before:
                return streams
            left = list(faults)


def hold(worker: Worker) -> Callable[[], None]:
    """Stops the next process of the worker, whose last one has ended. The result lets it go on."""
    worker.cluster.wait_for(lambda: worker.pid is not None, WITHIN, f"the next process of {worker.name}")
    pid = worker.pid
    assert pid is not None
    kill(pid, signal.SIGSTOP)
    return lambda: kill(pid, signal.SIGCONT)


def wait_exit(worker: Worker, count: int) -> str:
    """Waits until `count` processes have ended. Returns why the last of them did."""
    ended = f"the end of {worker.name}"
    worker.cluster.wait_for(lambda: len(worker.exits) >= count, WITHIN, ended)
    return worker.exits[count - 1]


@dataclass
class Broken:
    """A cluster with the right answers to what it will be asked."""

    cluster: LocalCluster
    right: dict[Case, list[int]]

    async def ride(
        self,
        asked: list[Case],
        *faults: tuple[Moment, Callable[[], Any]],
        felt: Callable[[], float] | None = None,
    ) -> list[Stream]:
        return await ride(self.cluster.url, self.right, asked, *faults, felt=felt)

    async def settled(self) -> None:
        """All workers are there, each life under an incarnation of its own, and every pool is whole."""
        await asyncio.to_thread(self.all_back)
        for worker in self.cluster.workers:
            incarnations = [life["incarnation"] for life in worker.lives]
            assert len(set(incarnations)) == len(incarnations) == len(worker.exits) + 1
        leaks = await asyncio.to_thread(leaks_when_idle, self.cluster.url, WITHIN)
        assert leaks == {}, leaks

    def all_back(self) -> None:
        self.back("prefill")
        self.back("decode")

    def back(self, role: str) -> None:
        """All of a role are there."""
        for worker in self.cluster.of(role):
            worker.wait_life(len(worker.exits) + 1)
            self.cluster.wait_attached(worker)

    # ------------------------------------------------------------ the cluster as the router sees it

    def busiest(self, role: str) -> Worker:
        """The worker of a role with the most work."""
        load = {w["index"]: w["attempts"] for w in self._seen(role)}
        return max(self.cluster.of(role), key=lambda worker: load.get(worker.index, -1))

    def transferring(self, streams: list[Stream]) -> bool:
        """A moment: a prefill worker computes, and its KV is under way."""
        return any(w["status"]["transfers_open"] for w in self._seen("prefill"))

    def tokens_prefilled(self) -> float:
        """By the present incarnations, up to now."""
        return self._counted("prefill", "vllm:prompt_tokens_total")

    def retries(self) -> float:
        return retries(self.cluster.url)

    def tokens_decoded(self) -> float:
        """The same."""
        return self._counted("decode", "vllm:generation_tokens_total")

    def _counted(self, role: str, name: str) -> float:
        status(self.cluster.url)  # a scrape shows the last report, and this makes one
        return sum(worker.metric(name) for worker in self.cluster.of(role))

    def _seen(self, role: str) -> list[dict[str, Any]]:
        return [w for w in status(self.cluster.url)["workers"] if w["role"] == role and w["state"] == "ready"]


def retries(url: str) -> float:
    """Attempts that went on elsewhere, or again, since a worker lost them."""
    return metric(url, "baton:retries_total")


def each_has(tokens: int) -> Moment:
    """A moment: all streams run, each with so many tokens at least."""
    return lambda streams: all(len(stream.token_ids) >= tokens for stream in streams)
