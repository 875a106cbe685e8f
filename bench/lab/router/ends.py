"""Both sides of the router under test: fake workers and load in processes of their own, and clients.

The clients write HTTP by hand. A complete HTTP client would use more CPU time than the router. `_watch` sees
the longest stall of the router's event loop: a child process asks for /health again and again over one
connection. The event loop itself answers, so the longest answer takes as long as the longest stall, plus the
delays of the machine's scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from urllib.parse import urlsplit

import psutil
import uvloop

from baton.bench.lab.harness import processes
from baton.bench.lab.router.stand_in import Lanes, StandIn
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.rpc.token_ids import packed_ids

PROMPT_TOKENS = 200
OUTPUT_TOKENS = 2  # the fewest with a handover
SPREAD_S = 1.0
"""After this time the streams of a load are spread evenly over the steps."""
REQUEST_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
EVENT, END = b"data: {", b"\r\n0\r\n\r\n"
"""Each event of an answer has the first once, and the last chunk ends with the second."""
FORK = multiprocessing.get_context("fork")
"""Children share the imports of this process. Its own threads and gRPC channels are not used there."""


# ---------------------------------------------------------------- other processes


@contextlib.contextmanager
def child(target: Callable[[Connection], object], *, nice: int = 0) -> Iterator[Connection]:
    """Yields a pipe to a process that runs `target(pipe)`, with what this process has imported."""
    local, remote = FORK.Pipe()

    def run() -> None:
        gc.disable()  # a pause of it must not count as the router's
        os.nice(nice)
        target(remote)

    process = FORK.Process(target=run, daemon=True)
    process.start()
    remote.close()  # so that its end is seen here
    try:
        yield local
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def fakes(
    new: Callable[[pb.Pool, Lanes], StandIn],
    ports: Sequence[int],
    prefills: int,
    step: Synchronized[float],
    *,
    nice: int = 0,
) -> Iterator[list[str]]:
    """Yields the gRPC addresses of fake workers in one child process. The first ones prefill. `step`: seconds
    between tokens of the others; 0 sends all tokens at once."""

    async def serve(pipe: Connection) -> None:
        lanes, workers = Lanes(), list[StandIn]()
        for i, port in enumerate(ports):
            pool = pb.POOL_PREFILL if i < prefills else pb.POOL_DECODE
            workers.append(await new(pool, lanes).start(port))
        pipe.send([worker.address for worker in workers])
        while True:
            for worker in workers[prefills:]:
                worker.step_seconds = step.value
            await asyncio.sleep(0.05)

    with child(lambda pipe: uvloop.run(serve(pipe)), nice=nice) as pipe:
        yield pipe.recv()


def to(addresses: Sequence[str]) -> list[str]:
    """The flags of a router in front of these workers."""
    return [flag for address in addresses for flag in ("--worker", address)]


@contextlib.contextmanager
def open_streams(url: str, streams: int) -> Iterator[Synchronized[int]]:
    """Keeps so many completions open through the router. Yields the count of their tokens."""
    tokens = FORK.Value("L", 0)

    async def stream(number: int) -> None:
        async with through(url) as ask:
            for i in itertools.count():
                async for data in ask(prompt_of(number * 100_000 + i), 100):
                    tokens.value += data.count(EVENT)

    async def all_of_them() -> None:
        await asyncio.gather(*map(stream, range(streams)))

    with child(lambda _: uvloop.run(all_of_them())):
        while not tokens.value:
            time.sleep(0.01)
        time.sleep(SPREAD_S)
        yield tokens


# ---------------------------------------------------------------- clients


Ask = Callable[[list[int], int], AsyncIterator[bytes]]
"""Takes a prompt and a number of tokens. Yields the bytes of the answer, head included, as they come."""


@contextlib.asynccontextmanager
async def through(url: str) -> AsyncIterator[Ask]:
    """A connection to a router, used for one completion after another."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)

    async def ask(prompt: list[int], max_tokens: int) -> AsyncIterator[bytes]:
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0
        }  # fmt: skip
        sent = json.dumps(body).encode()
        writer.write(REQUEST_HEAD % len(sent) + sent)
        last = b""
        while not last.endswith(END):
            data = await reader.read(1 << 16)
            if not data or (not last and not data.startswith(b"HTTP/1.1 200")):
                raise RuntimeError(f"the router answered {data[:200]!r}")
            last = last[-8:] + data
            yield data

    try:
        yield ask
    finally:
        writer.close()


