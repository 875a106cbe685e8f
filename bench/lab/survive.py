"""What does the death of an engine process cost the streams on it?

A prefill and a decode worker serve the embedded model in float32 as real processes. Clients send one request
after another. The engine process of the decode worker is killed again and again, each time when all clients
have some more tokens.

    different    tokens that differ from those of a cluster without faults, and without a prefix cache
    failed       answers that ended too soon, or with an error
    recomputed   prompt and output tokens of an answer that were computed again for a kill: the most of all
                 that the worker decoded
    pause        the longest gap around a kill, of the answers that the worker decoded
    recomputed_joining, pause_joining  the same of all others: their KV was not there yet, so they may
                 begin again, and wait for other prompts
    pause.STAGE  what the worker does meanwhile: it ends processes, wakes the standby, maps and verifies KV,
                 prepares transfers, starts the transfer process, and submits the attempts. Before that it
                 notices the end (detection), and after it comes the first step of each stream
    step         a decode step of an engine whose KV outlives it, to one that writes no records of blocks
    standby_memory  what the standby takes that the engine which serves does not: of the host, or of the GPU

On GPUs (`--device cuda`) it is a shape with dummy weights in the exact mode, with prompts of
`--prompt-tokens`. The right answers are those before the first kill, and the standby alone is measured:
engines start for half a minute there. The step is measured in this process, with an engine of each kind in
turns.

`…_without` is the same for a worker that ends with its engine process. `…_no_standby` is the same with
`--advanced.no-standby`: such a worker starts Python and torch (the engine process), and loads weights, in the
pause.
"""

import asyncio
import math
import random
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp

from baton.bench.lab.driver import Bench, Option, Run, gpus_or_exit
from baton.bench.lab.engine.drive import drain, fill
from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle, served
from baton.bench.lab.harness.streams import (
    Case,
    Load,
    Stream,
    cases,
    expected,
    judge,
    leaked,
    new_session,
    read,
    until,
    worded,
    zeros,
)
from baton.bench.lab.shapes import DENSE, SHAPES, write_shape
from baton.bench.load.target.tokenization import Segment
from baton.bench.report import Row
from baton.cluster.gpus import gpus_with_memory
from baton.cluster.model import embedded_path
from baton.engine import Engine, EngineConfig, build_engine
from baton.engine.core.kept_table import KeptTable
from baton.system.kept_pages import KeptMemory
from baton.system.tracing import time_of_day
from baton.worker.service_process.standby import MOST_ENDS

KILLS_NO_STANDBY = 5
BETWEEN = 10
"""Tokens that each client gets between two kills."""
REPEAT = 5  # of the texts of prompts: they have up to some 200 tokens
ANSWER = 96
"""Tokens of an answer. They end at any time, before a kill and after it."""
PAIRS = 5
BATCH, CONTEXT = 4, 128
STANDS_BY = "an engine process stands by"
ON_CPU = ("--dtype", "float32", "--advanced.num-blocks", "1200")
ON_GPUS = ("--dtype", "bfloat16", "--batch-invariant", "--max-model-len", "32768")
GPU_ANSWER = 1536
BESIDE = 16, 500, 64
"""Requests beside, the tokens of their prompts and of their answers."""
MOST_RECOMPUTED, SLOWEST_STEP = {"cpu": 128, "cuda": 192}, 1.005
TOLD = "memory:", "stands by", "standby", "goes on", "blocks of KV", "WARN", "ERR"
"""In lines of the log of a worker on a GPU that the bench repeats."""
STANDBY_CHECK = 0.5
"""Seconds between two looks whether the first one stands by."""
LONGEST_PAUSE = 3.0
"""Seconds, on an H200."""
ALONE = ("--advanced.no-overflow",)
"""Of the router: else answers would go on at the prefill worker, where no kill reaches them."""
PATIENT = ("--max-wait", "600")
"""Of the router: all prompts come at once, and again after each kill."""


