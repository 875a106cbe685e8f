"""How soon a worker serves prompts after its pool was changed, and whether a client notices.

A cluster has one prefill worker, two decode workers and a router. Clients send one greedy request after
another. The second decode worker is flipped to the prefill pool and back, again and again. A flip takes from
the call that changes the label until the worker has computed its first prompt. The trace of the worker says
which part of that time passes before it has a prompt.

Overflow is off and the router takes prefill workers in turn: a decode worker computes no prompt, and a
prefill worker gets the next one. The model has random weights and runs in float32, so every answer must equal
the one without flips. On a CPU it has one small layer: with a larger model three engines on few cores make
clients wait, and a flip would seem to last until one of them asks again. On GPUs it is the 8B Llama shape.
The prefill worker has the first GPU, both decode workers the second; with one GPU all three share it.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from grpc.aio import Channel

import baton.bench.lab.driver as driver
from baton.bench.lab.driver import report_of
from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle
from baton.bench.lab.harness.streams import Case, Load, Verdict, expected, judge
from baton.bench.lab.overlap.streams import Trace
from baton.bench.lab.shapes import write_shape
from baton.bench.report import Report, Row
from baton.cluster.supervision.calls import set_pool, status_of
from baton.rpc.channel import connect

FLIPS = 20
SHORT_FLIPS = 5
GOAL_S = 1.0
QUIET_S = (0.3, 1.0)  # before each flip, and before each flip back
CALL_S = 10.0  # for an answer of the worker
SERVES_S = 30.0  # for the first prompt
LOOK_S = 0.1  # between two questions whether it is computed; each costs the engine time
SHORT_ANSWER, LONG_ANSWER = 2, 32  # tokens; short for many prompts, long to run on a worker that moves
ANSWERS = (SHORT_ANSWER, SHORT_ANSWER, SHORT_ANSWER, LONG_ANSWER)
PROMPTS, WORDS = 16, 40_000  # words: of each dummy model, and more
FLAGS = ("--dtype", "float32", "--no-enable-prefix-caching", "--load-format", "dummy")
ROUTER_FLAGS = ("--advanced.no-overflow", "--advanced.routing-policy", "round-robin")
ON_CPU = ("--device", "cpu", "--advanced.num-threads", "1", "--advanced.num-blocks", "600")
ON_CUDA = ("--max-model-len", "8192")
SHARES = {1: "0.31", 2: "0.42"}
"""Of a GPU's memory, for each worker, by the number of GPUs."""
TRACES = "traces"
SHAPES = {"cpu": "one-small-layer", "cuda": "llama-3.1-8b"}


async def flip(channel: Channel) -> float:
    """Moves a decode worker to the prefill pool. Returns after it has computed a prompt: when that began.

    Raises TimeoutError if it gets none.
    """
    began = time.monotonic()
    before = (await set_pool(channel, "prefill", CALL_S)).prompt_tokens
    async with asyncio.timeout(SERVES_S):
        while True:
            status = await status_of(channel, CALL_S)
            if status is not None and status.prompt_tokens != before:
                return began
            await asyncio.sleep(LOOK_S)


async def flip_repeatedly(address: str, secret: str, flips: int, rng: random.Random) -> list[float]:
    """Moves the worker there and back `flips` times. Returns when each flip to prefill began."""
    began = []
    async with connect(address, secret.encode()) as channel:
        for _ in range(flips):
            await asyncio.sleep(rng.uniform(*QUIET_S))
            began.append(await flip(channel))
            await asyncio.sleep(rng.uniform(*QUIET_S))
            await set_pool(channel, "decode", CALL_S)
    return began


def cases(rng: random.Random) -> list[Case]:
    """Greedy requests with different words: their answers differ, too."""
    return [
        Case(" ".join(f"w{rng.randrange(1, WORDS)}" for _ in range(rng.randint(8, 64))), answer, 0.0, seed=0)
        for answer in ANSWERS
        for _ in range(PROMPTS // len(ANSWERS))
    ]


async def measure(
    args: argparse.Namespace, cluster: LocalCluster
) -> tuple[list[float], Verdict, dict[str, int]]:
    """When each flip to prefill began, what the clients read, and what the pools miss at the end."""
    rng = random.Random(args.seed)
    requests = cases(rng)
    right = await expected(cluster.url, requests, at_once=args.clients)
    load = Load(cluster.url, requests, rng)
    address = cluster.of("decode")[1].lives[-1]["address"]
    async with load.of(args.clients):
        flips = await flip_repeatedly(address, cluster.secret, args.flips, rng)
    leaks = await asyncio.to_thread(leaks_when_idle, cluster.url)
    return flips, judge(load.streams, right), leaks


def report_rows(report: Report, name: str, flips: Sequence[float], traces: Path) -> None:
    trace = Trace.read(traces / "decode-1-engine.trace")
    prompts = [(trace.taken[prefill], token) for prefill, token in trace.first_token.items()]
    firsts = [next(prompt for prompt in prompts if prompt[0] >= began) for began in flips]
    waits = [taken - began for began, (taken, _) in zip(flips, firsts, strict=True)]
    seconds = [token - began for began, (_, token) in zip(flips, firsts, strict=True)]
    report.add_median(f"{name}.seconds", seconds, "s", goal=GOAL_S)
    report.add_median(f"{name}.until_prompt", waits, "s")
    report.add(Row(f"{name}.flips", len(seconds), "times"))
    report.detail = {"seconds": seconds, "until_prompt": waits}


def start(args: argparse.Namespace, directory: Path) -> LocalCluster:
    model = str(write_shape(SHAPES[args.device], directory, tokenizer=True))
    devices, flags = [], ON_CPU
    if args.device == "cuda":
        gpus = min(driver.gpus_or_exit(1, "this bench"), 2)
        devices = ["cuda:0", *[f"cuda:{gpus - 1}"] * 2]
        flags = (*ON_CUDA, "--gpu-memory-utilization", SHARES[gpus])
    return LocalCluster(
        directory, prefill=1, decode=2,
        worker_flags=[*FLAGS, *flags, "--model", model, "--advanced.trace-dir", str(directory / TRACES)],
        devices=devices, router_flags=[*ROUTER_FLAGS, "--model", model],
    )  # fmt: skip


def main() -> int:
    p = driver.parser(__doc__ or "")
    p.add_argument("--flips", type=int, metavar="N", help=f"default: {FLIPS}; {SHORT_FLIPS} with --short")
    p.add_argument("--clients", type=int, metavar="N", help="streams at a time (default: 8 on a CPU, 32)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of requests and moments")
    p.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of all processes there")
    args = p.parse_args()
    args.flips = args.flips or (SHORT_FLIPS if args.short else FLIPS)
    args.clients = args.clients or (8 if args.device == "cpu" else 32)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    report = report_of("flip", args)
    with tempfile.TemporaryDirectory(prefix="baton-flip-") as temporary:
        directory = args.logs or Path(temporary)
        with start(args, directory) as cluster:
            flips, verdict, leaks = asyncio.run(measure(args, cluster))
        # The traces are complete after the workers have ended.
        report_rows(report, f"flip.{args.device}", flips, directory / TRACES)
        verdict.add_to(report, f"flip.{args.device}", leaks)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
