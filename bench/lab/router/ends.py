"""Both sides of the router under test: fake workers and load in processes of their own, and clients.

The clients write HTTP by hand. A complete HTTP client would use more CPU time than the router. `Watch` sees
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
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Self
from urllib.parse import urlsplit

import psutil
import uvloop

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
CONTEXT = multiprocessing.get_context("spawn")


# ---------------------------------------------------------------- other processes


class FakeWorkers:
    """A prefill and a decode worker in one child process. Close it.

    Attributes:
        step: seconds between tokens, shared with the child; 0 sends all tokens at once.
        prefill, decode: gRPC addresses.
    """

    def __init__(self, secret: bytes) -> None:
        self.step = CONTEXT.Value("d", 0.0)
        local, remote = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_fake_workers, args=(secret, self.step, remote), daemon=True)
        self._process.start()
        self.prefill, self.decode = local.recv()

    @property
    def flags(self) -> list[str]:
        """Of the router in front of them."""
        return ["--worker", self.prefill, "--worker", self.decode]

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _fake_workers(secret: bytes, step: Synchronized[float], pipe: Connection) -> None:
    gc.disable()  # a pause of the workers must not count as the router's

    async def serve() -> None:
        lanes, output_ids = Lanes(), list(range(1000, 1400))
        roles = (pb.POOL_PREFILL, pb.POOL_DECODE)
        workers = [await StandIn(role, lanes, output_ids, secret=secret).start() for role in roles]
        pipe.send([worker.address for worker in workers])
        while True:
            workers[1].step_seconds = step.value
            await asyncio.sleep(0.05)

    uvloop.run(serve())


class Child:
    """A context in which a child process runs `target(*args, value)`. It begins when `value` is not 0."""

    def __init__(self, kind: str, target: Callable[..., None], *args: object) -> None:
        self._value = CONTEXT.Value(kind, 0)
        self._process = CONTEXT.Process(target=target, args=(*args, self._value), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        while not self._value.value:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


class OpenStreams(Child):
    """Keeps `streams` completions open through the router."""

    def __init__(self, url: str, streams: int) -> None:
        super().__init__("L", _load, url, streams)
        self.tokens = self._value

    def __enter__(self) -> Self:
        super().__enter__()
        time.sleep(SPREAD_S)
        return self


def _load(url: str, streams: int, tokens: Synchronized[int]) -> None:
    async def stream(number: int) -> None:
        async with through(url) as ask:
            for i in itertools.count():
                async for data in ask(prompt_of(number * 100_000 + i), 100):
                    tokens.value += data.count(EVENT)

    async def all_of_them() -> None:
        await asyncio.gather(*map(stream, range(streams)))

    uvloop.run(all_of_them())


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
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


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
    with Watch(url) as watch:
        for _ in range(repeats):
            for name, (path, body) in requests.items():
                watch.longest.value = 0.0
                _send(url + path, body)
                while not watch.longest.value:  # a stall may still go on
                    time.sleep(_PAUSE_S)
                stalls[name].append(1e3 * watch.longest.value)
    return stalls


class Watch(Child):
    """Asks for /health until it is closed. `longest` is in seconds and may be reset at any time."""

    def __init__(self, url: str) -> None:
        super().__init__("d", _watch, url)
        self.longest = self._value


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