@dataclass
class Client:
    """Sends its request again and again."""

    case: Case
    streams: list[Stream] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    """What the router and the workers say of each answer."""
    stopped: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.streams)

    async def run(self, http: aiohttp.ClientSession, url: str, number: int) -> None:
        while not self.stopped:
            self.streams.append(Stream(self.case))
            name = f"survive-{number}-{len(self.streams)}"
            await read(http, url, self.case, into=self.streams[-1], name=name)
            if self.streams[-1].failed and not self.streams[-1].token_ids:
                raise RuntimeError(f"an answer failed before its first token: {self.streams[-1].error}")
            async with http.get(f"{url}/status/requests/{name}") as answer:
                self.timelines.append(await answer.json())

    def recomputed(self, moments: Sequence[float], *, decoded: bool) -> list[int]:
        """Tokens of an answer that were computed again after each of these moments, at most. `decoded`: as in
        `longest`."""
        tokens = [0] * len(moments)
        bounds = [time_of_day(moment) / 1e9 for moment in moments]
        for stream, timeline in zip(self.streams, self.timelines, strict=True):
            computed = [0] * len(moments)
            for phases in timeline["phases"].values():
                for phase in phases:
                    kills = sum(bound < phase["start"] for bound in bounds)
                    if phase["kind"] != "prefill" or not kills or stream.started > moments[kills - 1]:
                        continue
                    if decodes_at(stream, moments[kills - 1]) is not decoded:
                        continue
                    attributes = phase["about"]
                    computed[kills - 1] += int(
                        attributes["gen_ai.usage.prompt_tokens"] - attributes["baton.cached_tokens"]
                    )
            tokens = [max(pair) for pair in zip(tokens, computed, strict=True)]
        return tokens


@dataclass
class Kills:
    """Of one cluster. The dicts tell apart the streams that the worker decoded (True) from all others."""

    streams: list[Stream]
    recomputed: dict[bool, list[int]]
    """Tokens, by kill."""
    pauses: dict[bool, list[float]]
    """Seconds of the longest one, by kill."""
    stages: dict[str, list[float]]
    """Seconds of each stage of a pause, by kill: from the kill to the first token of the last stream."""


async def killed(
    cluster: LocalCluster,
    cases: Sequence[Case],
    kills: int,
    *,
    standby: bool = False,
    others: Sequence[Case] = (),
    rate: float = 0.0,
) -> Kills:
    """The clients send requests until there were so many kills. With `standby`, an engine process stands by
    at each of them. `rate`: requests a second of `others`, sent meanwhile."""
    log = cluster.of("decode")[0].log
    clients = [Client(case) for case in cases]
    moments: list[float] = []

    async def all_have_more(tokens: int) -> None:
        counts = [(client, client.tokens + tokens) for client in clients]
        await until(lambda: all(client.tokens >= count for client, count in counts), running)

    def streams() -> list[Stream]:
        return [stream for client in clients for stream in client.streams] + load.streams

    load = Load(cluster.url, others, random.Random(0))
    async with new_session() as http, load.at(rate) if rate else nullcontext():
        running = [
            asyncio.create_task(client.run(http, cluster.url, number))
            for number, client in enumerate(clients)
        ]
        try:
            await all_have_more(BETWEEN)
            for number in range(1, kills + 1):
                stood_by = number if standby else 0
                await until(lambda stood_by=stood_by: log.read_text().count(STANDS_BY) >= stood_by, running)
                moments.append(time.monotonic())
                cluster.of("decode")[0].kill("engine")
                await all_have_more(BETWEEN)
                pauses = [longest(streams(), moments[-1], math.inf, decoded=d) for d in (True, False)]
                print(
                    "kill {} of {}: longest gap {:.2f} s, joining {:.2f} s".format(number, kills, *pauses),
                    file=sys.stderr,
                )
            for client in clients:
                client.stopped = True
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    def recomputed(*, decoded: bool) -> list[int]:
        by_client = [client.recomputed(moments, decoded=decoded) for client in clients]
        return [max(of_kill) for of_kill in zip(*by_client, strict=True)]

    def pauses(*, decoded: bool) -> list[float]:
        return [longest(streams(), *pair, decoded=decoded) for pair in pairwise([*moments, math.inf])]

    text = log.read_text()
    return Kills(
        streams(),
        {decoded: recomputed(decoded=decoded) for decoded in (True, False)},
        {decoded: pauses(decoded=decoded) for decoded in (True, False)},
        stages_in(text) | ends_of_pauses(text, moments, streams()),
    )


def longest(streams: Sequence[Stream], moment: float, end: float, *, decoded: bool) -> float:
    """Seconds of the longest gap between two tokens of a stream that ends in this time. Tokens that were on
    the way come after a kill, so it need not be the gap around it. `decoded`: of streams that the worker
    decoded at this moment, else of all others."""
    chosen = (stream.arrivals for stream in streams if decodes_at(stream, moment) is decoded)
    gaps = (b - a for arrivals in chosen for a, b in pairwise(arrivals) if moment < b <= end)
    return max(gaps, default=0.0)


def decodes_at(stream: Stream, moment: float) -> bool:
    """The first token is the prefill worker's, the second one shows that its KV has come."""
    return len(stream.arrivals) > 1 and stream.arrivals[1] <= moment


