"""Requests to workers without a router.

A `Driver` does the least of a router's work: one Attach stream to a worker. It notes when each message
arrived. `Workers` are a prefill and a decode worker.
"""

import asyncio
import itertools
import os
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from prometheus_client.samples import Sample

from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.rpc.token_ids import packed_ids
from baton.system.metrics_page import samples


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

    async def __aenter__(self) -> Self:
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

    async def metric(self, name: str, **labels: str) -> float:
        """A metric of the worker, up to date."""
        await self.stub.GetStatus(pb.StatusRequest())  # the metrics follow it
        return await asyncio.to_thread(metric, f"http://{self.report['metrics_address']}", name, **labels)

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

    async def first_token(self, work: pb.Request) -> float:
        """Seconds to the first token of a prompt that is not handed over."""
        submitted = time.perf_counter()
        [(first, _)] = await self.tokens(await self.prefill(work), 1)
        return first - submitted

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

    async def handover(
        self, work: pb.Request, content: pb.ContentSource | None = None, *, late: bool = False
    ) -> "Handover":
        """Prefill on one worker, decode on the other. `content`: a worker that may have KV of the prompt.
        `late`: decode is submitted when the prefill is done."""
        submitted = time.perf_counter()
        prefill_id = await self.prefill.prefill(work, handover=True, content=content)
        if late:
            await self.prefill.tokens(prefill_id, 1)
        decode_id = await self.submit_decode(work, prefill_id)
        [(first, token)] = await self.prefill.tokens(prefill_id, 1)
        output = await self.decode.tokens(decode_id, work.sampling.max_tokens)
        assert output[0][1].token_id == token.token_id, "decode must repeat the first token"
        assert [event.output_index for _, event in output] == list(range(len(output)))
        tokens = [event.token_id for _, event in output]
        return Handover(prefill_id, decode_id, first - submitted, submitted, [at for at, _ in output], tokens)

    async def on_decode(self, work: pb.Request) -> tuple[float, list[int]]:
        """The decode worker does both. Returns the time to first token, and the answer."""
        began = time.perf_counter()
        decode_id = await self.submit_decode(work, None)
        tokens = await self.decode.tokens(decode_id, work.sampling.max_tokens)
        return tokens[0][0] - began, [event.token_id for _, event in tokens]


class Handover(NamedTuple):
    """One request. Times are those of time.perf_counter(), in seconds."""

    prefill_id: bytes
    decode_id: bytes
    ttft: float
    """From the submission to the first token of the prefill worker."""
    submitted: float
    arrivals: list[float]
    """Of the decode worker's tokens, the first one again among them."""
    tokens: list[int]

    @property
    def step(self) -> float:
        """The median time between later tokens."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.arrivals[1:]))

    @property
    def gap(self) -> float:
        """From the first token, of the prefill worker, to the second one."""
        return self.arrivals[1] - self.submitted - self.ttft

    @property
    def whole(self) -> float:
        return self.arrivals[-1] - self.submitted


def request(prompt_ids: Sequence[int], max_tokens: int) -> pb.Request:
    """A greedy request that ignores the end-of-sequence token."""
    sampling = pb.SamplingParams(
        temperature=0, top_p=1, repetition_penalty=1, seed=1, max_tokens=max_tokens, ignore_eos=True
    )
    return pb.Request(
        request_id=os.urandom(16), prompt_ids=packed_ids(prompt_ids), sampling=sampling, timeout_ms=600_000
    )


def prompt_of(length: int, number: int) -> list[int]:
    """Token ids. No two prompts share a prefix."""
    return [100 + (number * 7919 + i * 31) % 20_000 for i in range(length)]


def metrics_of(url: str, *names: str) -> list[Sample]:
    """These metrics of a process, or all."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        return samples(page.read().decode(), *names)


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric over all samples, or over those that have these labels."""
    return sum(sample.value for sample in metrics_of(url, name) if labels.items() <= sample.labels.items())
