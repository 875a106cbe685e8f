"""Many streams, many workers, and a large index, on the router processes of one machine.

streams  keeps thousands of streams open for minutes. Each stream that ends is replaced by another one. `lost`
         counts streams that ended early, or with another number of tokens than they asked for.
workers  lets fake workers join, a quarter of them fail and come back, and half of them leave.
memory   fills the index with the reports of fake workers, for one router process and for several. Memory is
         PSS: what several processes share counts once.

A stall is a late timer of the router's own event loop (`baton:event_loop_lag_seconds`), so a pause of this
client is none. The client and the fake workers have a lower priority than the router.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import secrets
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import grpc.aio
import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families

import baton.bench.contract as contract
from baton.bench.chaos.cluster import LocalCluster
from baton.bench.contract import Report, Row
from baton.bench.router.ends import REQUEST_HEAD, cpu_seconds, prompt_of
from baton.bench.router.stand_in import Lanes, Outputs, StandIn
from baton.cluster.model import EMBEDDED_NAME
from baton.rpc import worker_pb2 as pb

STALL_S = 0.05
SEATS = 256
"""Of a fake decode worker, as of a real one."""
SPARE = 1.25
"""Seats for each stream."""
OPENED_PER_S = 400
START_S = 60.0
PAUSE_S = 0.25
"""Between two looks at the metrics, which take the router some ten milliseconds."""
FAKE_PROCESSES = 4
FIRST_PORT = 21_000
HOLDERS = 8
"""Workers with chunks."""
REPORTED = 4096
"""Chunks of one message."""
_END, _EVENT = b"\r\n0\r\n\r\n", b"data: {"
_LIVE, _DONE, _LOST, _TOKENS, _OWN_STALL_US = range(5)

# Children share the imports of this process. It has no thread and no gRPC channel when it forks.
FORK = multiprocessing.get_context("fork")


class Large(StandIn):
    """A stand-in with seats for hundreds of requests, and with chunks to report."""

    chunks: Sequence[int] = ()

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        described = await super().Describe(request, context)
        described.max_num_seqs, described.num_blocks, described.max_model_len = SEATS, 1 << 20, 1 << 16
        return described

    def _take(self, message: pb.RouterMessage, outputs: Outputs) -> None:
        super()._take(message, outputs)
        if not message.HasField("cache_resync"):
            return
        for begin in range(0, len(self.chunks), REPORTED):
            added = self.chunks[begin : begin + REPORTED]
            events = pb.CacheEvents(sequence=1, reset=not begin, added=added)
            outputs.put_nowait(pb.WorkerMessage(cache=events))


@contextlib.contextmanager
def child(target: Callable[..., None], *args: object) -> Iterator[multiprocessing.process.BaseProcess]:
    process = FORK.Process(target=_run, args=(target, *args), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _run(target: Callable[..., None], *args: object) -> None:
    gc.disable()
    os.nice(10)
    target(*args)


def fakes(secret: bytes, ports: list[int], prefills: int, step: float, chunks: int, pipe: Connection) -> None:
    """Serves a fake worker at each port. The first ones prefill. Each reports so many chunks."""

    async def serve() -> None:
        lanes, output_ids, rng = Lanes(), list(range(1000, 1400)), random.Random(ports[0])
        addresses = []
        for i, port in enumerate(ports):
            role = pb.POOL_PREFILL if i < prefills else pb.POOL_DECODE
            worker = Large(role, lanes, output_ids, secret=secret)
            worker.status.blocks_free = worker.status.blocks_total = 1 << 20
            worker.step_seconds = step if role == pb.POOL_DECODE else 0.0
            worker.chunks = [rng.getrandbits(64) for _ in range(chunks)]
            addresses.append((await worker.start(port)).address)
        pipe.send(addresses)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


# ---------------------------------------------------------------- streams


class Reader(asyncio.Protocol):
    """One stream. Counts its tokens."""

    def __init__(self, tokens: int, body: bytes, seen: SynchronizedArray[int], why: Counter[str]) -> None:
        self._want, self._body, self._seen, self._why = tokens, body, seen, why
        self._got, self._tail, self._ended = 0, b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(REQUEST_HEAD % len(self._body) + self._body)
        self._seen[_LIVE] += 1

    def data_received(self, data: bytes) -> None:
        before, self._tail = self._tail[1 - len(_EVENT) :], (self._tail + data)[-300:]
        count = (before + data).count(_EVENT)
        self._got += count
        self._seen[_TOKENS] += count
        if self._tail.endswith(_END):
            self._end(
                "" if self._got == self._want else f"{self._got} of {self._want} tokens: {self._tail!r}"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"closed after {self._got} tokens ({exc}): {self._tail!r}")

    def _end(self, why: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._transport.close()
        self._seen[_LIVE] -= 1
        self._seen[_LOST if why else _DONE] += 1
        if why:
            self._why[why] += 1


def load(url: str, streams: int, tokens: int, seen: SynchronizedArray[int], pipe: Connection) -> None:
    """Keeps `streams` open until the pipe has something. Then sends why streams were lost."""
    where, why = urlsplit(url), Counter[str]()

    async def open_one(number: int) -> None:
        want = tokens // 2 + number * 7919 % tokens
        body = {
            "prompt": prompt_of(number),
            "max_tokens": want,
            "ignore_eos": True,
            "stream": True,
            "timeout": 3600,
        }
        sent = json.dumps(body).encode()
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: Reader(want, sent, seen, why), where.hostname or "", where.port or 0
            )
        except OSError as error:
            seen[_LOST] += 1
            why[str(error)] += 1

    async def keep() -> None:
        loop, numbers = asyncio.get_running_loop(), itertools.count()
        while not pipe.poll():
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            seen[_OWN_STALL_US] = max(seen[_OWN_STALL_US], int(1e6 * (loop.time() - due)))
            for _ in range(min(OPENED_PER_S // 100, streams - seen[_LIVE])):
                await open_one(next(numbers))
        pipe.send(why.most_common(5))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(keep())


def measure_streams(args: argparse.Namespace, report: Report) -> None:
    secret, (ours, theirs), (told, tells) = secrets.token_hex(16), FORK.Pipe(), FORK.Pipe()
    decodes = -(-int(SPARE * args.streams) // SEATS)
    seen = FORK.Array("q", 5, lock=False)
    with child(fakes, secret.encode(), [0] * (1 + decodes), 1, args.step, 0, theirs):
        flags = [flag for address in ours.recv() for flag in ("--worker", address)]
        with router(secret, args.processes, *flags) as (cluster, admin):
            pids = router_processes(cluster)
            base = pss(pids)
            with child(load, cluster.url, args.streams, args.tokens, seen, tells):
                until(
                    lambda: seen[_LIVE] >= args.streams,
                    START_S + 4 * args.streams / OPENED_PER_S,
                    "the streams",
                )
                time.sleep(2 * args.step)
                seen[_OWN_STALL_US] = 0
                lags, tokens = Lags(admin), seen[_TOKENS]
                began, cpu = time.perf_counter(), cpu_seconds(cluster.report("router")["pid"])
                time.sleep(args.seconds)
                passed = time.perf_counter() - began
                cpu = cpu_seconds(cluster.report("router")["pid"]) - cpu
                tokens, memory, late = seen[_TOKENS] - tokens, pss(router_processes(cluster)), lags.since()
                told.send(None)
                report.detail["lost"] = told.recv()
    add = report.add
    name = f"router.streams{args.streams}"
    add(Row(f"{name}.lost", seen[_LOST], "streams", goal=0))
    add(Row(f"{name}.done", seen[_DONE], "streams"))
    add(Row(f"{name}.tokens_per_s", tokens / passed, "tokens/s"))
    add(Row(f"{name}.cpu_per_token", 1e6 * cpu / tokens, "µs"))
    add(Row(f"{name}.memory", (memory - base) / args.streams, "KiB/stream"))
    add(Row(f"{name}.stalls_over_50ms", late[0], "stalls", goal=0))
    add(Row(f"{name}.longest_stall_at_most", late[1], "ms", goal=50))
    add(Row(f"{name}.longest_stall_of_client", seen[_OWN_STALL_US] / 1e3, "ms"))
    for why, count in report.detail["lost"]:
        print(f"lost {count}: {why}", file=sys.stderr)


# ---------------------------------------------------------------- workers


def measure_workers(args: argparse.Namespace, report: Report) -> None:
    """Each of several processes serves a part of the workers."""
    secret = secrets.token_hex(16)
    ports = range(FIRST_PORT, FIRST_PORT + args.workers)
    parts = [list(ports[begin::FAKE_PROCESSES]) for begin in range(FAKE_PROCESSES)]

    @contextlib.contextmanager
    def serve(part: list[int]) -> Iterator[None]:
        ours, theirs = FORK.Pipe()
        with child(fakes, secret.encode(), part, len(part) // 2, 0.0, 0, theirs):
            ours.recv()
            yield

    with contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile("w") as file:

        def list_workers(listed: Sequence[int]) -> None:
            Path(file.name).write_text("".join(f"127.0.0.1:{port}\n" for port in listed))

        list_workers(())
        flags = ["--workers-file", file.name, "--model", EMBEDDED_NAME]
        failing = contextlib.ExitStack()
        stack.callback(failing.close)
        failing.enter_context(serve(parts[0]))
        for part in parts[1:]:
            stack.enter_context(serve(part))
        cluster, admin = stack.enter_context(router(secret, 1, *flags))

        def phase(name: str, change: Callable[[], object], ready: int) -> None:
            pid = cluster.report("router")["pid"]
            lags, cpu, loop = Lags(admin), cpu_seconds(pid), loop_seconds(pid)
            change()
            took = until(lambda: ready_workers(admin) == ready, 2 * START_S, f"{ready} workers, {name}")
            cpu, loop = cpu_seconds(pid) - cpu, loop_seconds(pid) - loop
            name = f"router.workers{args.workers}.{name}"
            report.add(Row(f"{name}.known", took, "s"))
            report.add(Row(f"{name}.cpu", cpu, "s"))
            report.add(Row(f"{name}.loop", loop, "s", goal=0.5))
            report.add(Row(f"{name}.longest_stall_at_most", lags.since()[1], "ms", goal=1e3 * STALL_S))

        phase("join", lambda: list_workers(ports), len(ports))
        phase("fail", failing.close, len(ports) - len(parts[0]))
        phase("recover", lambda: failing.enter_context(serve(parts[0])), len(ports))
        phase("leave", lambda: list_workers(ports[::2]), len(ports[::2]))


def loop_seconds(pid: int) -> float:
    """CPU time of the first thread, which has the event loop."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def ready_workers(url: str) -> int:
    return int(sum(v for _, labels, v in samples(url, "baton:workers") if labels["state"] == "ready"))