def ends_of_pauses(log: str, moments: Sequence[float], streams: Sequence[Stream]) -> dict[str, list[float]]:
    """What comes before the stages that the worker knows, and after them."""
    noticed, gone_on = (
        [datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp() for at in re.findall(line, log, re.M)]
        for line in (
            r"^(\S+ \S+) .*: another engine process goes on$",
            r"^(\S+ \S+) .*another engine process goes on after",
        )
    )
    if not gone_on:
        return {}
    killed_at = [time_of_day(moment) / 1e9 for moment in moments]
    first = []  # tokens that were on the way at the kill came before
    for moment, kill, at in zip(moments, killed_at, gone_on, strict=True):
        resumed = moment + at - kill
        next_tokens = (
            [t for t in stream.arrivals if t > resumed] for stream in streams if decodes_at(stream, moment)
        )
        first.append(max((min(times) - resumed for times in next_tokens if times), default=0.0))
    return {
        "detection": [at - kill for at, kill in zip(noticed, killed_at, strict=True)],
        "first step": first,
    }


def standby_memory(log: str) -> float:
    """GiB of the first standby of a worker."""
    return float(re.findall(STANDS_BY + r", with ([\d.]+) GiB", log)[0])


def stages_in(log: str) -> dict[str, list[float]]:
    """What a worker says of the stages of its replacements."""
    stages: dict[str, list[float]] = {}
    for split in re.findall(r"another engine process goes on after [\d.]+ s: (.*)", log):
        for name, seconds in re.findall(r"([a-zA-Z ]+) ([\d.]+)", split):
            stages.setdefault(name.strip(), []).append(float(seconds))
    return stages


def step_on_cpu(run: Run, steps: int) -> None:
    """Adds the time of a decode step, and its ratio to one without the records of published blocks. That
    part is measured by itself: two engines of one process differ by more."""
    files = KeptMemory.create()
    config = EngineConfig(
        str(embedded_path()), dtype="float32", num_blocks=256, num_threads=1, enable_prefix_caching=True
    )
    engine = build_engine(config, kept=[files])
    fill(engine, BATCH, CONTEXT, steps + 1)
    spent = 0.0

    def timed(self: KeptTable, bodies: Iterable[tuple[int, bytes]]) -> None:
        nonlocal spent
        began = time.process_time()
        add(self, bodies)
        spent += time.process_time() - began

    add = KeptTable.add
    KeptTable.add = timed
    began = time.process_time()
    try:
        drain(engine)
    finally:
        KeptTable.add = add
    seconds = time.process_time() - began
    to = {"ratio_to": "without records", "goal": SLOWEST_STEP}
    run.add(
        Row("survive.cpu.step", 1e3 * seconds / steps, "ms of CPU", ratio=seconds / (seconds - spent), **to)
    )
    files.close()


def step_on_gpu(run: Run, steps: int) -> None:
    """Adds the ratio of a decode step with records of published blocks, and weights in pages that others may
    map, to one without, in pairs."""
    files = KeptMemory.create()
    config = EngineConfig(
        str(write_shape(run.args.model_shape, run.directory)), device="cuda", dtype="bfloat16",
        load_format="dummy", num_blocks=1024, max_model_len=8192, enable_prefix_caching=True,
        stands_by=True,
    )  # fmt: skip
    recording, plain = build_engine(config, kept=[files]), build_engine(config)

    def seconds(engine: Engine) -> float:
        fill(engine, 32, CONTEXT, steps + 1)
        began = time.monotonic()
        drain(engine)
        return (time.monotonic() - began) / steps

    run.compare(
        "survive.cuda.step", partial(seconds, recording), "ms", partial(seconds, plain), "without records",
        pairs=PAIRS, scale=1e3, goal=SLOWEST_STEP,
    )  # fmt: skip
    files.close()


def used_gib() -> float:
    """Of all GPUs, as the driver tells it."""
    return sum(gpu.used_gib for gpu in gpus_with_memory())


def cases_of(count: int, tokens: int, answer: int) -> list[Case]:
    """Prompts of so many tokens. Prompts of different lengths share no prefix."""
    return worded(([Segment((tokens, number), tokens)] for number in range(count)), answer)


