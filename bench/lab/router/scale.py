"""Many streams, many workers, and a large index, on the router processes of one machine.

streams  keeps thousands of streams open for minutes. A stream that ends is replaced. `lost` are streams that
         ended early, or with another number of tokens than they asked for.
workers  lets fake workers join, report, a quarter of them fail and come back, and half of them leave.
         `loop` is the CPU time of the event loop, less that of this client's looks at the metrics
         (`loop_looks`). It has what an idle router takes in that time (`loop_idle`).
memory   fills the index with reports, for one router process and for several. Memory is PSS: what several
         processes share counts once.

A stall is a late timer of the router's own event loop (`baton:event_loop_lag_seconds`), so a pause of this
client is none. The client and the fake workers have a lower priority than the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import re
import secrets
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Self, cast
from urllib.parse import urlsplit

import grpc.aio
import psutil
import uvloop

from baton.bench.lab.driver import Bench, Option, Run
from baton.bench.lab.harness.cluster import LocalCluster
from baton.bench.lab.harness.workers import metric, metrics_of
from baton.bench.lab.router.ends import (
    END,
    EVENT,
    FORK,
    REQUEST_HEAD,
    child,
    cpu_seconds,
    fakes,
    prompt_of,
    to,
)
from baton.bench.lab.router.stand_in import Lanes, Outputs, StandIn
from baton.bench.report import Row
from baton.cluster.model import EMBEDDED_NAME
from baton.kv_names import HINT_BITS
from baton.rpc import worker_pb2 as pb
from baton.rpc.tls import TlsFiles

STALL_S = 0.05
SEATS = 256
"""Of a fake decode worker, as of a real one."""
SPARE = 1.25
"""Seats for each stream."""
OPENED_PER_S = 400
START_S = 120.0
REPORT_S, REPORTS_S = 1.0, 20.0
"""Between two reports of a worker, and in which reports are measured."""
PAUSE_S = 0.25
"""Between two looks at the metrics, which take the router some ten milliseconds. They are counted apart."""
LOOKS, IDLE_S = 8, 2.0
"""Looks that measure what one costs, and seconds that measure an idle router."""
PARTS, FIRST_PORT = 4, 21_000
HOLDERS, REPORTED = 8, 4096
"""Workers with chunks, and chunks of one message."""
_LIVE, _DONE, _LOST, _TOKENS, _OWN_STALL_US = range(5)

NICE = 10
"""Of the client and of the fake workers."""
reporting = FORK.Value("b", False)
"""Whether workers report their status."""


class Large(StandIn):
    """A stand-in with seats for hundreds of requests, and with chunks and a status to report."""

    def __init__(self, pool: pb.Pool, lanes: Lanes, *, secret: str, chunks: int = 0) -> None:
        super().__init__(pool, lanes, list(range(1000, 1400)), secret=secret.encode())
        self.status.blocks_free = self.status.blocks_total = 1 << 20
        self._chunks = [random.getrandbits(HINT_BITS) for _ in range(chunks)]

    async def start(self, port: int = 0, tls: TlsFiles | None = None) -> Self:
        self._reports = asyncio.create_task(self._report())
        return await super().start(port, tls)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            for outputs in self.outputs if reporting.value else ():
                outputs.put_nowait(pb.WorkerMessage(status=self.status))

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        described = await super().Describe(request, context)
        described.max_num_seqs, described.num_blocks, described.max_model_len = SEATS, 1 << 20, 1 << 16
        return described

    def _take(self, message: pb.RouterMessage, outputs: Outputs) -> None:
        super()._take(message, outputs)
        for begin in range(0, len(self._chunks), REPORTED) if message.hello.cache else ():
            added = self._chunks[begin : begin + REPORTED]
            events = pb.CacheEvents(reset=not begin, added=added)
            outputs.put_nowait(pb.WorkerMessage(cache=events))


@contextlib.contextmanager
def router(secret: str, processes: int, *flags: str) -> Iterator[tuple[LocalCluster, str, int]]:
    """Yields the cluster, the URL of the metrics, and the pid."""
    several = ["--router-processes", str(processes)] if processes > 1 else []
    router_flags = [*flags, *several, "--max-wait", "86400"]
    with (
        tempfile.TemporaryDirectory() as name,
        LocalCluster(Path(name), prefill=0, decode=0, secret=secret, router_flags=router_flags) as cluster,
    ):
        report = cluster.report("router")
        yield cluster, report.get("admin_url") or cluster.url, report["pid"]


def processes_of(pid: int) -> list[int]:
    """The router's processes that serve, and their supervisor. Others are for large bodies."""
    top = psutil.Process(pid)
    titles = ((each.pid, " ".join(each.cmdline()).strip()) for each in (top, *top.children(recursive=True)))
    return [pid for pid, title in titles if re.search(r": router [\d.]+$", title)]


