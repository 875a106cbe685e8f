"""What a router adds to a request, what a token costs it, and how long it takes to choose workers.

Three processes: fake workers behind their real gRPC service (`bench.fake_worker`), a router, started as a
user starts one, and this client. Prompts are token ids, so nothing is tokenized. Interleaved, A B A B …:

A  a streamed completion through the router: from the request to the first event
B  the same prompt submitted to the fake prefill worker: from the message to the first token

added = A − B, pair by pair. It is measured on an idle router, and again while a fourth process keeps a number
of streams open through it, each with a token every 20 ms. Tokens per core are measured with more streams than
the router can keep up with: tokens that clients received ÷ CPU seconds of the router, all of its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

import bench.contract as contract
import rpc
from bench.contract import EXIT_CANNOT_MEASURE, Report, Row
from bench.fake_worker import FakeWorker, Lanes
from bench.roles import Roles
from router.policy import DecodeLoad, PrefillLoads, PrefillRequest, sticky, two_choices
from rpc import worker_pb2 as pb
from rpc.worker_pb2_grpc import WorkerStub

PROMPT_TOKENS = 200
OUTPUT_TOKENS = 2  # the least with a handover
LOADED_STEP_S = 0.02
SATURATED_STEP_S = 0.005
WARM_UP = 50
CONTEXT = multiprocessing.get_context("spawn")


# ---------------------------------------------------------------- the other processes


class FakeWorkers:
    """One of each role, in a process of their own. `step` is shared: seconds between tokens, 0 is at once."""

    def __init__(self, secret: bytes) -> None:
        self.step = CONTEXT.Value("d", 0.0)
        ours, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_fake_workers, args=(secret, self.step, theirs), daemon=True)
        self._process.start()
        self.prefill, self.decode = ours.recv()

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _fake_workers(secret: bytes, step: Synchronized[float], pipe) -> None:
    async def serve() -> None:
        lanes = Lanes()
        answer = list(range(1000, 1400))
        roles = (pb.ROLE_PREFILL, pb.ROLE_DECODE)
        workers = [await FakeWorker(role, lanes, answer, secret=secret).start() for role in roles]
        pipe.send([worker.address for worker in workers])
        while True:
            workers[1].step_seconds = step.value
            for worker in workers:  # what tests look at would grow for ever
                worker.submitted.clear()
                worker.cancelled.clear()
            await asyncio.sleep(0.05)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class Load:
    """Keeps `streams` completions open through the router, from a process of its own."""

    def __init__(self, url: str, streams: int) -> None:
        self.tokens = CONTEXT.Value("L", 0)
        self._process = CONTEXT.Process(target=_load, args=(url, streams, self.tokens), daemon=True)

    def __enter__(self) -> Load:
        self._process.start()
        while not self.tokens.value:
            time.sleep(0.05)
        time.sleep(1)  # until the streams are spread over the steps
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _load(url: str, streams: int, tokens: Synchronized[int]) -> None:
    async def stream(number: int) -> None:
        async with through(url) as ask:
            for i in itertools.count():
                async for seen in ask(prompt_of(number * 100_000 + i), 100):
                    tokens.value += seen.count(b"data: {")

    async def all_of_them() -> None:
        await asyncio.gather(*map(stream, range(streams)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_them())


# ---------------------------------------------------------------- the two ways


@contextlib.asynccontextmanager
async def through(url: str) -> AsyncIterator[Callable[[list[int], int], AsyncIterator[bytes]]]:
    """A connection to a router that is kept; gives what asks for a completion and yields what is read.

    Written by hand: a whole HTTP client would cost more than the router.
    """
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[bytes]:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        sent = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)
        last = b""
        while not last.endswith(b"\r\n0\r\n\r\n"):
            seen = await reader.read(1 << 16)
            if not seen or (not last and not seen.startswith(b"HTTP/1.1 200")):
                raise RuntimeError(f"the router answered {seen[:200]!r}")
            last = last[-8:] + seen
            yield seen

    try:
        yield ask
    finally:
        writer.close()


class Direct:
    """A stream to a worker, and nothing else."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._channel = rpc.connect(address, secret)
        self._call = WorkerStub(self._channel).Attach(None)

    async def first_token(self, prompt: list[int]) -> float:
        """Seconds."""
        sampling = pb.SamplingParams(temperature=1, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        work = pb.Request(request_id=os.urandom(16), prompt_ids=prompt, sampling=sampling, timeout_ms=60_000)
        submit = pb.SubmitPrefill(prefill_id=os.urandom(16), request=work)
        began = time.perf_counter()
        await self._call.write(pb.RouterMessage(prefill=submit))
        await self._call.read()
        return time.perf_counter() - began

    async def __aenter__(self) -> Direct:
        await self._call.write(pb.RouterMessage(hello=pb.RouterHello(router_id=os.urandom(16))))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await self._channel.close(None)


def prompt_of(number: int) -> list[int]:
    """Of a session of its own."""
    return random.Random(number).choices(range(3, 40_000), k=PROMPT_TOKENS)


# ---------------------------------------------------------------- measuring


@dataclass
class Pairs:
    """Seconds to the first token."""

    routed: list[float]
    direct: list[float]

    @property
    def added(self) -> list[float]:
        """Milliseconds."""
        return [1e3 * (a - b) for a, b in zip(self.routed, self.direct, strict=True)]


async def measure_added(url: str, prefill: str, secret: bytes, pairs: int) -> Pairs:
    found = Pairs([], [])
    async with through(url) as ask, Direct(prefill, secret) as direct:

        async def routed(prompt: list[int]) -> float:
            began, first = time.perf_counter(), 0.0
            async for seen in ask(prompt, OUTPUT_TOKENS):
                if not first and b"data: {" in seen:
                    first = time.perf_counter() - began
            return first

        for i in range(WARM_UP + pairs):
            prompt = prompt_of(i)
            a, b = await routed(prompt), await direct.first_token(prompt)
            if i >= WARM_UP:
                found.routed.append(a)
                found.direct.append(b)
    return found


def tokens_per_core(pid: int, load: Load, seconds: float) -> float:
    tokens, cpu = load.tokens.value, cpu_seconds(pid)
    time.sleep(seconds)
    return (load.tokens.value - tokens) / (cpu_seconds(pid) - cpu)


def cpu_seconds(pid: int) -> float:
    """Of a process and all of its threads, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def decisions(workers: int, count: int, *, busy: float) -> list[float]:
    """Microseconds of each choice of a prefill and a decode worker, among so many of each.

    Prompts of 2,000 tokens: a system prompt that every worker has cached, 12 chunks of a session that mostly
    one has, and 11 new ones. `busy` is the share of decode workers without room.
    """
    rng = random.Random(1)
    loads = prefill_loads(workers, rng)
    system = [rng.getrandbits(64) for _ in range(8)]
    sessions = [[rng.getrandbits(64) for _ in range(12)] for _ in range(20 * workers)]
    for row in range(workers):
        loads.index.add(row, system)
    for session in sessions:
        loads.index.add(rng.randrange(workers), session)
    decodes = [
        DecodeLoad(
            f"10.1.{i // 256}.{i % 256}:7000", block_size=128, blocks_total=4_000, max_running=256,
            blocks_free=0 if rng.random() < busy else rng.randrange(400, 4_000), running=rng.randrange(200),
        )
        for i in range(workers)
    ]  # fmt: skip
    took: list[float] = []
    for i in range(count):
        key, session = rng.getrandbits(64), rng.choice(sessions)
        chunks = [*system, *session, *(rng.getrandbits(64) for _ in range(11))]
        began = time.perf_counter()
        request = PrefillRequest(key=key, tokens=2_000, chunks=chunks, arrival=i)
        snapshot = loads.snapshot(request, 0.05)
        assert snapshot is not None
        sticky(snapshot, request)
        decode = two_choices(decodes, tokens=2_150, rng=rng)
        took.append(1e6 * (time.perf_counter() - began))
        assert decode is not None
    return took


def prefill_loads(workers: int, rng: random.Random) -> PrefillLoads:
    loads = PrefillLoads()
    for i in range(workers):
        row = loads.join(f"10.0.{i // 256}.{i % 256}:7000", block_size=128, now=0)
        waiting = rng.randrange(8_000)
        loads.reported(row, tokens_waiting=waiting, tokens_per_s=rng.uniform(38_000, 42_000), now=0)
    return loads


def measure(args: argparse.Namespace, report: Report) -> None:
    for name, busy in (("", 0.2), (".full", 0.98)):
        took = decisions(1_000, 2_000, busy=busy)
        goal: dict = {} if name else {"goal": 50, "better": "lower"}
        p99 = contract.percentile(took, 0.99)
        report.add(Row(f"router.decision.w1000{name}", statistics.median(took), "µs", p99=p99, **goal))
    with Roles() as roles, contextlib.closing(FakeWorkers(roles.secret)) as workers:
        router = start_router(roles, workers)
        url, pid = router["url"], router["pid"]

        def added() -> Pairs:
            with collector_off():
                return uvloop.run(measure_added(url, workers.prefill, roles.secret, args.pairs))

        add_rows(report, "router.added", added())
        workers.step.value = LOADED_STEP_S
        with Load(url, args.streams):
            add_rows(report, f"router.added.streams{args.streams}", added(), bound=False)
        workers.step.value = SATURATED_STEP_S
        with Load(url, 4 * args.streams) as load:
            rates = [tokens_per_core(pid, load, args.seconds / 5) for _ in range(5)]
        spread = max(rates) - min(rates)
        report.add(Row("router.tokens_per_core", statistics.median(rates), "tokens/s", spread=spread))
        report.add(Row("router.cpu_per_token", 1e6 / statistics.median(rates), "µs"))


def start_router(roles: Roles, workers: FakeWorkers) -> dict:
    flags = ["--port", "0", "--worker", workers.prefill, "--worker", workers.decode]
    router = roles.start("router", *flags)
    uvloop.run(until_ready(router["url"]))
    return router


async def until_ready(url: str) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(RuntimeError):
                async with through(url) as ask:
                    async for _ in ask([1], 1):
                        pass
                    return
            await asyncio.sleep(0.1)


def add_rows(report: Report, name: str, found: Pairs, *, bound: bool = True) -> None:
    """`added` bounds the median; its p99 has a row of its own, whose bound is another."""
    p99 = contract.percentile(found.added, 0.99)
    goals: list[dict] = [{"goal": g, "better": "lower"} if bound else {} for g in (1, 3)]
    report.add(Row(f"{name}.p50", statistics.median(found.added), "ms", p99=p99, **goals[0]))
    report.add(Row(f"{name}.p99", p99, "ms", **goals[1]))
    for way, series in (("direct", found.direct), ("routed", found.routed)):
        took = [1e3 * seconds for seconds in series]
        p99 = contract.percentile(took, 0.99)
        report.add(Row(f"{name}.{way}", statistics.median(took), "ms", p99=p99))


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """The client's own pauses are not the router's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main() -> int:
    p = contract.parser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--pairs", type=int, default=2_000, help="requests each way (default: %(default)s)")
    p.add_argument("--streams", type=int, default=32, help="open at the same time (default: %(default)s)")
    p.add_argument("--seconds", type=float, default=20.0, help="of saturation (default: %(default)s)")
    args = p.parse_args()
    if args.device == "cuda":
        print("bench.router: a router uses no GPU", file=sys.stderr)
        return EXIT_CANNOT_MEASURE
    if args.short:
        args.pairs, args.seconds = 400, 5.0
    if args.pairs < 100:
        p.error("--pairs: at least 100, or there is no p99")
    parameters = {k: v for k, v in vars(args).items() if k != "json"}
    fixed = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    report = Report("router", parameters | fixed, args.json)
    measure(args, report)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
