"""What a shared store is worth when all workers restart: second turns of chats, and chats that go on.

    python -m baton.bench.store [--json PATH] [--short]

`baton serve --kv-store local` serves the embedded model: a prefill and a decode worker, and a store. Chats
get a first turn. All workers are restarted one by one. Then second turns alternate with prompts of the
same length that no worker has seen (`second_turn`). `found` is the share of the tokens of history and answer
that had KV. `step_beside_writes` is the median gap between tokens while the KV of their prompt is written,
compared with the same answer without any writes.

Then chats go on for a while, and the workers are restarted in the middle of it, with a store and without one:
hits, and times to first token of turns that began before, during and after the restart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp

import baton.bench.contract as contract
from baton.bench.contract import Report, Row
from baton.bench.harness.processes import Server
from baton.bench.harness.streams import Case, new_session, read
from baton.bench.harness.workers import prompt_of
from baton.machine.system import free_port

CHATS, HISTORY, ANSWER, NEW = 9, 700, 40, 32
WRITING, STEPS = 6, 100
TRACE_CHATS, TRACE_HISTORY, PAUSE_S = 6, 300, 4.0
AROUND_S = 25.0  # before and after the restart
START_S = 120.0
RESTARTED = "All workers have restarted."


class Turn(NamedTuple):
    began: float
    ttft: float
    gap: float  # the median
    cached: int
    text: list[int]  # prompt and answer


class Cluster:
    def __init__(self, session: aiohttp.ClientSession, url: str, server: Server, log: Path) -> None:
        self.session, self.url, self._server, self._log = session, url, server, log

    async def turn(self, prompt: Sequence[int], answer: int = ANSWER) -> Turn:
        case, usage = Case("", answer, 0.0, seed=0), {"include_usage": True}
        got = await read(self.session, self.url, case, prompt=list(prompt), stream_options=usage)
        if got.failed:
            raise RuntimeError(got.error or "the stream ended early")
        gaps = [after - before for before, after in itertools.pairwise(got.arrivals)]
        text = [*prompt, *got.token_ids]
        ttft = got.arrivals[0] - got.started
        return Turn(got.started, ttft, statistics.median(gaps), got.cached_tokens, text)

    async def restart(self) -> None:
        """Restarts all workers, one after the other."""
        before = self._log.read_text().count(RESTARTED)
        self._server.process.send_signal(signal.SIGUSR1)
        while self._log.read_text().count(RESTARTED) == before:
            assert self._server.process.poll() is None, self._log.read_text()
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def cluster(directory: Path, *flags: str) -> AsyncIterator[Cluster]:
    port, log = free_port(), directory / f"serve{len(flags)}.log"
    command = [sys.executable, "-m", "baton.cluster.cli", "serve", "--port", str(port), "--dtype", "float32"]
    server, url = Server("baton serve", [*command, *flags], log, {}), f"http://127.0.0.1:{port}"
    async with new_session() as session:
        try:
            deadline = time.monotonic() + START_S
            await asyncio.to_thread(server.until_answers, f"{url}/ready", deadline)
            yield Cluster(session, url, server, log)
        finally:
            await asyncio.to_thread(server.stop, signal.SIGINT)


async def second_turns(serving: Cluster, report: Report) -> None:
    firsts = [await serving.turn(prompt_of(HISTORY, chat)) for chat in range(CHATS)]
    await serving.restart()
    for kind in range(2):  # warms up: the first prompts of a process, and the first of a store
        await serving.turn(prompt_of(HISTORY, 1000 + kind))
    turns: list[Turn] = []
    computed: list[float] = []
    for chat, first in enumerate(firsts):
        turns.append(await serving.turn([*first.text, *prompt_of(NEW, 100 + chat)], 2))
        computed.append((await serving.turn(prompt_of(len(first.text) + NEW, 200 + chat), 2)).ttft)
    ttfts = [turn.ttft for turn in turns]
    fields = {"scale": 1e3, "p99": max(ttfts) * 1e3, "goal": 0.5}
    report.add_ratio("store.cpu.second_turn", ttfts, "ms", computed, "computing it all", **fields)
    known = sum(len(first.text) for first in firsts)
    found = sum(turn.cached for turn in turns) / known
    report.add(Row("store.cpu.found", found, "share", goal=0.9, better="higher"))


async def steps_beside_writes(serving: Cluster, report: Report) -> None:
    beside, alone = [], []
    for number in range(WRITING):
        prompt = prompt_of(HISTORY, 500 + number)
        beside.append((await serving.turn(prompt, STEPS)).gap)
        alone.append((await serving.turn(prompt, STEPS)).gap)
    fields = {"scale": 1e3, "goal": 1.02}
    report.add_ratio("store.cpu.step_beside_writes", beside, "ms", alone, "no writes", **fields)


async def trace(serving: Cluster, around: float, name: str, report: Report) -> None:
    """Chats that go on, and a restart in the middle."""
    turns: list[Turn] = []
    numbers, ends = itertools.count(10_000), asyncio.Event()

    async def chat(number: int) -> None:
        text = prompt_of(TRACE_HISTORY, next(numbers))
        await asyncio.sleep(PAUSE_S * number / TRACE_CHATS)
        while not ends.is_set():
            turns.append(turn := await serving.turn(text))
            text = [*turn.text, *prompt_of(NEW, next(numbers))]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ends.wait(), PAUSE_S)

    async with asyncio.TaskGroup() as chats:
        for number in range(TRACE_CHATS):
            chats.create_task(chat(number))
        await asyncio.sleep(around)
        began = time.monotonic()
        await serving.restart()
        over = time.monotonic()
        await asyncio.sleep(around)
        ends.set()
    parts = {"before": (0.0, began), "during": (began, over), "after": (over, float("inf"))}
    for part, (start, stop) in parts.items():
        of_part = [
            turn for turn in turns if start <= turn.began < stop and len(turn.text) > TRACE_HISTORY + ANSWER
        ]
        if of_part:
            ttfts = [turn.ttft for turn in of_part]
            report.add_median(f"{name}.{part}.ttft", ttfts, "ms", scale=1e3)
            hits = sum(turn.cached for turn in of_part) / sum(len(turn.text) - ANSWER for turn in of_part)
            report.add(Row(f"{name}.{part}.hits", hits, "share"))


async def measure(args: argparse.Namespace, report: Report) -> None:
    around = AROUND_S / 3 if args.short else AROUND_S
    with tempfile.TemporaryDirectory() as name:
        async with cluster(Path(name), "--kv-store", "local") as serving:
            await second_turns(serving, report)
            await steps_beside_writes(serving, report)
            await trace(serving, around, "store.cpu.trace", report)
        async with cluster(Path(name)) as serving:
            await trace(serving, around, "store.cpu.trace_without", report)


def main() -> int:
    args = contract.parser(__doc__ or "", devices=("cpu",)).parse_args()
    report = Report.of("store", args)
    asyncio.run(measure(args, report))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