# ---------------------------------------------------------------- memory


def measure_memory(args: argparse.Namespace, report: Report) -> None:
    found: list[float] = []
    secret, (ours, theirs) = secrets.token_hex(16), FORK.Pipe()
    for processes in (1, args.processes):
        with child(fakes, secret.encode(), [0] * HOLDERS, 2, 0.0, args.chunks // HOLDERS, theirs):
            flags = [flag for address in ours.recv() for flag in ("--worker", address)]
            with router(secret, processes, *flags) as (cluster, _):
                pid, before = cluster.report("router")["pid"], [-1.0]

                def idle(pid: int = pid, before: list[float] = before) -> bool:
                    """Whether the router applies no more reports."""
                    time.sleep(1)
                    before.append(cpu_seconds(pid))
                    return before[-1] - before[-2] < 0.1

                until(idle, START_S, "the reports")
                found.append(pss(router_processes(cluster)) / 1024)
    name = f"router.memory.chunks{args.chunks}"
    report.add(Row(f"{name}.processes1", found[0], "MiB"))
    report.add(
        Row(
            f"{name}.processes{args.processes}", found[1], "MiB",
            ratio=found[1] / found[0], ratio_to="processes1", goal=1.5,
        )
    )  # fmt: skip


# ---------------------------------------------------------------- a router under test


@contextlib.contextmanager
def router(secret: str, processes: int, *flags: str) -> Iterator[tuple[LocalCluster, str]]:
    """Yields the cluster, and the URL of its metrics."""
    several = ["--router-processes", str(processes), "--admin-port", "0"] if processes > 1 else []
    with (
        tempfile.TemporaryDirectory() as name,
        LocalCluster(
            Path(name), prefill=0, decode=0, secret=secret,
            router_flags=[*flags, *several, "--max-waiting-tokens", "100000000"],
        ) as cluster,
    ):  # fmt: skip
        yield cluster, cluster.report("router").get("admin_url") or cluster.url


def router_processes(cluster: LocalCluster) -> list[int]:
    """The supervisor, if there is one, and the processes that serve. Their children are for large bodies."""
    top = psutil.Process(cluster.report("router")["pid"])
    titled = ((each.pid, " ".join(each.cmdline()).strip()) for each in (top, *top.children(recursive=True)))
    return [pid for pid, title in titled if re.search(r": router [\d.]+$", title)]


def pss(pids: list[int]) -> int:
    """KiB of memory."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def until(done: Callable[[], bool], seconds: float, what: str) -> float:
    """Waits. Returns the seconds."""
    began = time.perf_counter()
    while not done():
        if time.perf_counter() - began > seconds:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(PAUSE_S)
    return time.perf_counter() - began


def samples(url: str, family: str) -> list[tuple[str, dict[str, str], float]]:
    page = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    found = (each for each in text_string_to_metric_families(page) if each.name == family)
    return [(sample.name, sample.labels, sample.value) for each in found for sample in each.samples]


class Lags:
    """The late timers of the router's event loops since this was made."""

    def __init__(self, url: str) -> None:
        self._url, self._before = url, _lags(url)

    def since(self) -> tuple[int, float]:
        """Stalls over `STALL_S`, and the milliseconds that the longest one took at most."""
        now = _lags(self._url)
        now.subtract(self._before)
        longest = min(le for le, count in now.items() if count == now[math.inf])
        return now[math.inf] - now[STALL_S], 1e3 * longest


def _lags(url: str) -> Counter[float]:
    found = samples(url, "baton:event_loop_lag_seconds")
    return Counter({float(labels["le"]): int(value) for _, labels, value in found if "le" in labels})


def main() -> int:
    p = contract.parser(__doc__ or "", devices=("cpu",))
    p.add_argument("what", choices=("streams", "workers", "memory"))
    p.add_argument("--streams", type=int, default=10_000, help="open at the same time (default: %(default)s)")
    p.add_argument(
        "--step", type=float, default=1.0, help="seconds between tokens of a stream (default: %(default)s)"
    )
    p.add_argument("--tokens", type=int, default=300, help="of a stream, on average (default: %(default)s)")
    p.add_argument(
        "--seconds", type=float, default=300.0, help="with all streams open (default: %(default)s)"
    )
    p.add_argument("--workers", type=int, default=1_000, help="that join (default: %(default)s)")
    p.add_argument("--chunks", type=int, default=500_000, help="in the index (default: %(default)s)")
    p.add_argument("--processes", type=int, help="of the router (default: 2, and 4 to measure memory)")
    args = p.parse_args()
    if args.short:
        args.streams, args.seconds = args.streams // 10, 10.0
    args.processes = args.processes or (4 if args.what == "memory" else 2)
    report = Report.of("router.scale", args)
    {"streams": measure_streams, "workers": measure_workers, "memory": measure_memory}[args.what](
        args, report
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
