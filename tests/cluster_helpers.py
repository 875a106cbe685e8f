"""Real workers for tests: process trees started as a supervisor would, driven over gRPC as a router would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeVar

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.kv_names import prompt_hints
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.rpc.token_ids import packed_ids
from baton.system.metrics_page import samples
from tests.device import DEVICE, environment
from tests.forked import FreshPopen
from tests.within import WITHIN, within

K = TypeVar("K")
SECRET = b"a secret of the tests, no other"
DEADLINE_MS = 60_000
WHOLE_S = 25.0
"""Seconds until the pools of an idle worker are whole: less than the hold deadline, which hides a leak."""
ENGINE: dict[str, Any] = {"dtype": "float32", "device": DEVICE, "num_blocks": 512, "num_threads": 1}


@dataclass
class WorkerProcess:
    """A worker's process tree, on its way up until `wait_ready` returns. As a context it is killed in the
    end."""

    popen: subprocess.Popen[bytes]
    log: Path
    run_dir: Path
    ready_pipe: IO[bytes]
    told: list[dict[str, Any]] = field(default_factory=list)
    """All that came on its ready descriptor."""

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait_ready(self) -> WorkerProcess:
        self.wait_told()
        assert "ready" in self.told[-1], f"it did not start: {self.told}\n{self.log.read_text()}"
        return self

    def wait_told(self) -> None:
        """Until the ready descriptor is closed: after the ready line, the error, or with the process. Then
        it may be called again, which a test does that runs a second time."""
        if not self.ready_pipe.closed:
            with self.ready_pipe as pipe:
                self.told = [json.loads(line) for line in pipe]

    @property
    def ready(self) -> dict[str, Any]:
        return self.told[-1]["ready"]

    @property
    def address(self) -> str:
        return self.ready["address"]

    def child(self, kind: str) -> psutil.Process:
        """Its "engine" or its "transfer" process."""
        return next(self.children(kind))

    def children(self, kind: str) -> Iterator[psutil.Process]:
        """Those of them that run, while one takes the place of another, too."""
        for process in self.tree()[1:]:
            with contextlib.suppress(psutil.Error):  # it has ended since
                if " ".join(process.cmdline()).strip().endswith(f" {kind}"):  # none, if it has just ended
                    yield process

    def tree(self) -> list[psutil.Process]:
        service = psutil.Process(self.popen.pid)
        return [service, *service.children(recursive=True)]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signals the service process if it still runs; returns its exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(how)
        return self.popen.wait(WITHIN)


def start_worker(
    role: str,
    model: Path,
    directory: Path,
    *,
    index: int = 0,
    engine: dict[str, Any] | None = None,
    deadlines: dict[str, float] | None = None,
    secret: bytes = SECRET,
    fresh: bool = False,
    python: str = sys.executable,
    variables: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> WorkerProcess:
    """Starts a worker on free ports of 127.0.0.1. None of its processes is a fork if it is `fresh`
    (`tests.forked`). `variables`: of its environment. `settings` are fields of WorkerConfig."""
    directory.mkdir(parents=True, exist_ok=True)
    run_dir = directory / "run"
    run_dir.mkdir(exist_ok=True)
    read_fd, write_fd = os.pipe()
    config = {
        "role": role,
        "index": index,
        "engine": {"model": str(model)} | ENGINE | (engine or {}),
        "deadlines": deadlines or {},
        "secret": secret.decode(),
        "run_dir": str(run_dir),
        "ready_fd": write_fd,
        **settings,
    }
    log = directory / f"{role}-{index}.log"
    with log.open("ab") as output:
        popen = (FreshPopen if fresh else subprocess.Popen)(
            [python, "-m", "tests.worker_process"],
            env={**os.environ, **environment(role), **variables},
            stdin=subprocess.PIPE,
            stderr=output,
            stdout=output,
            pass_fds=(write_fd,),
        )
    os.close(write_fd)
    assert popen.stdin is not None
    popen.stdin.write(json.dumps(config).encode())
    popen.stdin.close()
    return WorkerProcess(popen, log, run_dir, os.fdopen(read_fd, "rb"))


@contextmanager
def started_pair(
    model: Path, directory: Path, *, engine: dict[str, Any], ranks: tuple[int, int] = (1, 1), **settings: Any
) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """A prefill and a decode worker, alike but for their ranks. They must stop cleanly in the end."""

    def started(role: str, size: int) -> WorkerProcess:
        return start_worker(
            role, model, directory, engine=engine | {"tensor_parallel_size": size}, **settings
        )

    with started("prefill", ranks[0]) as prefill, started("decode", ranks[1]) as decode:
        yield prefill.wait_ready(), decode.wait_ready()
        assert [prefill.stop(), decode.stop()] == [0, 0]


def tiny_model(directory: Path, intermediate_size: int = 128) -> Path:
    """A Llama of two small layers, for `--load-format dummy`: all of the machinery, none of the waiting."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 511,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@contextmanager
