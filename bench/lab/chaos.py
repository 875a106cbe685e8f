"""Kills, stops, cuts off and flips the workers of a real cluster under load: `python -m baton.bench.chaos`.

The cluster has two workers of each role and a router. On a CPU it serves the embedded model in float32, or in
bfloat16 with `--batch-invariant`. On GPUs it serves the 8B Llama shape in bfloat16. The workers take the GPUs
in turn, or share the only one, and preempt requests, since their KV pools are small. Clients send one request
after another, greedy or seeded. Every answer must equal what the cluster answers without faults when it has
only this request. Processes of every kind are killed (SIGKILL), engines are stopped (SIGSTOP), lanes are cut,
workers are moved to the other pool and back. A client asks again if its router is killed. At the end every
pool must be whole.

With `--rate` requests begin at random times, and with `--seconds` faults come over so long. Then the longest
pause says what users notice:

    python -m baton.bench.chaos --rate 1 --seconds 60 --kills 3 --routers 0 --stalls 0 --breaks 0 --flips 0
"""

import asyncio
import random
import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict
from contextlib import AbstractContextManager

from baton.bench.lab.driver import LOGS, Bench, Option, Run
from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle, served
from baton.bench.lab.harness.faults import draw, torment
from baton.bench.lab.harness.streams import Case, Happened, Load, Stream, cases, expected, judge, worded
from baton.bench.lab.harness.workers import metric
from baton.bench.lab.shapes import DENSE, SHAPES
from baton.bench.load.target.tokenization import Segment
from baton.bench.report import Row

WORKERS = ("prefill", "decode")
ROLES = (*WORKERS, "router")
ON_CPU = (
    "--advanced.num-blocks", "600",
    "--max-num-batched-tokens", "64", "--failure-timeout", "2",
)  # fmt: skip
# A step of workers that share a GPU may take long, so deadlines are the usual ones.
ON_CUDA = "--max-num-seqs", "32", "--max-num-batched-tokens", "2048"
BLOCKS, BLOCKS_AT_RATE = 96, 480
"""On GPUs. With the first workers preempt requests, which makes pauses without a fault."""
MAX_WAIT = "600"
LONGEST_PAUSE = 0.5
"""Seconds of any stream at a rate on GPUs, where another worker takes over."""


async def torments(run: Run, cluster: LocalCluster) -> None:
    args, rng = run.args, random.Random(run.args.seed)
    requests = cases_for(args)
    right = await expected(cluster.url, requests, at_once=1)
    load = Load(cluster.url, requests, rng)
    quiet = (0.2, 1.5) if run.short else (0.2, 4.0)
    faults_of = {role: draw(role, args.kills, args.stalls, args.breaks, args.flips, rng) for role in WORKERS}
    faults_of["router"] = draw("router", args.routers, 0, 0, 0, rng)
    # So that all tracks end at about the same time.
    longer = quiet[0], quiet[1] * args.kills / max(1, args.routers)
    pauses = {role: longer if role == "router" else quiet for role in faults_of}
    if args.seconds:
        pauses = {role: (0.0, 2 * args.seconds / (len(faults) + 1)) for role, faults in faults_of.items()}
    tracks = (torment(cluster, role, faults, pauses[role], rng) for role, faults in faults_of.items())
    began = time.monotonic()
    async with load.at(args.rate) if args.rate else load.of(args.clients):
        happened = [one for track in await asyncio.gather(*tracks) for one in track]
        routers = [one for one in happened if one.role == "router"]
        await asyncio.sleep(began + args.seconds - time.monotonic())
        while (verdict := judge(load.streams, right, routers)).tokens < args.tokens and not verdict.failed:  # noqa: ASYNC110
            await asyncio.sleep(1)
    verdict = judge(load.streams, right, routers)
    verdict.add_to(run, "chaos", await asyncio.to_thread(leaks_when_idle, cluster.url))
    run.add(Row("chaos.reconnected", verdict.reconnected, "connections"))
    run.add(Row("chaos.tokens", verdict.tokens, "tokens"))
    preempted = sum(worker.metric("vllm:num_preemptions_total") for worker in cluster.workers)
    run.add(Row("chaos.preempted", preempted, "times, in the last lives"))
    run.add(Row("chaos.overflowed", metric(cluster.url, "baton:overflow_total"), "requests, likewise"))
    _add_faults(run, happened, load.streams, LONGEST_PAUSE if args.rate and run.on_gpus else None)


