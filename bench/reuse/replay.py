"""Replays a trace of chats through real clusters, each of which reuses more than the one before.

computed        no prompt begins like another one, so that all is computed
prefill_cache   prefill workers keep a prefix cache
decode_cache    decode workers, too: they ask only for the KV that they lack
fetches         workers fetch by content what other workers have, such as the answers of decode workers
all             the router may also let one worker compute and decode a request: the default flags

With `--working-set X` the pool of each worker is so small that the trace has X times as many distinct tokens.
All mechanisms are on then, first without a host tier, then with one.

All clusters of a run start together, on the same GPUs. One of them has requests, and the others are idle.

`hits` is the share of the prompt tokens that were cached, as the API reports it, and its ratio to a cache
that keeps everything. `ttft` counts from the time of the trace, or from the end of the answer before, if that
is later. `goodput` counts the requests that meet the objective, and `moved` the KV that went from one worker
to another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp

from baton.bench.chaos.cluster import LocalCluster
from baton.bench.chaos.streams import Case, Stream, new_session, read
from baton.bench.contract import Report, Row, percentile
from baton.bench.load.measurement.slo import Slo
from baton.bench.load.traffic.datasets import read_trace
from baton.bench.reuse.chats import Asked, InfiniteCache, Prompts, asked_of, distinct_tokens, synthetic
from baton.bench.shapes import DENSE, write_shape

DEFAULT = "default"
WARM_UP, WARM_UP_TOKENS = 3, 1000  # turns of one chat, and by how much each is longer than the one before
REPORT_S = 1.5  # after that workers have reported what they did
SLOS = {"cpu": Slo.parse("ttft=1000,ttit=100"), "cuda": Slo.parse("ttft=200,ttit=12")}
CONTEXT = {"cpu": 8192, "cuda": 32768}
MEMORY_SHARE = "0.45"
"""Of a GPU, for a worker of each of two clusters."""


class Size(NamedTuple):
    requests: int
    length_scale: float
    time_scale: float


SIZES = {"cpu": Size(40, 1 / 8, 0.1), "cuda": Size(160, 1.0, 1.0)}
HOST = {"cpu": "4GiB", "cuda": "32GiB"}
BLOCK = {"cpu": 16, "cuda": 128}
SHORT = {"cpu": Size(8, 1 / 16, 1.0), "cuda": Size(60, 1.0, 1.0)}


Workers = tuple[bool, int | None, bool]


class Mechanism(NamedTuple):
    name: str
    decode_cache: bool
    router_flags: tuple[str, ...]
    known: bool = True  # prompts have beginnings that came before
    num_blocks: int | None = None  # of each worker; None: the default
    host_tier: bool = False

    @property
    def workers(self) -> Workers:
        """What its workers have in common with those of other mechanisms, which share a cluster."""
        return self.decode_cache, self.num_blocks, self.host_tier


_ALONE = ("--no-overflow", "--no-prefix-fetches")
MECHANISMS = (
    Mechanism("computed", False, _ALONE, known=False),
    Mechanism("prefill_cache", False, _ALONE),
    Mechanism("decode_cache", True, _ALONE),
    Mechanism("fetches", True, ("--no-overflow",)),
    Mechanism("all", True, ()),
)


@dataclass
class Answered:
    due: float  # time.monotonic()
    prompt: int
    stream: Stream

    @property
    def ttft(self) -> float:
        return self.stream.arrivals[0] - self.due

    @property
    def mean_gap(self) -> float | None:
        arrivals = self.stream.arrivals
        return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) if len(arrivals) > 1 else None


@dataclass
class Run:
    """One replay."""

    answered: list[Answered] = field(default_factory=list)
    known: int = 0  # prompt tokens that an infinite cache would have had

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt for one in self.answered)

    @property
    def hits(self) -> float:
        return sum(one.stream.cached_tokens for one in self.answered) / self.prompt_tokens

    @property
    def bound(self) -> float:
        return self.known / self.prompt_tokens

    def goodput(self, slo: Slo) -> float:
        """Requests per second that meet the objective."""

        def meets(one: Answered) -> bool:
            gap = one.mean_gap
            found = {"ttft": one.ttft * 1e3, "ttit": None if gap is None else gap * 1e3}
            return slo.met_by_request(found.get)

        seconds = max(one.stream.ended for one in self.answered) - min(one.due for one in self.answered)
        return sum(map(meets, self.answered)) / seconds


async def replay(url: str, asked: Sequence[Asked], prompts: Prompts, *, known: bool) -> Run:
    """Sends each request at its time, but not before the answer that it continues. Raises an ExceptionGroup
    if a request fails."""
    run, cache, began = Run(), InfiniteCache(), time.monotonic()
    ended = [asyncio.Event() for _ in asked]

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        wanted = asked[number]
        await asyncio.sleep(began + wanted.at - time.monotonic())
        due = began + wanted.at
        if wanted.before is not None and not ended[wanted.before].is_set():
            await ended[wanted.before].wait()
            due = time.monotonic()
        prompt = prompts.write(number)
        sent = prompt if known else [number, *prompt[1:]]
        run.known += cache.find(sent)
        cache.add(sent)
        case = Case("", wanted.answer, temperature=0.0, seed=1)
        stream = await read(http, url, case, prompt=sent, stream_options={"include_usage": True})
        if stream.failed:
            raise RuntimeError(f"request {number} failed: {stream.error}")
        cache.add([*sent, *stream.token_ids])
        prompts.answered(number, prompt, stream.token_ids)
        run.answered.append(Answered(due, len(sent), stream))
        ended[number].set()

    async with new_session() as http, asyncio.TaskGroup() as tasks:
        for number in range(len(asked)):
            tasks.create_task(one(http, number))
    return run


def chain(tokens: int) -> list[Asked]:
    """Turns of one chat, whose prompts grow by so many tokens."""
    return [Asked(0.0, (turn + 1) * tokens, 8, (), turn - 1 if turn else None) for turn in range(WARM_UP)]


def rows(report: Report, device: str, mechanism: Mechanism, run: Run, moved: float) -> None:
    name = f"reuse.{device}.trace.{mechanism.name}"
    ttfts = [one.ttft * 1e3 for one in run.answered]
    report.add(Row(f"{name}.ttft", percentile(ttfts, 0.5), "ms", p99=percentile(ttfts, 0.99)))
    if mechanism.known:
        ratio = run.hits / run.bound if run.bound else None
        to = f"an infinite cache ({run.bound:.3f})"
        report.add(Row(f"{name}.hits", run.hits, "of the prompt tokens", ratio=ratio, ratio_to=to))
    report.add(Row(f"{name}.goodput", run.goodput(SLOS[device]), "requests/s"))
    report.add(Row(f"{name}.moved", moved / 1e6, "MB"))


def with_small_pools(
    device: str, asked: Sequence[Asked], working_set: float, scale: float
) -> list[Mechanism]:
    """All mechanisms, without a host tier and with one. A pool holds any one request, if no more."""
    longest = max(one.length + one.answer for one in asked)
    tokens = max(distinct_tokens(asked, length_scale=scale) / working_set, 1.1 * longest)
    blocks = round(tokens / BLOCK[device]) + 2
    return [
        Mechanism(f"working_set_{working_set:g}.{name}", True, (), num_blocks=blocks, host_tier=host_tier)
        for name, host_tier in (("no_host_tier", False), ("host_tier", True))
    ]


def cluster_of(args: argparse.Namespace, directory: Path, mechanism: Mechanism) -> LocalCluster:
    if args.device == "cpu":
        model = ["--model", args.model] if args.model else []
        worker, devices = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1"], []
    else:
        model = ["--model", args.model or str(write_shape(DENSE, directory, tokenizer=True))]
        worker = ["--load-format", "dummy", "--gpu-memory-utilization", MEMORY_SHARE]
        worker += ["--kv-lanes", "8", "--kv-slots", "256"]
        devices = ["cuda:0", "cuda:1"]
    if mechanism.num_blocks is not None:
        worker += ["--block-size", str(BLOCK[args.device]), "--num-blocks", str(mechanism.num_blocks)]
    elif args.device == "cuda":
        worker += ["--max-model-len", str(CONTEXT["cuda"])]
    if mechanism.host_tier:
        worker += ["--host-cache-size", HOST[args.device]]
    return LocalCluster(
        directory,
        prefill=1,
        decode=1,
        worker_flags=[*worker, *model, "--kv-connector", args.kv_connector],
        devices=devices,
        decode_flags=() if mechanism.decode_cache else ("--no-enable-prefix-caching",),
        router_flags=model,
    )


@contextlib.contextmanager
def started(clusters: Iterable[LocalCluster]) -> Iterator[list[LocalCluster]]:
    """Starts them together, and ends them."""
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor() as starts:
            up = list(starts.map(stack.enter_context, clusters))
        yield up


def moved(cluster: LocalCluster) -> float:
    """Bytes of KV that went from one worker to another so far. Each is counted at both ends."""
    time.sleep(REPORT_S)
    return sum(worker.metric("baton:kv_bytes_total") for worker in cluster.workers) / 2


def measure(args: argparse.Namespace) -> Report:
    """Raises ValueError for a trace that cannot be read or has no request that fits, and an ExceptionGroup if
    a request fails."""
    size = (SHORT if args.short else SIZES)[args.device]
    scale, count = args.length_scale or size.length_scale, args.requests or size.requests
    lines = synthetic(count, seed=0) if args.trace == DEFAULT else read_trace(Path(args.trace))
    most = CONTEXT[args.device] / scale
    lines = [line for line in lines if line.input_length + line.output_length < most][:count]
    if not lines:
        raise ValueError(f"no request of the trace fits into {CONTEXT[args.device]} tokens")
    asked = asked_of(lines, length_scale=scale, time_scale=args.time_scale or size.time_scale)
    given = {key: value for key, value in vars(args).items() if key != "json"}
    report = Report("reuse", given | {"requests": len(asked), "slo": str(SLOS[args.device])}, args.json)
    seeds = itertools.count()

    def run(url: str, asked: Sequence[Asked], *, known: bool) -> Run:
        prompts = Prompts(asked, length_scale=scale, seed=next(seeds))
        return asyncio.run(replay(url, asked, prompts, known=known))

    tried: Sequence[Mechanism] = MECHANISMS
    if args.working_set is not None:
        tried = with_small_pools(args.device, asked, args.working_set, scale)
    with tempfile.TemporaryDirectory(prefix="baton-reuse-") as name:
        made: dict[Workers, LocalCluster] = {}
        for mechanism in tried:
            if mechanism.workers not in made:
                directory = Path(name, str(len(made)))
                directory.mkdir()
                made[mechanism.workers] = cluster_of(args, directory, mechanism)
        with started(made.values()) as up:
            clusters = dict(zip(made, up, strict=True))
            of_routers: dict[Workers, tuple[str, ...]] = dict.fromkeys(clusters, ())
            for mechanism in tried:
                cluster = clusters[mechanism.workers]
                if of_routers[mechanism.workers] != mechanism.router_flags:
                    cluster.restart_router(*mechanism.router_flags)
                    of_routers[mechanism.workers] = mechanism.router_flags
                run(cluster.url, chain(round(WARM_UP_TOKENS * scale)), known=True)
                before = moved(cluster)
                found = run(cluster.url, asked, known=mechanism.known)
                rows(report, args.device, mechanism, found, moved(cluster) - before)
    return report