def side_by_side(directory: Path, workers: Mapping[K, dict[str, Any]]) -> Iterator[dict[K, WorkerProcess]]:
    """Workers with the tiny model, if no other is given, that start at the same time: by key, what
    `start_worker` takes. None is left in the end."""
    default: dict[str, Any] = {"model": tiny_model(directory / "model")}
    with ExitStack() as stack:
        yield {
            key: stack.enter_context(start_worker(directory=directory / str(i), **(default | given)))
            for i, (key, given) in enumerate(workers.items())
        }


def sampling(**fields: Any) -> pb.SamplingParams:
    """Greedy and 16 tokens unless told otherwise."""
    defaults: dict[str, Any] = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 16}
    return pb.SamplingParams(**(defaults | fields))


def request(
    prompt_ids: Sequence[int],
    params: pb.SamplingParams,
    output_ids: Sequence[int] = (),
    timeout_ms: int = DEADLINE_MS,
) -> pb.Request:
    return pb.Request(
        request_id=os.urandom(16),
        prompt_ids=packed_ids(prompt_ids),
        output_ids=output_ids,
        sampling=params,
        timeout_ms=timeout_ms,
    )


@dataclass
class Seen:
    """One message from a worker about one attempt, and when it came (time.monotonic())."""

    message: pb.TokenEvent | pb.Reserved | pb.AttemptFailed
    at: float