async def first_event(ask: Ask, prompt: list[int]) -> float:
    """Seconds to the first event. Reads the answer to its end."""
    began, first = time.perf_counter(), 0.0
    async for data in ask(prompt, OUTPUT_TOKENS):
        if not first and EVENT in data:
            first = time.perf_counter() - began
    return first


class Direct:
    """A stream to a worker: writes one request, reads one message."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._channel = connect(address, secret)
        self._call = WorkerStub(self._channel).Attach(None)

    async def first_token(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        sampling = pb.SamplingParams(temperature=1, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        work = pb.Request(
            request_id=os.urandom(16), prompt_ids=packed_ids(prompt), sampling=sampling, timeout_ms=60_000
        )
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
    """Token ids. Two numbers give different sessions."""
    return random.Random(number).choices(range(3, 40_000), k=PROMPT_TOKENS)


def cpu_seconds(pid: int) -> float:
    """CPU time so far of a process with its threads and children."""
    children = psutil.Process(pid).children(recursive=True)
    return sum(map(processes.cpu_seconds, (pid, *(child.pid for child in children))))


_PAUSE_S = 0.0005
_ASK = b"GET /health HTTP/1.1\r\nHost: bench\r\n\r\n"
_BYTES = (16 << 20) - 1024
"""Just below the default of `--advanced.max-body-size`."""
_LONG_ANSWER = {"n": 16, "max_tokens": 1000}
_MANY_ANSWERS = {"n": 128, "max_tokens": 400}
_SENTENCE = "The router chooses a worker, and sends it what to read. "


def large_requests(answer: str) -> dict[str, tuple[str, bytes]]:
    """Path and body by name: 300,000 messages, 16 MB of each field that can be long, a long answer, and 128
    answers of which each holds back a thousand characters for 64 stop strings. `answer`: of the fakes."""
    text = _SENTENCE * (_BYTES // len(_SENTENCE))
    ids = [100] * (_BYTES // len("100, "))
    chat, short = "/v1/chat/completions", {"role": "user", "content": "Hi"}
    settings = {"a": [[]] * (_BYTES // 4)}
    stops = [f"{answer[:1000]}{i:02}{_SENTENCE[:20]}" for i in range(64)]
    requests = {
        "messages": (chat, {"messages": [short] * 300_000}),
        "message": (chat, {"messages": [short | {"content": text}]}),
        "settings": (chat, {"messages": [short], "chat_template_kwargs": settings, "max_tokens": 1}),
        "text": ("/v1/completions", {"prompt": text}),
        "token_ids": ("/v1/completions", {"prompt": ids}),
        "invocation": ("/invocations", {"prompt": ids}),
        "responses": ("/v1/responses", {"input": ids}),
        "tokenize": ("/tokenize", {"prompt": text[: 1 << 20]}),  # 16 MB would take half a minute
        "detokenize": ("/detokenize", {"tokens": ids}),
        "answer": ("/v1/completions", {"prompt": [100], "logprobs": 20, "ignore_eos": True} | _LONG_ANSWER),
        "stops": ("/v1/completions", {"prompt": [100], "stop": stops, "ignore_eos": True} | _MANY_ANSWERS),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in requests.items()}


def longest_stalls(url: str, requests: dict[str, tuple[str, bytes]], repeats: int) -> dict[str, list[float]]:
    """The longest stall beside each request, in milliseconds. Sends one request at a time."""
    stalls: dict[str, list[float]] = {name: [] for name in requests}
    longest = FORK.Value("d", 0.0)
    with child(lambda _: _watch(url, longest)):
        for _ in range(repeats):
            for name, (path, body) in requests.items():
                longest.value = 0.0
                _send(url + path, body)
                while not longest.value:  # a stall may still go on
                    time.sleep(_PAUSE_S)
                stalls[name].append(1e3 * longest.value)
    return stalls


def fake_answer(url: str) -> str:
    """The text of the fake workers."""
    body = {"prompt": [100], "ignore_eos": True, "max_tokens": 400}
    return json.loads(_send(url + "/v1/completions", json.dumps(body).encode()))["choices"][0]["text"]


def _send(url: str, body: bytes) -> bytes:
    """Sends a request. Returns its answer, which may be that the request is wrong."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return error.read()


def _watch(url: str, longest: Synchronized[float]) -> None:
    """Asks for /health again and again. Notes the longest answer in seconds, which may be reset any time."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            sent_at = time.perf_counter()
            connection.sendall(_ASK)
            if not connection.recv(4096):
                return
            longest.value = max(longest.value, time.perf_counter() - sent_at)
            time.sleep(_PAUSE_S)