def memory(pid: int) -> float:
    """MiB of the router with all its processes."""
    every = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    pages = (Path(f"/proc/{each}/smaps_rollup").read_text().splitlines() for each in every)
    return sum(int(line.split()[1]) for page in pages for line in page if line.startswith("Pss:")) / 1024


def loop_seconds(pid: int) -> float:
    """CPU time of the first threads, which have the event loops."""
    pages = [Path(f"/proc/{each}/schedstat").read_text() for each in processes_of(pid)]
    return sum(int(page.split()[0]) for page in pages) / 1e9


def until(done: Callable[[], bool], event: str) -> float:
    """Waits. Returns the seconds."""
    began = time.perf_counter()
    while not done():
        if time.perf_counter() - began > START_S:
            raise TimeoutError(f"waited {START_S:g} s for {event}")
        time.sleep(PAUSE_S)
    return time.perf_counter() - began


def lags(url: str) -> dict[str, Counter[float]]:
    """How late the timers were, and how late without the wait for a CPU (`own_`)."""
    names = {kind: f"baton:event_loop_{kind}lag_seconds_bucket" for kind in ("", "own_")}
    page = metrics_of(url, *names.values())
    return {
        kind: Counter({float(each.labels["le"]): int(each.value) for each in page if each.name == name})
        for kind, name in names.items()
    }


def add_stalls(run: Run, name: str, url: str, before: dict[str, Counter[float]]) -> None:
    """Adds the stalls over `STALL_S` since then, and what the longest one took at most."""
    for kind, since in lags(url).items():
        since.subtract(before[kind])
        longest = min(le for le, count in since.items() if count == since[math.inf])
        over = since[math.inf] - since[STALL_S]
        run.add(Row(f"{name}.{kind}stalls_over_50ms", over, "stalls", goal=0))
        run.add(Row(f"{name}.longest_{kind}stall_at_most", 1e3 * longest, "ms", goal=1e3 * STALL_S))


# ---------------------------------------------------------------- streams


class Reader(asyncio.Protocol):
    """One stream. Counts its tokens."""

    def __init__(self, tokens: int, body: bytes, sums: SynchronizedArray[int], why: Counter[str]) -> None:
        self._want, self._body, self._sums, self._why = tokens, body, sums, why
        self._count, self._tail, self._ended = 0, b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(REQUEST_HEAD % len(self._body) + self._body)
        self._sums[_LIVE] += 1

    def data_received(self, data: bytes) -> None:
        before, self._tail = self._tail[1 - len(EVENT) :], (self._tail + data)[-300:]
        count = (before + data).count(EVENT)
        self._count += count
        self._sums[_TOKENS] += count
        if self._tail.endswith(END):
            self._end(
                "" if self._count == self._want else f"{self._count} of {self._want} tokens: {self._tail!r}"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"closed after {self._count} tokens ({exc}): {self._tail!r}")

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            self._transport.close()
            self._sums[_LIVE] -= 1
            self._sums[_LOST if why else _DONE] += 1
            self._why += Counter([why] if why else ())


