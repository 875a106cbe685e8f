"""What does the death of an engine process cost the streams on it?

A prefill and a decode worker serve the embedded model in float32 as real processes. The engine process of the
decode worker is killed again and again while answers run, each time when all of them have some more tokens.

    different    tokens that differ from those of a cluster without faults, and without a prefix cache
    failed       answers that ended too soon, or with an error
    recomputed   prompt and output tokens that were computed again for each stream, in the worst kill
    pause        the longest gap of all streams around a kill
    step         a decode step of an engine whose KV outlives it, to one that writes no records of blocks

`…_without` is the same for a worker that ends with its engine process.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import baton.bench.contract as contract
from baton.bench.contract import Report, Row
from baton.bench.engine.drive import drain, fill
from baton.bench.harness.cluster import LocalCluster, leaks_when_idle, status
from baton.bench.harness.streams import Case, Stream, cases, expected, judge, new_session, read
from baton.cluster.model import embedded_path
from baton.engine import CachedBlock, EngineConfig, build_engine
from baton.engine.core.kept_blocks import KeptBlocks
from baton.kv_transfer.arena import memory_file

STREAMS, SHORT_STREAMS = 8, 4
KILLS, SHORT_KILLS = 20, 2
BETWEEN = 10
"""Tokens that each stream gets between two kills."""
REPEAT = 5  # of the texts of prompts: they have up to some 200 tokens
FIRST = 60
"""Tokens that the first streams may get before the last one begins."""
LOOK_S = 0.005
STEPS, SHORT_STEPS = 256, 64
BATCH, CONTEXT = 4, 128
FLAGS = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--num-blocks", "1200")
MOST_RECOMPUTED, SLOWEST_STEP = 128, 1.005


@dataclass
class Kills:
    """Of one cluster."""

    streams: list[Stream]
    recomputed: list[float] = field(default_factory=list)
    """Tokens for each stream, by kill."""
    pauses: list[float] = field(default_factory=list)
    """Seconds of the longest one, by kill."""


@contextmanager
def started(*flags: str) -> Iterator[LocalCluster]:
    model = ("--model", str(embedded_path()))
    with (
        tempfile.TemporaryDirectory(prefix="baton-survive-") as directory,
        LocalCluster(
            Path(directory), prefill=1, decode=1, worker_flags=(*FLAGS, *model, *flags), router_flags=model
        ) as cluster,
    ):
        yield cluster


def computed(cluster: LocalCluster) -> dict[int, float]:
    """The prompt tokens that each engine process has computed, by its pid."""
    status(cluster.url)  # a scrape shows the last report, and this makes one
    return {
        worker.processes()["engine"]: worker.metric(
            "vllm:prompt_tokens_by_source_total", 'source="local_compute"'
        )
        for worker in cluster.workers
        if worker.ready
    }


async def killed(cluster: LocalCluster, asked: Sequence[Case], kills: int) -> Kills:
    """Raises RuntimeError if an answer ends before the last kill."""
    found = Kills([Stream(case) for case in asked])
    moments: list[float] = []

    async def all_have(counts: Sequence[int]) -> None:
        while any(len(stream.token_ids) < count for stream, count in zip(found.streams, counts, strict=True)):
            if any(task.done() for task in reading):
                raise RuntimeError(
                    f"an answer ended before the last kill: {[len(s.token_ids) for s in found.streams]}"
                )
            await asyncio.sleep(LOOK_S)

    async with new_session() as http:
        reading = [asyncio.create_task(read(http, cluster.url, s.case, into=s)) for s in found.streams]
        try:
            for _ in range(kills):
                await all_have([len(stream.token_ids) + BETWEEN for stream in found.streams])
                before = await asyncio.to_thread(computed, cluster)
                moments.append(time.monotonic())
                cluster.of("decode")[0].kill("engine")
                await all_have([len(stream.token_ids) + 2 for stream in found.streams])
                after = await asyncio.to_thread(computed, cluster)
                again = sum(tokens - before.get(pid, 0.0) for pid, tokens in after.items())
                found.recomputed.append(again / len(asked))
            await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
    for moment in moments:
        found.pauses.append(max(stream.gap_around(moment) or 0.0 for stream in found.streams))
    return found


def step_seconds(report: Report, steps: int) -> None:
    """Adds the time of a decode step, and its ratio to one without the records of published blocks. That
    part is measured by itself: two engines of one process differ by more."""
    fd = memory_file()
    config = EngineConfig(
        str(embedded_path()), dtype="float32", num_blocks=256, num_threads=1, enable_prefix_caching=True
    )
    engine = build_engine(config, kept_fd=fd)
    fill(engine, BATCH, CONTEXT, steps + 1)
    spent = 0.0

    def timed(self: KeptBlocks, block: int, cached: CachedBlock, tenant: bytes) -> None:
        nonlocal spent
        began = time.process_time()
        add(self, block, cached, tenant)
        spent += time.process_time() - began

    add = KeptBlocks.add
    KeptBlocks.add = timed
    began = time.process_time()
    try:
        drain(engine)
    finally:
        KeptBlocks.add = add
    seconds = time.process_time() - began
    report.add(
        Row(
            "survive.cpu.step", 1e3 * seconds / steps, "ms of CPU", ratio=seconds / (seconds - spent),
            ratio_to="without records", goal=SLOWEST_STEP,
        )
    )  # fmt: skip
    os.close(fd)


def measure(args: argparse.Namespace, report: Report) -> None:
    asked = cases(args.streams, FIRST + args.kills * (BETWEEN + 4), repeat=REPEAT)
    with started("--no-enable-prefix-caching") as cluster:
        right = asyncio.run(expected(cluster.url, asked))
    with started() as cluster:
        ends = asyncio.run(killed(cluster, asked, 1))
    with started("--replace-engine") as cluster:
        stays = asyncio.run(killed(cluster, asked, args.kills))
        leaks = leaks_when_idle(cluster.url)
        exits = len(cluster.of("decode")[0].exits)
    verdict = judge(stays.streams, right)
    for error in verdict.errors:
        print(error, file=sys.stderr)
    report.detail = {"leaks": leaks, "recomputed": stays.recomputed, "pauses": stays.pauses}
    report.add(Row("survive.cpu.different", verdict.different + verdict.lost_or_repeated, "tokens", goal=0))
    report.add(Row("survive.cpu.failed", verdict.failed, "streams", goal=0))
    report.add(Row("survive.cpu.leaked", sum(leaks.values()), "blocks, slots, attempts", goal=0))
    report.add(Row("survive.cpu.ended", exits, "workers", goal=0))
    most = max(stays.recomputed)
    report.add(Row("survive.cpu.recomputed", most, "tokens a stream", goal=MOST_RECOMPUTED))
    report.add(Row("survive.cpu.recomputed_without", max(ends.recomputed), "tokens a stream"))
    report.add_median("survive.cpu.pause", stays.pauses, "s")
    report.add_median("survive.cpu.pause_without", ends.pauses, "s")
    step_seconds(report, SHORT_STEPS if args.short else STEPS)


def main() -> int:
    p = contract.parser(__doc__ or "", devices=("cpu",))
    p.add_argument("--kills", type=int, metavar="N", help=f"default: {KILLS}; {SHORT_KILLS} with --short")
    p.add_argument(
        "--streams", type=int, metavar="N", help=f"default: {STREAMS}; {SHORT_STREAMS} with --short"
    )
    args = p.parse_args()
    args.kills = args.kills or (SHORT_KILLS if args.short else KILLS)
    args.streams = args.streams or (SHORT_STREAMS if args.short else STREAMS)
    report = Report.of("survive", args)
    measure(args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