def _add_faults(run: Run, happened: list[Happened], streams: list[Stream], longest: float | None) -> None:
    """Rows with the number of faults, the time that a worker was away, and the pauses that clients saw.
    `longest`: the goal of these. None: there is none."""
    counts = Counter(f"{one.role}.{one.fault}" for one in happened)
    for name, count in sorted(counts.items()):
        run.add(Row(f"chaos.{name}", count, "times"))
    for role in ROLES:
        away = [x.back - x.at for x in happened if x.role == role and x.back > x.at]
        _add_seconds(run, f"away.{role}", away)
    pauses: defaultdict[str, list[float]] = defaultdict(list)
    for one in happened:
        gaps = (stream.gap_around(one.at) for stream in streams)
        pauses[f"{one.role}.{one.fault}"] += [gap for gap in gaps if gap is not None]
    _add_seconds(run, "pause", everywhere := [gap for gaps in pauses.values() for gap in gaps])
    run.add(Row("chaos.pause.max", max(everywhere, default=0.0), "s", goal=longest))
    for name, gaps in sorted(pauses.items()):
        _add_seconds(run, f"pause.{name}", gaps)
    run.detail = {"pauses": {name: sorted(round(gap, 3) for gap in gaps) for name, gaps in pauses.items()}}


def _add_seconds(run: Run, name: str, seconds: list[float]) -> None:
    if seconds:
        run.add_median(f"chaos.{name}", seconds, "s")


def cases_for(args: Namespace) -> list[Case]:
    """Every second one is greedy. The prompts for a shape have different lengths, and pairs begin alike."""
    if args.model_shape is None:
        return cases(6 if args.short else 16, 24, repeat=4)
    lengths = enumerate(range(200, 1850, 66 if args.short else 33))
    return worded(([Segment((i // 2,), n // 2), Segment((0, i), n - n // 2)] for i, n in lengths), 150)


def flags(args: Namespace) -> list[str]:
    """Of the workers."""
    own = ["--dtype", args.dtype]
    own += ["--max-model-len", "2048"] if args.model_shape else []
    # The embedded model is a GGUF file, which workers would else serve packed.
    own += ["--quantization", args.quantization or ("auto" if args.model_shape else "none")]
    own += ["--batch-invariant"] if args.batch_invariant else []
    return own + (["--speculative-config", args.speculative_config] if args.speculative_config else [])


def start(run: Run) -> AbstractContextManager[LocalCluster]:
    args = run.args
    blocks = ("--advanced.num-blocks", str(BLOCKS_AT_RATE if args.rate else BLOCKS))
    # A rate may be too high while a worker is away. Then requests wait; a refusal would count as a failure.
    waits = ("--max-wait", MAX_WAIT) if args.rate else ()
    return served(
        run, *flags(args), shape=args.model_shape or "", prefill=2, decode=2, on_cpu=ON_CPU,
        on_gpus=(*ON_CUDA, *blocks), router_flags=waits,
    )  # fmt: skip


def measure(run: Run) -> None:
    with start(run) as cluster:
        asyncio.run(torments(run, cluster))


def check(args: Namespace) -> None:
    exact = args.device == "cuda" or args.batch_invariant
    args.dtype = args.dtype or ("bfloat16" if exact else "float32")


BENCH = Bench(
    "chaos",
    measure,
    __doc__,
    options=(
        Option("--kills", "of each role", 12, short={"cpu": 3, "cuda": 2}),
        Option("--stalls", "stopped engines of each role", 2, short=0),
        Option("--routers", "kills of the router", 3, short={"cpu": 0, "cuda": 1}),
        Option("--breaks", "times that lanes are cut", 6, short={"cpu": 2, "cuda": 1}),
        Option("--flips", "of workers of each role", 6, short=2),
        Option("--clients", "streams at a time", {"cpu": 8, "cuda": 48}),
        Option("--rate", "requests/s, in place of clients", 0.0),
        Option("--seconds", "spread faults over this time", 0.0),
        Option("--tokens", "go on until clients have so many tokens", 0),
        Option("--seed", "of cases, moments and victims", 0),
        Option(
            "--model-shape",
            f"random weights (on GPUs: {DENSE})",
            {"cuda": DENSE},
            choices=SHAPES,
            metavar="NAME",
        ),
        Option("--dtype", "of the workers (on GPUs: bfloat16)", choices=("float32", "bfloat16")),
        Option("--batch-invariant", "give the workers this flag, in bfloat16", False),
        Option("--quantization", "give the workers this flag", metavar="NAME"),
        Option("--speculative-config", "give the workers this flag", metavar="JSON"),
        LOGS,
    ),
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