async def load(url: str, streams: int, tokens: int, sums: SynchronizedArray[int], pipe: Connection) -> None:
    """Keeps `streams` open until the pipe has something. Then sends why streams were lost."""
    address, why, numbers = urlsplit(url), Counter[str](), itertools.count()
    loop = asyncio.get_running_loop()
    while not pipe.poll():
        due = loop.time() + 0.01
        await asyncio.sleep(0.01)
        sums[_OWN_STALL_US] = max(sums[_OWN_STALL_US], int(1e6 * (loop.time() - due)))
        for _ in range(min(OPENED_PER_S // 100, streams - sums[_LIVE])):
            number = next(numbers)
            want = tokens // 2 + number * 7919 % tokens
            body = {"max_tokens": want, "ignore_eos": True, "stream": True, "timeout": 3600}
            sent = json.dumps(body | {"prompt": prompt_of(number)}).encode()
            reader = Reader(want, sent, sums, why)
            try:
                await loop.create_connection(
                    lambda reader=reader: reader, address.hostname or "", address.port or 0
                )
            except OSError as error:
                sums[_LOST] += 1
                why[str(error)] += 1
    pipe.send(why.most_common(5))


def measure_streams(run: Run) -> None:
    args = run.args
    secret, sums = secrets.token_hex(16), FORK.Array("q", 5, lock=False)
    name, decodes = f"router.streams{args.streams}", -(-int(SPARE * args.streams) // SEATS)
    prefills = max(1, args.workers // 2)
    decodes = max(decodes, args.workers - prefills)
    reporting.value = bool(args.workers)
    new, step = partial(Large, secret=secret), FORK.Value("d", args.step)
    with (
        fakes(new, [0] * (prefills + decodes), prefills, step, nice=NICE) as workers,
        router(secret, args.processes, *to(workers)) as (cluster, admin, pid),
    ):
        base = memory(pid)
        with child(
            lambda p: uvloop.run(load(cluster.url, args.streams, args.tokens, sums, p)), nice=NICE
        ) as pipe:
            until(lambda: sums[_LIVE] >= args.streams, "the streams")
            time.sleep(2 * args.step)
            sums[_OWN_STALL_US] = 0
            before, tokens, began, cpu = lags(admin), sums[_TOKENS], time.perf_counter(), cpu_seconds(pid)
            loop = loop_seconds(pid)
            time.sleep(args.seconds)
            passed, tokens, cpu = time.perf_counter() - began, sums[_TOKENS] - tokens, cpu_seconds(pid) - cpu
            loop = loop_seconds(pid) - loop
            add_stalls(run, name, admin, before)
            memory_kib = memory(pid) - base
            pipe.send(None)
            run.detail["lost"] = pipe.recv()
    run.add(Row(f"{name}.lost", sums[_LOST], "streams", goal=0))
    run.add(Row(f"{name}.done", sums[_DONE], "streams"))
    run.add(Row(f"{name}.tokens_per_s", tokens / passed, "tokens/s"))
    run.add(Row(f"{name}.cpu_per_token", 1e6 * cpu / tokens, "µs"))
    run.add(Row(f"{name}.loop", loop / passed / args.processes, "of a core"))
    run.add(Row(f"{name}.memory", 1024 * memory_kib / args.streams, "KiB/stream"))
    run.add(Row(f"{name}.longest_stall_of_client", sums[_OWN_STALL_US] / 1e3, "ms"))
    for why, count in run.detail["lost"]:
        print(f"lost {count}: {why}", file=sys.stderr)


# ---------------------------------------------------------------- workers


def measure_workers(run: Run) -> None:
    """Each of several processes serves a part of the workers."""
    args, secret, step = run.args, secrets.token_hex(16), FORK.Value("d", 0.0)
    new, ports = partial(Large, secret=secret), range(FIRST_PORT, FIRST_PORT + args.workers)
    parts = [ports[begin::PARTS] for begin in range(PARTS)]
    start = [partial(fakes, new, part, len(part) // 2, step, nice=NICE) for part in parts]
    with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile("w") as file:
        failing = stack.enter_context(contextlib.ExitStack())
        for exits, part in zip((failing, *[stack] * (PARTS - 1)), start, strict=True):
            exits.enter_context(part())
        serving = router(secret, args.processes, "--workers-file", file.name, "--model", EMBEDDED_NAME)
        _, url, pid = stack.enter_context(serving)
        looked = [0]

        def ready() -> int:
            looked[0] += 1
            return int(metric(url, "baton:workers", state="ready"))

        def list_workers(listed: Sequence[int]) -> None:
            Path(file.name).write_text("".join(f"127.0.0.1:{port}\n" for port in listed))

        def phase(name: str, change: Callable[[], object], count: int) -> None:
            before, cpu, loop, looks = lags(url), cpu_seconds(pid), loop_seconds(pid), looked[0]
            change()
            seconds = until(lambda: ready() == count, f"{count} workers: {name}")
            name = f"router.workers{args.workers}.{name}"
            loop, looks, cpu = loop_seconds(pid) - loop, looked[0] - looks, cpu_seconds(pid) - cpu
            add_stalls(run, name, url, before)
            idle, began = loop_seconds(pid), time.perf_counter()
            time.sleep(IDLE_S)
            idle = (loop_seconds(pid) - idle) / (time.perf_counter() - began)
            of_look, began = loop_seconds(pid), time.perf_counter()
            for _ in range(LOOKS):
                ready()
            of_look = (loop_seconds(pid) - of_look - idle * (time.perf_counter() - began)) / LOOKS
            busy = loop - looks * of_look
            run.add(Row(f"{name}.known", seconds, "s"))
            run.add(Row(f"{name}.cpu", cpu, "s"))
            run.add(Row(f"{name}.loop", busy / args.processes, "s", goal=0.5))
            run.add(Row(f"{name}.loop_idle", idle * seconds / args.processes, "s"))
            run.add(Row(f"{name}.loop_looks", looks * of_look / args.processes, "s"))

        def join() -> None:
            """Each process joins all workers. For several at once the two cores would be too slow."""
            for end in range(1, args.processes):
                joined = ports[: len(ports) * end // args.processes]
                list_workers(joined)
                until(lambda part=joined: ready() == len(part), "a part of the workers")
            list_workers(ports)

        phase("join", join, len(ports))
        reporting.value = True
        time.sleep(REPORTS_S / 2)
        cpu = cpu_seconds(pid)
        time.sleep(REPORTS_S)
        run.add(Row(f"router.workers{args.workers}.reports", (cpu_seconds(pid) - cpu) / REPORTS_S, "cores"))
        reporting.value = False
        phase("fail", failing.close, len(ports) - len(parts[0]))
        phase("recover", lambda: failing.enter_context(start[0]()), len(ports))
        phase("leave", lambda: list_workers(ports[::2]), len(ports[::2]))


# ---------------------------------------------------------------- memory


def measure_memory(run: Run) -> None:
    args = run.args
    secret, mib, step = secrets.token_hex(16), [], FORK.Value("d", 0.0)
    new = partial(Large, secret=secret, chunks=args.chunks // HOLDERS)
    for processes in (1, args.processes):
        with (
            fakes(new, [0] * HOLDERS, 2, step, nice=NICE) as workers,
            router(secret, processes, *to(workers)) as (_, _, pid),
        ):
            used = [-1.0]

            def idle(pid: int = pid, used: list[float] = used) -> bool:
                """Whether the router applies no more reports."""
                time.sleep(1)
                used.append(cpu_seconds(pid))
                return used[-1] - used[-2] < 0.1

            until(idle, "the reports")
            mib.append(memory(pid))
    name, ratio = f"router.memory.chunks{args.chunks}.processes", mib[1] / mib[0]
    run.add(Row(f"{name}1", mib[0], "MiB"))
    run.add(Row(f"{name}{args.processes}", mib[1], "MiB", ratio=ratio, ratio_to="processes1"))


MEASURES = {"streams": measure_streams, "workers": measure_workers, "memory": measure_memory}


def check(args: Namespace) -> None:
    args.workers = args.workers or (1_000 if args.what == "workers" else 0)
    args.processes = args.processes or {"workers": 1, "streams": 2, "memory": 4}[args.what]


BENCH = Bench(
    "router.scale",
    lambda run: MEASURES[run.args.what](run),
    __doc__,
    options=(
        Option("what", choices=MEASURES),
        Option("--streams", "open at the same time", 10_000, short=1_000),
        Option("--step", "seconds of a token", 1.0),
        Option("--tokens", "of a stream, on average", 300),
        Option("--seconds", "with all streams", 300.0, short=10.0),
        Option(
            "--workers",
            "that join, or report beside the streams (default: workers 1,000, streams as few as need be)",
            type=int,
        ),
        Option("--chunks", "in the index", 500_000),
        Option("--processes", "of the router (default: workers 1, streams 2, memory 4)", type=int),
    ),
    devices=("cpu",),
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
