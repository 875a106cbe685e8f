"""Both ends of a router, for benches: fake workers and load in processes of their own, and clients.

Clients are written by hand: a whole HTTP client would cost more than the router.
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
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.sharedctypes import Synchronized
from urllib.parse import urlsplit

import psutil
import uvloop

import rpc
from bench.fake_worker import FakeWorker, Lanes
from bench.http_face import http_face
from rpc import worker_pb2 as pb
from rpc.worker_pb2_grpc import WorkerStub

PROMPT_TOKENS = 200
OUTPUT_TOKENS = 2  # the least with a handover
SPREAD_S = 1.0
"""After this time the streams of a load are spread over the steps."""
_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
_WORDS = [
    "the",
    "router",
    "chooses",
    "a",
    "worker",
    "and",
    "sends",
    "it",
    "what",
    "to",
    "read",
    "while",
    "others",
    "write",
    "on",
    "and",
    "on",
]
CONTEXT = multiprocessing.get_context("spawn")


# ---------------------------------------------------------------- the other processes


class FakeWorkers:
    """One of each role, in a process of their own. `step` is shared: seconds between tokens, 0 is at once.

    `urls`: of as many HTTP faces with the same model.
    """

    def __init__(self, secret: bytes, *, faces: int = 0) -> None:
        self.step = CONTEXT.Value("d", 0.0)
        ours, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(
            target=_fake_workers, args=(secret, self.step, faces, theirs), daemon=True
        )
        self._process.start()
        self.prefill, self.decode, *self.urls = ours.recv()

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _fake_workers(secret: bytes, step: Synchronized[float], faces: int, pipe) -> None:
    gc.disable()  # a worker's pauses are not the router's

    async def serve(stack: contextlib.AsyncExitStack) -> None:
        lanes = Lanes()
        answer = list(range(1000, 1400))
        roles = (pb.ROLE_PREFILL, pb.ROLE_DECODE)
        workers = [await FakeWorker(role, lanes, answer, secret=secret).start() for role in roles]
        urls = [
            await stack.enter_async_context(http_face(answer, workers[1].next_step)) for _ in range(faces)
        ]
        pipe.send([*(worker.address for worker in workers), *urls])
        while True:
            workers[1].step_seconds = step.value
            for worker in workers:  # what tests look at would grow for ever
                worker.submitted.clear()
                worker.cancelled.clear()
            await asyncio.sleep(0.05)

    async def serve_until_killed() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await serve(stack)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_until_killed())


class Load:
    """Keeps `streams` completions open through the router, from a process of its own."""

    def __init__(self, url: str, streams: int) -> None:
        self.tokens = CONTEXT.Value("L", 0)
        self._process = CONTEXT.Process(target=_load, args=(url, streams, self.tokens), daemon=True)

    def __enter__(self) -> Load:
        self._process.start()
        while not self.tokens.value:
            time.sleep(0.05)
        time.sleep(SPREAD_S)
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


Ask = Callable[[list[int] | str, int], AsyncIterator[bytes]]
"""A prompt and how many tokens; yields what is read, head and all."""


@contextlib.asynccontextmanager
async def through(url: str, model: str | None = None) -> AsyncIterator[Ask]:
    """A connection to a router that is kept; gives what asks for a completion and yields what is read.

    Written by hand: a whole HTTP client would cost more than the router.
    """
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)

    async def ask(prompt: list[int] | str, max_tokens: int) -> AsyncIterator[bytes]:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
            "model": model,
        }
        sent = json.dumps(body).encode()
        writer.write(_HEAD % len(sent) + sent)
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


async def first_event(ask: Ask, prompt: list[int] | str, max_tokens: int = OUTPUT_TOKENS) -> float:
    """Seconds; returns when the answer is complete."""
    began, first = time.perf_counter(), 0.0
    async for seen in ask(prompt, max_tokens):
        if not first and b"data: {" in seen:
            first = time.perf_counter() - began
    return first


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


def text_of(number: int) -> str:
    """As long a prompt, in words."""
    return " ".join(random.Random(number).choices(_WORDS, k=PROMPT_TOKENS))


def cpu_seconds(pid: int) -> float:
    """Of a process, all of its threads and its children, so far."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)