@dataclass
class WorkerStream:
    """One Attach call. What arrives is sorted by attempt id."""

    call: grpc.aio.StreamStreamCall
    stub: WorkerStub
    reading: asyncio.Task[None] = field(init=False)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    steps: list[pb.StepOutput] = field(default_factory=list)
    started: dict[bytes, float] = field(default_factory=dict)  # prefill id -> time.monotonic()
    statuses: asyncio.Queue[pb.WorkerStatus] = field(default_factory=asyncio.Queue)
    descriptions: asyncio.Queue[pb.WorkerDescription] = field(default_factory=asyncio.Queue)
    caches: asyncio.Queue[pb.CacheEvents] = field(default_factory=asyncio.Queue)
    events: defaultdict[bytes, asyncio.Queue[Seen]] = field(
        default_factory=lambda: defaultdict(asyncio.Queue)
    )

    async def send(self, **kind: Any) -> None:
        async with self.sending:  # gRPC takes one write at a time
            await self.call.write(pb.RouterMessage(**kind))

    async def submit_prefill(
        self,
        req: pb.Request,
        *,
        handover: bool,
        report_start: bool = False,
        content: pb.ContentSource | None = None,
    ) -> bytes:
        prefill_id = os.urandom(16)
        submit = pb.SubmitPrefill(
            prefill_id=prefill_id,
            request=req,
            handover=handover,
            report_start=report_start,
            content=content,
        )
        await self.send(prefill=submit)
        return prefill_id

    async def submit_decode(
        self,
        req: pb.Request,
        source: pb.PrefillSource | None = None,
        content: pb.ContentSource | None = None,
    ) -> bytes:
        """Without a source the worker computes the prompt."""
        decode_id = os.urandom(16)
        submit = pb.SubmitDecode(decode_id=decode_id, request=req, source=source, content=content)
        await self.send(decode=submit)
        return decode_id

    async def reserve(
        self,
        req: pb.Request,
        source: pb.PrefillSource | None = None,
        content: pb.ContentSource | None = None,
    ) -> bytes:
        """Submits a decode, and waits until it has its blocks."""
        decode_id = await self.submit_decode(req, source, content)
        await self.reserved(decode_id)
        return decode_id

    async def cancel(self, attempt_id: bytes) -> None:
        await self.send(cancel=pb.Cancel(attempt_id=attempt_id))

    async def next(self, attempt_id: bytes) -> Seen:
        return await within(self.events[attempt_id].get())

    async def token(self, attempt_id: bytes) -> tuple[pb.TokenEvent, float]:
        """The attempt's next message, which must be a token, and when it came."""
        seen = await self.next(attempt_id)
        assert isinstance(seen.message, pb.TokenEvent), seen.message
        return seen.message, seen.at

    async def tokens(self, attempt_id: bytes) -> list[tuple[pb.TokenEvent, float]]:
        """All tokens up to the one that finishes the request."""
        tokens = [await self.token(attempt_id)]
        while not tokens[-1][0].finish_reason:
            tokens.append(await self.token(attempt_id))
        return tokens

    async def reserved(self, decode_id: bytes) -> None:
        """The attempt's next message, which must be Reserved."""
        message = (await self.next(decode_id)).message
        assert isinstance(message, pb.Reserved), message

    async def hints(self, prompt_ids: Sequence[int]) -> list[int]:
        """The chunks of a prompt, as the worker reports them."""
        described = await self.stub.Describe(pb.DescribeRequest())
        return prompt_hints(prompt_ids, described.content_root, b"")

    async def next_status(self) -> pb.WorkerStatus:
        """What the worker says of itself about once a second."""
        return await within(self.statuses.get())

    async def until(self, holds: Callable[[pb.WorkerStatus], object]) -> None:
        """Asks for its status until this holds. To ask all the time would take a core from the worker."""
        async with asyncio.timeout(WITHIN):
            while not holds(await self.stub.GetStatus(pb.StatusRequest())):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def failure(self, attempt_id: bytes) -> pb.AttemptFailed:
        """The attempt's next message, which must be its failure."""
        message = (await self.next(attempt_id)).message
        assert isinstance(message, pb.AttemptFailed), message
        return message

    async def read(self) -> None:
        try:
            async for message in self.call:
                await self.may_read.wait()
                self._sort(message, time.monotonic())
        except grpc.aio.AioRpcError:
            pass  # a test that cares asks the call for its code
        finally:
            self.ended.set()

    def _sort(self, message: pb.WorkerMessage, now: float) -> None:
        match message.WhichOneof("kind"):
            case "step":
                self.steps.append(message.step)
                for token in message.step.tokens:
                    self.events[token.attempt_id].put_nowait(Seen(token, now))
            case "reserved":
                self.events[message.reserved.decode_id].put_nowait(Seen(message.reserved, now))
            case "prefill_started":
                self.started[message.prefill_started.prefill_id] = now
            case "failed":
                self.events[message.failed.attempt_id].put_nowait(Seen(message.failed, now))
            case "description":
                self.descriptions.put_nowait(message.description)
            case "cache":
                self.caches.put_nowait(message.cache)
            case "status":
                self.statuses.put_nowait(message.status)


@asynccontextmanager
async def attached(worker: WorkerProcess, secret: bytes = SECRET) -> AsyncIterator[WorkerStream]:
    """A router's stream to a worker; leaving it ends the stream."""
    async with connect(worker.address, secret) as channel:
        stub = WorkerStub(channel)
        call = stub.Attach()  # pyrefly: ignore[missing-argument]  (it is written to)
        stream = WorkerStream(call, stub)
        await stream.send(hello=pb.RouterHello(router_id=os.urandom(16), cache=True))
        stream.may_read.set()
        stream.reading = asyncio.create_task(stream.read())
        try:
            yield stream
        finally:
            call.cancel()
            await asyncio.gather(stream.reading, return_exceptions=True)


@dataclass
class Answer:
    tokens: list[int]
    finish_reason: int
    ttft: float  # seconds from submission to prefill's token
    handover: float  # seconds from prefill's token to decode's second; 0 if there was none
    first: pb.TokenEvent  # prefill's
    decoded: list[pb.TokenEvent]


