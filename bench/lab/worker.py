"""What a token costs the processes of a worker.

One decode worker runs as real processes, with a model so small that little else is computed. The bench
submits streams as a router does and reads their tokens. In each period it counts the CPU time of the service
process and of the engine process, with all their threads, and the tokens that came. A gap is the time
between two messages with tokens at the reader.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from baton.bench.lab.driver import Bench, Option, Run
from baton.bench.lab.harness.cluster import served
from baton.bench.lab.harness.processes import cpu_seconds, tree
from baton.bench.lab.harness.workers import Driver, request
from baton.bench.lab.shapes import SHAPES
from baton.bench.report import Row
from baton.rpc import worker_pb2 as pb
from baton.steps.quantiles import percentile

VOCABULARY, ANSWER, PERIODS = 256, 1900, 5
KINDS = ("service", "engine")


class Reader(Driver):
    """Counts tokens and keeps nothing else of them, so that it is no bottleneck.

    Attributes:
        count: tokens that came.
        arrivals: time.perf_counter() of each message with tokens.
        ended: tokens that end their stream.
    """

    count = started = ended = 0
    arrivals: list[float]

    async def fill(self, streams: int) -> None:
        """Submits a stream in place of each that has ended."""
        while self.started - self.ended < streams:
            work = request([self.started % VOCABULARY] * 8, ANSWER)
            submit = pb.SubmitDecode(decode_id=os.urandom(16), request=work)
            await self.send(pb.RouterMessage(decode=submit))
            self.started += 1

    async def _read(self) -> None:
        self.arrivals = []
        async for message in self._call:
            if tokens := message.step.tokens:
                self.arrivals.append(time.perf_counter())
                self.count += len(tokens)
                self.ended += sum(bool(token.finish_reason) for token in tokens)


async def periods(
    reader: Reader, pids: dict[str, int], streams: int, seconds: float
) -> dict[str, list[float]]:
    """Microseconds of CPU per token by kind of process, tokens per second, and gaps in milliseconds."""
    measured: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "tokens", "gaps")}
    while len(measured["tokens"]) < PERIODS:
        await reader.fill(streams)
        if reader.count < 20 * streams:  # until all streams decode
            await asyncio.sleep(0.02)
            continue
        count, first, began = reader.count, len(reader.arrivals), time.perf_counter()
        cpu = {kind: cpu_seconds(pids[kind]) for kind in KINDS}
        while time.perf_counter() - began < seconds / PERIODS:
            await asyncio.sleep(0.02)
            await reader.fill(streams)
        tokens = reader.count - count
        measured["tokens"].append(tokens / (time.perf_counter() - began))
        for kind in KINDS:
            measured[kind].append(1e6 * (cpu_seconds(pids[kind]) - cpu[kind]) / tokens)
        measured["gaps"] += [1e3 * (b - a) for a, b in pairwise(reader.arrivals[first:])]
    return measured


async def measured(run: Run, report: Mapping[str, Any], secret: str) -> dict[str, list[float]]:
    async with Reader(report, secret) as reader:
        return await periods(reader, tree(report["pid"]), run.args.streams, run.args.seconds)


def measure(run: Run) -> None:
    flags = (
        "--load-format",
        "dummy",
        "--max-num-seqs",
        str(run.args.streams),
        "--no-enable-prefix-caching",
        *run.args.flags.split(),
    )
    run.directory.joinpath("config.json").write_text(
        json.dumps(SHAPES["one-small-layer"] | {"vocab_size": VOCABULARY})
    )
    model = str(run.directory)
    with served(run, *flags, model=model, prefill=0, decode=1, router=False) as cluster:
        result = asyncio.run(measured(run, cluster.report("decode"), cluster.secret))
    for kind in KINDS:
        run.add(Row(f"worker.{run.device}.{kind}_us_per_token", statistics.median(result[kind]), "us"))
    run.add(Row(f"worker.{run.device}.tokens", statistics.median(result["tokens"]), "tokens/s"))
    gaps = result["gaps"]
    run.add(Row(f"worker.{run.device}.gap", statistics.median(gaps), "ms", p99=percentile(gaps, 0.99)))


BENCH = Bench(
    "worker",
    measure,
    __doc__,
    options=(
        Option("--streams", "at the same time", default=128, short=32),
        Option("--seconds", "in which tokens are counted", default=15.0, short=3.0),
        Option("--flags", "further ones of the worker", default=""),
    ),
    devices=("cpu",),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
