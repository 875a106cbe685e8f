"""How soon a worker serves prompts after its pool was changed, and whether a client notices.

    python -m bench.flip [--json PATH] [--device cpu|cuda] [--short]

A cluster has one prefill worker, two decode workers and a router. Clients send one greedy request after
another. The second decode worker is flipped to the prefill pool and back, again and again. A flip takes from
the call that changes the label until the worker has computed its first prompt.

Overflow is off and the router takes prefill workers in turn: a decode worker computes no prompt, and a
prefill worker gets the next one. The model runs in float32, so every answer must equal the one without flips.
On GPUs it is the 8B Llama shape with random weights. The prefill worker has the first GPU, both decode
workers the second.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import bench.contract as contract
import rpc
from bench.chaos.cluster import LocalCluster, leaks_when_idle
from bench.chaos.load import Load, judge
from bench.chaos.streams import cases, expected
from bench.contract import Report, Row, percentile
from bench.shapes import write_shape
from cluster.workers import set_pool
from rpc import worker_pb2 as pb
from rpc.worker_pb2_grpc import WorkerStub

FLIPS = 20
SHORT_FLIPS = 5
GOAL_S = 1.0
QUIET_S = (0.3, 1.0)  # before each flip, and before each flip back
CALL_S = 10.0  # for an answer of the worker
SERVES_S = 30.0  # for the first prompt
LOOK_S = 0.01  # between two questions whether it is computed
SHORT_ANSWER, LONG_ANSWER = 2, 32  # tokens; short for many prompts, long to run on a worker that moves
FLAGS = ("--dtype", "float32", "--no-enable-prefix-caching")
ROUTER_FLAGS = ("--no-overflow", "--routing-policy", "round-robin")
ON_CPU = ("--device", "cpu", "--num-threads", "1", "--num-blocks", "600")
ON_CUDA = ("--load-format", "dummy", "--max-model-len", "8192", "--gpu-memory-utilization", "0.42")


async def flip(channel: rpc.Channel) -> float:
    """Moves a decode worker to the prefill pool. Returns the seconds until it has computed a prompt.

    Raises TimeoutError if it gets none.
    """
    began = time.perf_counter()
    before = (await set_pool(channel, "prefill", CALL_S)).prompt_tokens
    async with asyncio.timeout(SERVES_S):
        while (await _status(channel)).prompt_tokens == before:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
    return time.perf_counter() - began


async def _status(channel: rpc.Channel) -> pb.WorkerStatus:
    answer: Awaitable[pb.WorkerStatus] = WorkerStub(channel).GetStatus(pb.StatusRequest(), timeout=CALL_S)
    return await answer


async def flip_repeatedly(address: str, secret: str, flips: int, rng: random.Random) -> list[float]:
    """Moves the worker there and back `flips` times. Returns the seconds of each flip to prefill."""
    seconds = []
    async with rpc.connect(address, secret.encode()) as channel:
        for _ in range(flips):
            await asyncio.sleep(rng.uniform(*QUIET_S))
            seconds.append(await flip(channel))
            await asyncio.sleep(rng.uniform(*QUIET_S))
            await set_pool(channel, "decode", CALL_S)
    return seconds


async def measure(args: argparse.Namespace, cluster: LocalCluster) -> Report:
    rng = random.Random(args.seed)
    asked = [case for case in (*cases(24, SHORT_ANSWER), *cases(8, LONG_ANSWER)) if case.temperature == 0]
    right = await expected(cluster.url, asked, at_once=args.clients)
    load, stop = Load(cluster.url, asked, rng), asyncio.Event()
    loading = asyncio.create_task(load.run(args.clients, stop))
    address = cluster.of("decode")[1].lives[-1]["address"]
    try:
        seconds = await flip_repeatedly(address, cluster.secret, args.flips, rng)
    finally:
        stop.set()
        await loading
    leaks = await asyncio.to_thread(leaks_when_idle, cluster.url)
    verdict = judge(load.streams, right)
    for line in (*verdict.errors[:10], *(f"{name}: {count}" for name, count in leaks.items())):
        print(line, file=sys.stderr)
    report = Report("flip", {k: v for k, v in vars(args).items() if k not in ("json", "logs")}, args.json)
    name, p99 = f"flip.{args.device}", percentile(seconds, 0.99)
    report.add(Row(f"{name}.seconds", percentile(seconds, 0.5), "s", p99=p99, goal=GOAL_S, better="lower"))
    for row, value, unit in (
        ("failed", verdict.failed, "requests"),
        ("different_tokens", verdict.different + verdict.lost_or_repeated, "tokens"),
        ("leaked_blocks", sum(leaks.values()), "blocks, slots, attempts"),
    ):
        report.add(Row(f"{name}.{row}", value, unit, goal=0, better="lower"))
    report.add(Row(f"{name}.flips", len(seconds), "times"))
    report.add(Row(f"{name}.requests", verdict.requests, "requests"))
    report.detail = {"seconds": seconds}
    return report


def start(args: argparse.Namespace, directory: Path) -> LocalCluster:
    if args.device == "cpu":
        workers, devices, router = [*FLAGS, *ON_CPU], [], [*ROUTER_FLAGS]
    else:
        model = str(write_shape("llama-3.1-8b", directory, tokenizer=True))
        workers, devices = [*FLAGS, *ON_CUDA, "--model", model], ["cuda:0", "cuda:1", "cuda:1"]
        router = [*ROUTER_FLAGS, "--model", model]
    return LocalCluster(
        directory, prefill=1, decode=2, worker_flags=workers, devices=devices, router_flags=router
    )


def main() -> int:
    p = contract.parser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--flips", type=int, metavar="N", help=f"default: {FLIPS}; {SHORT_FLIPS} with --short")
    p.add_argument("--clients", type=int, metavar="N", help="streams at a time (default: 8 on a CPU, 32)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of requests and moments")
    p.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of all processes there")
    gpus = len(contract.gpus())
    p.set_defaults(device="cuda" if gpus >= 2 else "cpu")
    args = p.parse_args()
    if args.device == "cuda" and gpus < 2:
        p.error("this bench needs two GPUs")
    args.flips = args.flips or (SHORT_FLIPS if args.short else FLIPS)
    args.clients = args.clients or (8 if args.device == "cpu" else 32)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="baton-flip-") as temporary,
        start(args, args.logs or Path(temporary)) as cluster,
    ):
        report = asyncio.run(measure(args, cluster))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
