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

import asyncio
import random
import sys
import time
from collections.abc import Sequence

from grpc.aio import Channel

from baton.bench.lab.driver import LOGS, Bench, Option, Run, gpus_or_exit
from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle, served
from baton.bench.lab.harness.streams import Case, Load, Stream, expected, judge
from baton.bench.lab.overlap.streams import Trace
from baton.bench.report import Row
from baton.cluster.supervision.calls import set_pool, status_of
from baton.rpc.channel import connect

GOAL_S = 1.0
QUIET_S = (0.3, 1.0)  # before each flip, and before each flip back
CALL_S = 10.0  # for an answer of the worker
SERVES_S = 30.0  # for the first prompt
LOOK_S = 0.1  # between two questions whether it is computed; each costs the engine time
SHORT_ANSWER, LONG_ANSWER = 2, 32  # tokens; short for many prompts, long to run on a worker that moves
ANSWERS = (SHORT_ANSWER, SHORT_ANSWER, SHORT_ANSWER, LONG_ANSWER)
PROMPTS, WORDS = 16, 40_000  # words: of each dummy model, and more
FLAGS = ("--dtype", "float32", "--no-enable-prefix-caching")
ROUTER_FLAGS = ("--advanced.no-overflow", "--advanced.routing-policy", "round-robin")
ON_CPU = ("--advanced.num-blocks", "600")
ON_CUDA = ("--max-model-len", "8192")
SHARES = {1: "0.31", 2: "0.42"}
"""Of a GPU's memory, for each worker, by the number of GPUs."""
SHAPES = {"cpu": "one-small-layer", "cuda": "llama-3.1-8b"}


async def flip(channel: Channel) -> float:
    """Moves a decode worker to the prefill pool. Returns after it has computed a prompt: when that began.

    Raises TimeoutError if it gets none.
    """
    began = time.monotonic()
    before = (await set_pool(channel, "prefill", CALL_S)).computed_prompt_tokens
    async with asyncio.timeout(SERVES_S):
        while True:
            status = await status_of(channel, CALL_S)
            if status is not None and status.computed_prompt_tokens != before:
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


async def answered(
    run: Run, cluster: LocalCluster, rng: random.Random
) -> tuple[list[float], list[Stream], dict[Case, list[int]]]:
    """When each flip to prefill began, what the clients read, and the right answers."""
    requests = cases(rng)
    right = await expected(cluster.url, requests, at_once=run.args.clients)
    load = Load(cluster.url, requests, rng)
    address = cluster.of("decode")[1].lives[-1]["address"]
    async with load.of(run.args.clients):
        flips = await flip_repeatedly(address, cluster.secret, run.args.flips, rng)
    return flips, load.streams, right


def report_rows(run: Run, name: str, flips: Sequence[float], trace: Trace) -> None:
    prompts = [(trace.taken[prefill], token) for prefill, token in trace.first_token.items()]
    firsts = [next(prompt for prompt in prompts if prompt[0] >= began) for began in flips]
    waits = [taken - began for began, (taken, _) in zip(flips, firsts, strict=True)]
    seconds = [token - began for began, (_, token) in zip(flips, firsts, strict=True)]
    run.add_median(f"{name}.seconds", seconds, "s", goal=GOAL_S)
    run.add_median(f"{name}.until_prompt", waits, "s")
    run.add(Row(f"{name}.flips", len(seconds), "times"))
    run.detail = {"seconds": seconds, "until_prompt": waits}


def measure(run: Run) -> None:
    name, traces = f"flip.{run.device}", run.directory / "traces"
    gpus = min(gpus_or_exit(1, "this bench"), 2) if run.on_gpus else 0
    on_gpus = (*ON_CUDA, "--gpu-memory-utilization", SHARES.get(gpus, ""))
    with served(
        run, *FLAGS, "--advanced.trace-dir", str(traces), shape=SHAPES[run.device], decode=2, on_cpu=ON_CPU,
        on_gpus=on_gpus, devices=["cuda:0", *[f"cuda:{gpus - 1}"] * 2], router_flags=ROUTER_FLAGS,
    ) as cluster:  # fmt: skip
        flips, streams, right = asyncio.run(answered(run, cluster, random.Random(run.args.seed)))
        leaks = leaks_when_idle(cluster.url)
    # The traces are complete after the workers have ended.
    report_rows(run, name, flips, Trace.read(traces / "decode-1-engine.trace"))
    judge(streams, right).add_to(run, name, leaks)


BENCH = Bench(
    "flip",
    measure,
    __doc__,
    options=(
        Option("--flips", default=20, short=5),
        Option("--clients", "streams at a time", {"cpu": 8, "cuda": 32}),
        Option("--seed", "of requests and moments", 0),
        LOGS,
    ),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
