"""What benches and tests need of real workers beside a cluster of them (`bench.chaos.cluster`).

- `spawn` starts `baton ROLE` as a child process without Ray. A `Server` is any server, by its command.
- `Driver` does the least of a router's work: one Attach stream to a worker. It notes when each message
  arrived. `Workers` are a prefill and a decode worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TextIO

import baton.bench.contract as contract
from baton.cluster.gpus import visible_gpus
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub

POLL_S, STOP_S = 0.25, 60.0
LOG_LINES = 25


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


class Server:
    """A server of this machine, until `stop`. Without a `log` it prints on stderr.

    The log begins with the variables and the command.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path | None, environment: Mapping[str, str]
    ) -> None:
        """`environment`: variables beside those of this process."""
        self.name, self.log = name, log
        with contextlib.ExitStack() as files:
            output: TextIO = sys.stderr
            if log is not None:
                output = files.enter_context(log.open("w"))
                variables = (f"{key}={value}" for key, value in environment.items())
                print(*variables, shlex.join(command), file=output, flush=True)
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip

    def until_answers(self, url: str, deadline: float, body: bytes | None = None) -> None:
        """Waits until a request succeeds. Raises RuntimeError if the process ends before, or at `deadline`
        (time.monotonic())."""
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=POLL_S * 20) as answer:
                answer.read()
                return
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"{self.name} ended before it answered ({code}).{self._end_of_log()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not answer in time.{self._end_of_log()}")
            time.sleep(POLL_S)

    def _end_of_log(self) -> str:
        if self.log is None:
            return " Its output is above."
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n" + "\n".join(line[:300] for line in lines)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Driver:
    """One Attach stream. Keeps the tokens of each attempt, with the time.perf_counter() of their arrival.

    `report` is what the worker said when it was ready. Use as an asynchronous context manager.
    """

    def __init__(self, report: Mapping[str, Any], secret: str) -> None:
        self.report = report
        self._channel = connect(report["address"], secret.encode())
        self.stub = WorkerStub(self._channel)
        self._call: Any = self.stub.Attach(None)
        self._tokens: dict[bytes, list[tuple[float, pb.TokenEvent]]] = defaultdict(list)
        self._failed: dict[bytes, pb.AttemptFailed] = {}
        self._news = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()  # gRPC takes one write at a time
        self.kv: dict[str, Any] = {
            "kv_address": report["kv_address"], "incarnation": int(report["incarnation"])
        }  # fmt: skip
        """Fields of a message that say where KV of the worker is."""

    async def __aenter__(self) -> Driver:
        await self._call.write(pb.RouterMessage(hello=pb.RouterHello(router_id=os.urandom(16))))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reader is not None
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close(None)

    async def send(self, message: pb.RouterMessage) -> None:
        async with self._sending:
            await self._call.write(message)

    async def metric(self, name: str, label: str = "") -> float:
        """A metric of the worker, up to date."""
        await self.stub.GetStatus(pb.StatusRequest())  # the metrics follow it
        return await asyncio.to_thread(metric, f"http://{self.report['metrics_address']}", name, label)

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

    async def prefill(
        self, work: pb.Request, *, handover: bool = False, content: pb.ContentSource | None = None
    ) -> bytes:
        """Submits a prompt. `content`: a worker that may have KV of it. Returns the prefill id."""
        prefill_id = os.urandom(16)
        submit = pb.SubmitPrefill(prefill_id=prefill_id, request=work, handover=handover, content=content)
        await self.send(pb.RouterMessage(prefill=submit))
        return prefill_id

    async def _read(self) -> None:
        async for message in self._call:
            now = time.perf_counter()
            async with self._news:
                for event in message.step.tokens:
                    self._tokens[event.attempt_id].append((now, event))
                if message.HasField("failed"):
                    self._failed[message.failed.attempt_id] = message.failed
                self._news.notify_all()


class Workers:
    """A prefill and a decode worker. Use as an asynchronous context manager."""

    def __init__(self, prefill: Driver, decode: Driver) -> None:
        self.prefill, self.decode = prefill, decode

    async def __aenter__(self) -> Self:
        await self.prefill.__aenter__()
        await self.decode.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.prefill.__aexit__()
        await self.decode.__aexit__()

    async def submit_decode(
        self, work: pb.Request, prefill_id: bytes | None, of: Driver | None = None
    ) -> bytes:
        """Without a `prefill_id` the decode worker computes the prompt. `of`: the worker of the prefill, if
        it is not the prefill worker."""
        decode_id, source = os.urandom(16), None
        if prefill_id is not None:
            source = pb.PrefillSource(prefill_id=prefill_id, **(of or self.prefill).kv)
        submit = pb.SubmitDecode(decode_id=decode_id, request=work, source=source)
        await self.decode.send(pb.RouterMessage(decode=submit))
        return decode_id

    async def on_decode(self, work: pb.Request) -> tuple[float, list[int]]:
        """The decode worker does both. Returns the time to first token, and the answer."""
        began = time.perf_counter()
        decode_id = await self.submit_decode(work, None)
        tokens = await self.decode.tokens(decode_id, work.sampling.max_tokens)
        return tokens[0][0] - began, [event.token_id for _, event in tokens]


def request(prompt_ids: Sequence[int], max_tokens: int) -> pb.Request:
    """A greedy request that ignores the end-of-sequence token."""
    sampling = pb.SamplingParams(
        temperature=0, top_p=1, repetition_penalty=1, seed=1, max_tokens=max_tokens, ignore_eos=True
    )
    return pb.Request(request_id=os.urandom(16), prompt_ids=prompt_ids, sampling=sampling, timeout_ms=600_000)


def prompt_of(length: int, number: int) -> list[int]:
    """Token ids. No two prompts share a prefix."""
    return [100 + (number * 7919 + i * 31) % 20_000 for i in range(length)]


def metric(url: str, name: str, label: str = "") -> float:
    """The sum of a metric over all labels, or of those samples that have a label, such as `role="decode"`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if line.startswith((name + "{", name + " ")) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def gpus_or_exit(count: int, why: str) -> int:
    """How many GPUs this process may use. Exits if the bench needs more."""
    present = len(visible_gpus())
    if present < count:
        print(f"{why} needs {count} GPUs, and there are {present}", file=sys.stderr)
        sys.exit(contract.EXIT_CANNOT_MEASURE)
    return present
