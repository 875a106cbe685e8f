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

import argparse
import asyncio
import math
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

import baton.bench.lab.driver as driver
from baton.bench.lab.driver import gpus_or_exit, interleaved, report_of
from baton.bench.lab.engine.drive import drain, fill
from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle
from baton.bench.lab.harness.streams import (
    Case,
    Load,
    Stream,
    cases,
    expected,
    judge,
    new_session,
    read,
    until,
)
from baton.bench.lab.shapes import DENSE, SHAPES, write_shape
from baton.bench.load.target.tokenization import WORDS, Composer, Segment, Tokenization
from baton.bench.report import Report, Row, paired_ratio
from baton.cluster.gpus import gpus_with_memory
from baton.cluster.model import embedded_path
from baton.engine import Engine, EngineConfig, build_engine
from baton.engine.core.kept_blocks import KeptBlock, KeptBlocks
from baton.system.tracing import time_of_day
from baton.worker.kept_files import KeptFiles
from baton.worker.service_process.standby import MOST_ENDS

STREAMS, SHORT_STREAMS = 8, 4
KILLS, SHORT_KILLS = 20, 2
KILLS_NO_STANDBY = 5
BETWEEN = 10
"""Tokens that each client gets between two kills."""
REPEAT = 5  # of the texts of prompts: they have up to some 200 tokens
ANSWER = 96
"""Tokens of an answer. They end at any time, before a kill and after it."""
STEPS, SHORT_STEPS, PAIRS = 256, 64, 5
BATCH, CONTEXT = 4, 128
STANDS_BY = "an engine process stands by"
CPU_FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--advanced.num-threads",
    "1",
    "--advanced.num-blocks",
    "1200",
)
GPU_FLAGS = ("--dtype", "bfloat16", "--load-format", "dummy", "--batch-invariant", "--max-model-len", "32768")
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
    """Of one cluster."""

    streams: list[Stream]
    recomputed: list[int]
    """Tokens, by kill, of the streams that the worker decoded."""
    recomputed_joining: list[int]
    """The same of all others."""
    pauses: list[float]
    """Seconds of the longest one, by kill, of the streams that the worker decoded."""
    pauses_joining: list[float]
    """The same of all others."""
    stages: dict[str, list[float]]
    """Seconds of each stage of a pause, by kill: from the kill to the first token of the last stream."""


@contextmanager
def started(*flags: str, of_router: Sequence[str] = ()) -> Iterator[LocalCluster]:
    model = ("--model", str(embedded_path()))
    with (
        tempfile.TemporaryDirectory(prefix="baton-survive-") as directory,
        LocalCluster(
            Path(directory),
            prefill=1,
            decode=1,
            worker_flags=(*CPU_FLAGS, *model, *flags),
            router_flags=(*model, *of_router),
        ) as cluster,
    ):
        yield cluster