def measure_on_gpus(run: Run) -> None:
    """The decode worker has a GPU of its own if there are two. The prefill worker ends with its engine."""
    args = run.args
    if args.part != "kills":
        step_on_gpu(run, args.steps)
    if args.part == "step":
        return
    asked = cases_of(args.streams, args.prompt_tokens, GPU_ANSWER)
    others = cases_of(*BESIDE) if args.rate else []
    shares = ("0.9", "0.9") if gpus_or_exit(1, "this bench") > 1 else ("0.17", "0.76")
    prefill, decode = (("--gpu-memory-utilization", share) for share in shares)
    with served(
        run, shape=args.model_shape, on_gpus=ON_GPUS, prefill_flags=prefill,
        decode_flags=(*decode, "--replace-engine", "--tensor-parallel-size", str(args.ranks)),
        router_flags=(*ALONE, *PATIENT),
    ) as cluster:  # fmt: skip
        log, before = cluster.of("decode")[0].log, used_gib()
        try:
            right = asyncio.run(expected(cluster.url, [*asked, *others], args.streams))
            while STANDS_BY not in (text := log.read_text()):
                if f"has ended ({MOST_ENDS}" in text:
                    raise RuntimeError("no standby comes")
                time.sleep(STANDBY_CHECK)
            memory = used_gib() - before
            stays = asyncio.run(
                killed(cluster, asked, args.kills, standby=True, others=others, rate=args.rate)
            )
        except BaseException:
            print(log.read_text(), file=sys.stderr)
            raise
        tell(run, stays, right, cluster)
        for line in log.read_text().splitlines():
            if any(word in line for word in TOLD):
                print(line, file=sys.stderr)
    run.add(Row("survive.cuda.standby_memory", memory, "GiB"))
    add_pauses(run, "pause", stays, goal=LONGEST_PAUSE)
    run.add_median("survive.cuda.pause_joining", stays.pauses[False], "s")


def tell(run: Run, stays: Kills, right: dict[Case, list[int]], cluster: LocalCluster) -> None:
    verdict, leaks = judge(stays.streams, right), leaks_when_idle(cluster.url)
    for error in verdict.errors:
        print(error, file=sys.stderr)
    run.detail = {
        "leaks": leaks,
        "recomputed": stays.recomputed[True],
        "recomputed_joining": stays.recomputed[False],
        "pauses": stays.pauses[True],
        "pauses_joining": stays.pauses[False],
    }
    name = f"survive.{run.device}"
    zeros(
        run, name, different=(verdict.different + verdict.lost_or_repeated, "tokens"),
        failed=(verdict.failed, "streams"), leaked=leaked(leaks),
        ended=(len(cluster.of("decode")[0].exits), "workers"),
    )  # fmt: skip
    run.add(Row(f"{name}.answers", len(stays.streams), "answers"))
    most, goal = max(stays.recomputed[True]), MOST_RECOMPUTED[run.device]
    run.add(Row(f"{name}.recomputed", most, "tokens a stream", goal=goal))
    run.add(Row(f"{name}.recomputed_joining", max(stays.recomputed[False]), "tokens a stream"))


def add_pauses(run: Run, name: str, kills: Kills, goal: float | None = None) -> None:
    run.add_median(f"survive.{run.device}.{name}", kills.pauses[True], "s", goal=goal)
    for stage, seconds in kills.stages.items():
        run.add_median(f"survive.{run.device}.{name}.{stage.replace(' ', '_')}", seconds, "s")


def measure_on_cpu(run: Run) -> None:
    requests, kills = cases(run.args.streams, ANSWER, repeat=REPEAT), run.args.kills
    serving = partial(served, run, model=str(embedded_path()), on_cpu=ON_CPU)
    with serving("--no-enable-prefix-caching", name="right") as cluster:
        right = asyncio.run(expected(cluster.url, requests))
    with serving(name="without") as cluster:
        ends = asyncio.run(killed(cluster, requests, 1))
    with serving(
        "--replace-engine", "--advanced.no-standby", name="no_standby", router_flags=ALONE
    ) as cluster:
        starts = asyncio.run(killed(cluster, requests, min(kills, KILLS_NO_STANDBY)))
    with serving("--replace-engine", name="standby", router_flags=ALONE) as cluster:
        stays = asyncio.run(killed(cluster, requests, kills, standby=True))
        memory = standby_memory(cluster.of("decode")[0].log.read_text())
        tell(run, stays, right, cluster)
    run.add(Row("survive.cpu.recomputed_without", max(ends.recomputed[True]), "tokens a stream"))
    add_pauses(run, "pause", stays)
    add_pauses(run, "pause_no_standby", starts)
    run.add(Row("survive.cpu.standby_memory", memory, "GiB"))
    run.add_median("survive.cpu.pause_without", ends.pauses[True], "s")
    step_on_cpu(run, run.args.steps)


BENCH = Bench(
    "survive",
    lambda run: (measure_on_gpus if run.on_gpus else measure_on_cpu)(run),
    __doc__,
    options=(
        Option("--kills", default=20, short=2),
        Option("--streams", default=8, short=4),
        Option("--steps", "that are timed", 256, short=64),
        Option("--model-shape", "on GPUs", DENSE, choices=sorted(SHAPES), metavar="NAME"),
        Option("--prompt-tokens", "on GPUs", 16_000),
        Option("--rate", "on GPUs: short requests a second beside", 0.0),
        Option("--ranks", "on GPUs: of the decode worker, which has as many from the second one on", 1),
        Option("--part", "on GPUs: measure this alone", choices=("kills", "step")),
    ),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