@dataclass
class Pair:
    """What a router knows of one prefill and one decode worker."""

    prefill: WorkerStream
    decode: WorkerStream
    kv_address: str
    incarnation: int

    def source(self, prefill_id: bytes) -> pb.PrefillSource:
        return pb.PrefillSource(
            prefill_id=prefill_id, kv_address=self.kv_address, incarnation=self.incarnation
        )

    async def submit(self, req: pb.Request) -> tuple[bytes, bytes]:
        """To both at the same time; the prefill id and the decode id."""
        prefill_id = await self.prefill.submit_prefill(req, handover=True)
        return prefill_id, await self.decode.submit_decode(req, self.source(prefill_id))

    async def reserve(self, req: pb.Request) -> tuple[bytes, bytes]:
        """As `submit`, and waits until the decode has its blocks."""
        prefill_id, decode_id = await self.submit(req)
        await self.decode.reserved(decode_id)
        return prefill_id, decode_id

    async def generate(
        self, prompt_ids: Sequence[int], params: pb.SamplingParams, output_ids: Sequence[int] = ()
    ) -> Answer:
        started = time.monotonic()
        prefill_id, decode_id = await self.reserve(request(prompt_ids, params, output_ids))
        first, first_at = await self.prefill.token(prefill_id)
        if first.finish_reason:
            await self.decode.cancel(decode_id)
            return Answer([first.token_id], first.finish_reason, first_at - started, 0.0, first, [])
        tokens = await self.decode.tokens(decode_id)
        decoded = [token for token, _ in tokens]
        return Answer(
            tokens=[token.token_id for token in decoded],
            finish_reason=decoded[-1].finish_reason,
            ttft=first_at - started,
            handover=tokens[1][1] - first_at if len(tokens) > 1 else 0.0,
            first=first,
            decoded=decoded,
        )


@asynccontextmanager
async def paired(prefill: WorkerProcess, decode: WorkerProcess) -> AsyncIterator[Pair]:
    async with attached(prefill) as p, attached(decode) as d:
        yield Pair(p, d, prefill.ready["kv_address"], prefill.ready["incarnation"])


async def health(channel: grpc.aio.Channel) -> str:
    """What the standard health service says: "SERVING" or "NOT_SERVING"."""
    check = health_pb2_grpc.HealthStub(channel).Check  # pyrefly: ignore[missing-attribute]
    answer = await check(health_pb2.HealthCheckRequest())
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def not_whole(status: pb.WorkerStatus) -> list[str]:
    """What keeps the pools of a worker from being whole; empty when it is idle and all is well."""
    wrong = [
        f"{name} is {getattr(status, name)}"
        for name in (
            "requests_running",
            "requests_waiting",
            "tokens_waiting",
            "held_prefills",
            "reservations",
            "transfers_open",
        )
        if getattr(status, name)
    ]
    for kind in ("blocks", "arena_slots"):
        free, total = getattr(status, f"{kind}_free"), getattr(status, f"{kind}_total")
        if free != total:
            wrong.append(f"{free} of {total} {kind} are free")
    return wrong


async def assert_whole(*workers: WorkerProcess, within: float = WHOLE_S) -> None:
    """All pools of these idle workers become whole."""
    for worker in workers:
        async with connect(worker.address, SECRET) as channel:
            end = time.monotonic() + within
            while wrong := not_whole(await WorkerStub(channel).GetStatus(pb.StatusRequest())):
                assert time.monotonic() < end, f"{worker.address}: {wrong}"
                await asyncio.sleep(0.02)


def metrics(worker: WorkerProcess) -> dict[str, float]:
    """Name with labels (all but model_name and role) → value, as of the last status (`assert_whole` asks)."""
    url = f"http://{worker.ready['metrics_address']}/metrics"
    with urllib.request.urlopen(url, timeout=WITHIN) as response:
        page = samples(response.read().decode())
    found: dict[str, float] = {}
    for sample in page:
        labels = [f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k not in ("model_name", "role")]
        found[sample.name + ("{" + ",".join(labels) + "}" if labels else "")] = sample.value
    return found