@contextmanager
def started_on_gpus(shape: str) -> Iterator[LocalCluster]:
    """The decode worker has a GPU of its own if there are two. The prefill worker ends with its engine."""
    gpus = gpus_or_exit(1, "this bench")
    shares = ("0.9", "0.9") if gpus > 1 else ("0.17", "0.76")
    with tempfile.TemporaryDirectory(prefix="baton-survive-") as directory:
        model = ("--model", str(write_shape(shape, Path(directory), tokenizer=True)))
        prefill, decode = (("--gpu-memory-utilization", share) for share in shares)
        with LocalCluster(
            Path(directory),
            prefill=1,
            decode=1,
            worker_flags=(*GPU_FLAGS, *model),
            prefill_flags=prefill,
            decode_flags=(*decode, "--replace-engine"),
            router_flags=(*model, *ALONE, *PATIENT),
            devices=[f"cuda:{number % gpus}" for number in range(2)],
        ) as cluster:
            try:
                yield cluster
            except BaseException:
                print(cluster.of("decode")[0].log.read_text(), file=sys.stderr)
                raise


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

    def pauses_of(*, decoded: bool) -> list[float]:
        return [longest(streams(), *pair, decoded=decoded) for pair in pairwise([*moments, math.inf])]

    return Kills(
        streams(),
        recomputed(decoded=True),
        recomputed(decoded=False),
        pauses_of(decoded=True),
        pauses_of(decoded=False),
        stages_in(log.read_text()) | ends_of_pauses(log.read_text(), moments, streams()),
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


def step_seconds(report: Report, steps: int) -> None:
    """Adds the time of a decode step, and its ratio to one without the records of published blocks. That
    part is measured by itself: two engines of one process differ by more."""
    files = KeptFiles.create()
    config = EngineConfig(
        str(embedded_path()), dtype="float32", num_blocks=256, num_threads=1, enable_prefix_caching=True
    )
    engine = build_engine(config, kept=[files.memory])
    fill(engine, BATCH, CONTEXT, steps + 1)
    spent = 0.0

    def timed(self: KeptBlocks, blocks: Iterable[KeptBlock]) -> None:
        nonlocal spent
        began = time.process_time()
        add(self, blocks)
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
    files.close()


def step_on_gpu(shape: str, report: Report, steps: int) -> None:
    """Adds the ratio of a decode step with records of published blocks, and weights in pages that others may
    map, to one without, in pairs."""
    files = KeptFiles.create()
    with tempfile.TemporaryDirectory(prefix="baton-survive-") as directory:
        config = EngineConfig(
            str(write_shape(shape, Path(directory))), device="cuda", dtype="bfloat16", load_format="dummy",
            num_blocks=1024, max_model_len=8192, enable_prefix_caching=True, stands_by=True,
        )  # fmt: skip
        recording, plain = build_engine(config, kept=[files.memory]), build_engine(config)

    def seconds(engine: Engine) -> float:
        fill(engine, 32, CONTEXT, steps + 1)
        began = time.monotonic()
        drain(engine)
        return (time.monotonic() - began) / steps

    ratio, spread = paired_ratio(*interleaved(lambda: seconds(recording), lambda: seconds(plain), PAIRS))
    report.add(
        Row(
            "survive.cuda.step", 1e3 * seconds(recording), "ms", ratio=ratio, ratio_to="without records",
            spread=spread, goal=SLOWEST_STEP,
        )
    )  # fmt: skip
    files.close()


def used_gib() -> float:
    """Of all GPUs, as the driver tells it."""
    return sum(gpu.used_gib for gpu in gpus_with_memory())


def cases_of(count: int, tokens: int, answer: int) -> list[Case]:
    """Prompts of so many tokens. Prompts of different lengths share no prefix."""
    compose = Composer(Tokenization(WORDS, 1.0, 0, "one token a word")).compose
    prompts = [compose([Segment((tokens, number), tokens)]) for number in range(count)]
    return [Case(prompt, answer, 0.8 * (i % 2), seed=i + 1) for i, prompt in enumerate(prompts)]


def measure_on_gpus(args: argparse.Namespace, report: Report) -> None:
    if args.part != "kills":
        step_on_gpu(args.model_shape, report, SHORT_STEPS if args.short else STEPS)
    if args.part == "step":
        return
    cases = cases_of(args.streams, args.prompt_tokens, GPU_ANSWER)
    others = cases_of(*BESIDE) if args.rate else []
    with started_on_gpus(args.model_shape) as cluster:
        log, before = cluster.of("decode")[0].log, used_gib()
        right = asyncio.run(expected(cluster.url, [*cases, *others], args.streams))
        while STANDS_BY not in (text := log.read_text()):
            if f"has ended ({MOST_ENDS}" in text:
                raise RuntimeError("no standby comes")
            time.sleep(STANDBY_CHECK)
        memory = used_gib() - before
        stays = asyncio.run(killed(cluster, cases, args.kills, standby=True, others=others, rate=args.rate))
        tell(report, "cuda", stays, right, leaks_when_idle(cluster.url), len(cluster.of("decode")[0].exits))
        for line in log.read_text().splitlines():
            if any(word in line for word in TOLD):
                print(line, file=sys.stderr)
    report.add(Row("survive.cuda.standby_memory", memory, "GiB"))
    report.add_median("survive.cuda.pause", stays.pauses, "s", goal=LONGEST_PAUSE)
    report.add_median("survive.cuda.pause_joining", stays.pauses_joining, "s")
    for stage, seconds in stays.stages.items():
        report.add_median(f"survive.cuda.pause.{stage.replace(' ', '_')}", seconds, "s")


def tell(
    report: Report,
    device: str,
    stays: Kills,
    right: dict[Case, list[int]],
    leaks: dict[str, int],
    exits: int,
) -> None:
    verdict = judge(stays.streams, right)
    for error in verdict.errors:
        print(error, file=sys.stderr)
    report.detail = {
        "leaks": leaks,
        "recomputed": stays.recomputed,
        "recomputed_joining": stays.recomputed_joining,
        "pauses": stays.pauses,
        "pauses_joining": stays.pauses_joining,
    }
    name = f"survive.{device}"
    report.add(Row(f"{name}.different", verdict.different + verdict.lost_or_repeated, "tokens", goal=0))
    report.add(Row(f"{name}.failed", verdict.failed, "streams", goal=0))
    report.add(Row(f"{name}.leaked", sum(leaks.values()), "blocks, slots, attempts", goal=0))
    report.add(Row(f"{name}.ended", exits, "workers", goal=0))
    report.add(Row(f"{name}.answers", len(stays.streams), "answers"))
    most = max(stays.recomputed)
    report.add(Row(f"{name}.recomputed", most, "tokens a stream", goal=MOST_RECOMPUTED[device]))
    report.add(Row(f"{name}.recomputed_joining", max(stays.recomputed_joining), "tokens a stream"))


def measure(args: argparse.Namespace, report: Report) -> None:
    requests = cases(args.streams, ANSWER, repeat=REPEAT)
    with started("--no-enable-prefix-caching") as cluster:
        right = asyncio.run(expected(cluster.url, requests))
    with started() as cluster:
        ends = asyncio.run(killed(cluster, requests, 1))
    with started("--replace-engine", "--advanced.no-standby", of_router=ALONE) as cluster:
        starts = asyncio.run(killed(cluster, requests, min(args.kills, KILLS_NO_STANDBY)))
    with started("--replace-engine", of_router=ALONE) as cluster:
        stays = asyncio.run(killed(cluster, requests, args.kills, standby=True))
        memory = standby_memory(cluster.of("decode")[0].log.read_text())
        leaks = leaks_when_idle(cluster.url)
        exits = len(cluster.of("decode")[0].exits)
    tell(report, "cpu", stays, right, leaks, exits)
    report.add(Row("survive.cpu.recomputed_without", max(ends.recomputed), "tokens a stream"))
    for name, kills in (("pause", stays), ("pause_no_standby", starts)):
        report.add_median(f"survive.cpu.{name}", kills.pauses, "s")
        for stage, seconds in kills.stages.items():
            report.add_median(f"survive.cpu.{name}.{stage.replace(' ', '_')}", seconds, "s")
    report.add(Row("survive.cpu.standby_memory", memory, "GiB"))
    report.add_median("survive.cpu.pause_without", ends.pauses, "s")
    step_seconds(report, SHORT_STEPS if args.short else STEPS)


def main() -> int:
    p = driver.parser(__doc__ or "")
    p.add_argument("--model-shape", choices=sorted(SHAPES), default=DENSE, help=f"on GPUs; default: {DENSE}")
    p.add_argument("--prompt-tokens", type=int, default=16_000, metavar="N", help="on GPUs; default: 16,000")
    p.add_argument(
        "--rate",
        type=float,
        default=0.0,
        metavar="R",
        help="on GPUs: short requests a second beside; default: 0",
    )
    p.add_argument("--part", choices=("kills", "step"), help="on GPUs: measure this alone")
    args = driver.with_counts(p, kills=(KILLS, SHORT_KILLS), streams=(STREAMS, SHORT_STREAMS))
    report = report_of("survive", args)
    (measure_on_gpus if args.device == "cuda" else measure)(args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
