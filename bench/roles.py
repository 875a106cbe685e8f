"""Real workers and routers for benches and tests, as child processes without Ray.

- `spawn` starts `baton ROLE`.
- `Roles` starts roles with one cluster secret, waits until each is ready, and ends all of them.
- `Driver` does the least of a router's work: one Attach stream to a worker. It notes when each message
  arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO

import baton.bench.contract as contract
from baton.bench.shapes import DENSE, write_shape
from baton.cluster.gpus import visible_gpus
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.worker_pb2_grpc import WorkerStub

STOP_TIMEOUT_S = 20.0


def spawn(
    role: str, *flags: str, environment: Mapping[str, str], output: IO[bytes] | None = None
) -> tuple[subprocess.Popen[bytes], TextIO]:
    """Starts `baton ROLE FLAGS`. Returns the process and a pipe.

    The role writes JSON objects to the pipe, one per line, while it starts. The last one is `{"ready": …}` or
    `{"error": …}`. `output` gets what the role prints.
    """
    read_end, write_end = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "baton.cluster.cli", role, "--ready-fd", str(write_end), *flags],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(write_end,),
        )
    finally:
        os.close(write_end)
    return child, os.fdopen(read_end)


class Roles:
    """Owns the processes that it starts. Use as a context manager."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16).encode()
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, *flags: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
        """Starts `baton ROLE FLAGS`. Returns its report when it is ready (address, kv_address, pid, …).

        Raises RuntimeError with the error of the role if it does not start.
        """
        secret = {"BATON_CLUSTER_SECRET": self.secret.decode()}
        child, pipe = spawn(role, *flags, environment={**os.environ, **(environment or {}), **secret})
        self._children.append(child)
        with pipe:
            for line in pipe:
                message = json.loads(line)
                if "ready" in message:
                    return message["ready"]
                if "error" in message:
                    raise RuntimeError(f"baton {role}: {message['error']}")
        raise RuntimeError(f"baton {role} ended with {child.wait()} before it was ready")

    def __enter__(self) -> Roles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.send_signal(signal.SIGINT)
        for child in self._children:
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class Driver:
    """One Attach stream. Keeps the tokens of each attempt, with the time.perf_counter() of their arrival."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._channel = connect(address, secret)
        self.stub = WorkerStub(self._channel)
        self._call: Any = self.stub.Attach(None)
        self._tokens: dict[bytes, list[tuple[float, pb.TokenEvent]]] = defaultdict(list)
        self._failed: dict[bytes, pb.AttemptFailed] = {}
        self._news = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()  # gRPC takes one write at a time

    async def attach(self) -> None:
        await self._call.write(pb.RouterMessage(hello=pb.RouterHello(router_id=os.urandom(16))))
        self._reader = asyncio.create_task(self._read())

    async def send(self, message: pb.RouterMessage) -> None:
        async with self._sending:
            await self._call.write(message)

    async def tokens(self, attempt_id: bytes, count: int) -> list[tuple[float, pb.TokenEvent]]:
        """Waits for the first `count` tokens of an attempt. Raises RuntimeError if the attempt fails."""

        def decided() -> bool:
            return attempt_id in self._failed or len(self._tokens[attempt_id]) >= count

        async with self._news:
            await self._news.wait_for(decided)
        if attempt_id in self._failed:
            raise RuntimeError(f"attempt failed: {self._failed[attempt_id].message}")
        return self._tokens[attempt_id][:count]

    def times(self, attempt_id: bytes) -> list[float]:
        """The arrival times of the tokens that have come for an attempt."""
        return [at for at, _ in self._tokens[attempt_id]]

    async def close(self) -> None:
        assert self._reader is not None
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close(None)

    async def _read(self) -> None:
        async for message in self._call:
            now = time.perf_counter()
            async with self._news:
                for event in message.step.tokens:
                    self._tokens[event.attempt_id].append((now, event))
                if message.HasField("failed"):
                    self._failed[message.failed.attempt_id] = message.failed
                self._news.notify_all()


def request(prompt_ids: Sequence[int], max_tokens: int) -> pb.Request:
    """A greedy request that ignores the end-of-sequence token."""
    sampling = pb.SamplingParams(
        temperature=0, top_p=1, repetition_penalty=1, seed=1, max_tokens=max_tokens, ignore_eos=True
    )
    return pb.Request(request_id=os.urandom(16), prompt_ids=prompt_ids, sampling=sampling, timeout_ms=600_000)


def _gpus(args: argparse.Namespace, count: int) -> list[str]:
    """The GPUs of this machine. Exits if the bench needs more."""
    gpus = visible_gpus()
    if args.device == "cuda" and len(gpus) < count:
        print(f"this bench needs {count} GPUs, and there are {len(gpus)}", file=sys.stderr)
        sys.exit(contract.EXIT_CANNOT_MEASURE)
    return gpus


def worker_flags(
    args: argparse.Namespace, directory: Path, *, gpus: int
) -> tuple[list[str], list[dict[str, str]]]:
    """The flags of so many workers, each on a GPU, and the environment of each. Exits if GPUs are missing."""
    if args.device == "cpu":
        # One thread each: otherwise two engines would compete for the cores of a small machine.
        model = ["--model", args.model] if args.model else []
        return ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", *model], [{}] * gpus
    found = _gpus(args, gpus)[:gpus]
    model = args.model or str(write_shape(DENSE, directory))
    common = ["--device", "cuda", "--model", model, "--load-format", "dummy", "--max-model-len", "16384"]
    return [*common, "--kv-lanes", "8", "--kv-slots", "256"], [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in found]
