"""How soon a router knows that a worker is there, or gone.

One process holds the worker pool of a router, fake workers behind their real gRPC service, and the file of
addresses that a supervisor writes. Each round starts a worker, adds its address to the file, and
waits until the pool sends work to the worker. Then it kills the worker and waits until the pool sends no more
work.

known  from the change of the file until the pool sends work to the worker
lost   from the worker's death until the pool sends no more work; the file does not change
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import baton.bench.contract as contract
from baton.bench.contract import Report, Row, percentile
from baton.bench.fakes.worker import SECRET, FakeWorker, Lanes
from baton.cluster.supervision.runner import write_atomically
from baton.router.policy import PREFILL_POLICIES
from baton.router.workers.checks import RouterModel
from baton.router.workers.discovery import FileDiscovery
from baton.router.workers.pool import WorkerPool
from baton.rpc import worker_pb2 as pb

ROUNDS = 50
KNOWN_GOAL_MS, LOST_GOAL_MS = 1000.0, 2000.0  # p99


async def rounds(file: Path) -> tuple[list[float], list[float]]:
    """Milliseconds of each round to know the worker and to lose it."""
    discovery = FileDiscovery(str(file))
    pool = WorkerPool(
        SECRET, os.urandom(16), discovery, PREFILL_POLICIES["sticky"], RouterModel("fake", 0, "")
    )
    following = asyncio.create_task(pool.run())
    known, lost = [], []
    for number in range(ROUNDS):
        worker = await FakeWorker(pb.POOL_DECODE, Lanes(), [2], index=number).start()
        started = time.perf_counter()
        write_atomically(file, worker.address)
        await until(pool, 1)
        known.append(1000 * (time.perf_counter() - started))
        died = time.perf_counter()
        await worker.kill()
        await until(pool, 0)
        lost.append(1000 * (time.perf_counter() - died))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    return known, lost


async def until(pool: WorkerPool, ready: int) -> None:
    async with asyncio.timeout(30):
        while len(pool.ready(pb.POOL_DECODE)) != ready:
            pool.changed.clear()
            await pool.changed.wait()


async def measure(report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        known, lost = await rounds(Path(directory) / "workers")
    for what, values, goal in (("known", known, KNOWN_GOAL_MS), ("lost", lost, LOST_GOAL_MS)):
        report.add(Row(f"discovery.file.{what}.p50", statistics.median(values), "ms"))
        p99 = percentile(values, 0.99)
        report.add(Row(f"discovery.file.{what}.p99", p99, "ms", goal=goal, better="lower"))


def main() -> int:
    arguments = contract.parser(__doc__ or "", devices=("cpu",)).parse_args()
    logging.disable(logging.WARNING)  # the pool logs each lost worker
    report = Report("discovery", {"rounds": ROUNDS}, arguments.json)
    asyncio.run(measure(report))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
