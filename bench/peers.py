"""What other routers add to a request, beside what ours adds: interleaved, over the same mock, one load.

    python -m bench.peers --peer vllm-router=/venvs/vllm/bin/vllm-router --peer smg=/venvs/smg/bin/smg

Each peer comes from an environment of its own and stands, as its defaults have it, before two HTTP faces of
the fake workers (`bench.http_face`); ours, started as a user starts it, before the same model behind gRPC, as
one prefill and one decode worker, so that it hands over after the first token, which the others do not do.
Most peers refuse prompts of token ids, so all get as many words, for their workers to tokenize.
Ours gets token ids (`baton`: tokenization apart) and also these words (`baton.text`: with tokenization).

added        A: first event through the router, B: directly from what it has behind it (HTTP or gRPC); A − B,
             round by round, every router in each, in turns the first of them; idle but for this
requests     closed loop of `--streams` connections, answers of 2 tokens at once: requests per second, and per
             CPU second of the router, all of its threads and children
tokens       answers of 100 tokens, one every 5 ms, over four times as many connections

A ratio is ours ÷ theirs for times, and for rates too (there more is better).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

import bench.contract as contract
from bench.contract import EXIT_CANNOT_MEASURE, Report, Row
from bench.ends import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Ask,
    Direct,
    FakeWorkers,
    cpu_seconds,
    first_event,
    prompt_of,
    text_of,
    through,
)
from bench.roles import Roles
from cluster.model import EMBEDDED_NAME

PEERS = {
    "vllm-router": ["--log-level", "warning"],
    "sglang-router": ["launch", "--log-level", "warn"],
    "smg": ["launch", "--log-level", "warn"],
}
"""Their arguments beside addresses: each request logged would be no fair comparison."""
REMEDY = (
    "each comes from an environment of its own: python -m venv V; V/bin/pip install vllm-router; "
    "python -m bench.peers --peer vllm-router=V/bin/vllm-router"
)
MODEL = "fake"
LOADS = (("requests", OUTPUT_TOKENS, 1, 0.0), ("tokens", 100, 4, 0.005))
"""What is counted, tokens of an answer, times `--streams` connections, seconds between tokens."""
WARM_UP = 30
PERIODS = 5
STARTED_WITHIN_S = 60.0


@dataclass
class Contender:
    """One router, and what was measured of it."""

    name: str
    url: str
    pid: int
    direct: str
    """URL of what it is compared with, "" for gRPC."""
    prompt: Callable[[int], list[int] | str]
    model: str | None
    added: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)


# ---------------------------------------------------------------- peers


def version_of(name: str, program: Path) -> str:
    """As the environment that it is installed in knows it."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    found = subprocess.run(
        [program.parent / "python", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    return found.stdout.strip() or "unknown"


@contextlib.contextmanager
def started(name: str, program: Path, workers: list[str]) -> Iterator[Contender]:
    port, metrics_port = free_port(), free_port()
    command = [
        str(program), *PEERS[name], "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", *workers, "--prometheus-port", str(metrics_port),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        uvloop.run(until_it_answers(url, MODEL))
        yield Contender(name, url, process.pid, workers[0], text_of, MODEL)
    finally:
        process.kill()
        process.wait()


async def until_it_answers(url: str, model: str | None = None) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(STARTED_WITHIN_S):
        while True:
            with contextlib.suppress(RuntimeError, OSError):
                async with through(url, model) as ask:
                    await first_event(ask, "Hello")
                return
            await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


# ---------------------------------------------------------------- measuring


async def measure_added(contenders: list[Contender], prefill: str, secret: bytes, rounds: int) -> None:
    """Milliseconds."""
    async with contextlib.AsyncExitStack() as stack:
        over_grpc = await stack.enter_async_context(Direct(prefill, secret))
        asks = [await stack.enter_async_context(through(each.url, each.model)) for each in contenders]
        urls = {each.direct for each in contenders if each.direct}
        faces: dict[str, Ask] = {url: await stack.enter_async_context(through(url, MODEL)) for url in urls}
        for i in range(WARM_UP + rounds):
            direct = {url: await first_event(face, text_of(i)) for url, face in faces.items()}
            direct[""] = await over_grpc.first_token(prompt_of(i))
            turns = list(enumerate(zip(contenders, asks, strict=True)))
            shift = i % len(turns)
            for number, (each, ask) in turns[shift:] + turns[:shift]:  # who comes first finds caches cold
                # Of a session of its own: nobody has seen it.
                took = await first_event(ask, each.prompt(i * len(contenders) + number))
                if i >= WARM_UP:
                    each.first.append(1e3 * took)
                    each.added.append(1e3 * (took - direct[each.direct]))


async def measure_rate(each: Contender, streams: int, seconds: float, max_tokens: int) -> tuple[float, float]:
    """Answers per second, and per CPU second of the router."""
    ends, answers = time.perf_counter() + seconds, 0

    async def one_after_another(numbers: Iterator[int]) -> None:
        nonlocal answers
        async with through(each.url, each.model) as ask:
            while time.perf_counter() < ends:
                await first_event(ask, each.prompt(next(numbers)), max_tokens)
                answers += 1

    numbers = itertools.count(int(time.time() * 1000) % 1_000_000_000)
    began, cpu = time.perf_counter(), cpu_seconds(each.pid)
    await asyncio.gather(*(one_after_another(numbers) for _ in range(streams)))
    return answers / (time.perf_counter() - began), answers / (cpu_seconds(each.pid) - cpu)


def measure(args: argparse.Namespace, report: Report) -> None:
    with contextlib.ExitStack() as stack:
        roles = stack.enter_context(Roles())
        workers = stack.enter_context(contextlib.closing(FakeWorkers(roles.secret, faces=2)))
        addresses = ("--worker", workers.prefill, "--worker", workers.decode)
        ours = roles.start("router", "--model", EMBEDDED_NAME, "--port", "0", *addresses)
        contenders = [
            Contender("baton", ours["url"], ours["pid"], "", prompt_of, None),
            Contender("baton.text", ours["url"], ours["pid"], "", text_of, None),
            *(stack.enter_context(started(name, at, workers.urls)) for name, at in args.peer),
        ]
        uvloop.run(until_it_answers(ours["url"]))
        gc.disable()  # the client's own pauses are nobody's
        uvloop.run(measure_added(contenders, workers.prefill, roles.secret, args.rounds))
        for what, max_tokens, streams, step in LOADS:
            workers.step.value = step
            for _ in range(PERIODS):
                for each in contenders:
                    load = measure_rate(each, streams * args.streams, args.seconds, max_tokens)
                    for unit, rate in zip(("per_s", "per_core"), uvloop.run(load), strict=True):
                        count = rate * (max_tokens if what == "tokens" else 1)
                        each.rates.setdefault(f"{what}_{unit}", []).append(count)
    add_rows(report, contenders)


def add_rows(report: Report, contenders: list[Contender]) -> None:
    ours = contenders[0]

    def add(name: str, each: Contender, mine: float, theirs: float, unit: str, **more: float) -> None:
        beside = {} if each is ours else {"ratio": mine / theirs, "ratio_to": each.name}
        report.add(Row(f"peers.{each.name}.{name}", theirs, unit, **more, **beside))  # pyrefly: ignore

    for each in contenders:
        for name, q in (("p50", 0.5), ("p99", 0.99)):
            mine, theirs = contract.percentile(ours.added, q), contract.percentile(each.added, q)
            add(f"added.{name}", each, mine, theirs, "ms")
        first = contract.percentile(each.first, 0.99)
        add("ttft", each, statistics.median(ours.first), statistics.median(each.first), "ms", p99=first)
        for name, series in each.rates.items():
            ratio, spread = contract.paired_ratio(ours.rates[name], series)
            add(
                name, each, ratio * statistics.median(series), statistics.median(series), "1/s", spread=spread
            )


def peer(given: str) -> tuple[str, Path]:
    name, _, program = given.partition("=")
    if name not in PEERS:
        raise argparse.ArgumentTypeError(f"{name!r} is not known, only {', '.join(PEERS)}: NAME=PROGRAM")
    return name, Path(program)


def main() -> int:
    p = contract.parser(__doc__ or "", devices=("cpu",))
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PROGRAM",
                   help=f"one of {', '.join(PEERS)}, and where it is; may be repeated")  # fmt: skip
    p.add_argument("--rounds", type=int, default=1_000, help="requests through each (default: %(default)s)")
    p.add_argument("--streams", type=int, default=32, help="connections of a load (default: %(default)s)")
    p.add_argument("--seconds", type=float, default=1.0, help="of a load, five times (default: %(default)s)")
    args = p.parse_args()
    if args.short:
        args.rounds, args.seconds = 300, 0.4
    missing = [f"{name} ({at})" for name, at in args.peer if not (at.is_file() and os.access(at, os.X_OK))]
    if missing or not args.peer:
        wrong = f"no such program: {', '.join(missing)}" if missing else "no peer is given"
        example = (
            "python -m venv V && V/bin/pip install vllm-router, then --peer vllm-router=V/bin/vllm-router"
        )
        print(f"bench.peers: {wrong}. Each needs an environment of its own: {example}", file=sys.stderr)
        return EXIT_CANNOT_MEASURE
    settings = {name: f"{version_of(name, at)} {' '.join(PEERS[name])}" for name, at in args.peer}
    parameters = {k: v for k, v in vars(args).items() if k not in ("json", "peer")} | {"peers": settings}
    fixed = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    report = Report("peers", parameters | fixed, args.json)
    measure(args, report)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
