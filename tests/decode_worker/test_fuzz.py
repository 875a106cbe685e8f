"""Random signed messages of every kind, in every state of an attempt.

A worker refuses an invalid message or ends its stream. Both workers keep serving.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import WorkerStream, assert_whole, attached, paired, request, sampling
from tests.within import WITHIN

from .conftest import Workers, prompt, status

FLOATS = (
    0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 5e-324, 1e-46, 1e-38, 3e38, 1e39, 1e308, float("nan"), float("inf"),
    float("-inf"),
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 20, 21, 511, 512, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
LENGTHS, EXTREMES = (1, 2, 15, 16, 17, 64, 65, 300, 300, 1500), (0, 4080, 4095, 4096, 5000)
TIMEOUTS = (50, 1, 0)
TEXTS = ("", "\x00", "x", "{}", '{"type": "object"}', "(" * 999, "start: start", "ü" * 9999, "[" * 200_000)
ADDRESSES = (
    "", ":", "127.0.0.1:", "127.0.0.1:9", "127.0.0.1:0", "127.0.0.1:65536", "[::1]:9", "nowhere:9", "\x00:9",
    "\n:9", "ü.example:9", "." * 70 + ":9", "[fe80::1%nowhere]:9", "999.1.1.1:9", "x" * 250 + ":9",
)  # fmt: skip


@dataclass
class Forger:
    """Makes random messages. It remembers their attempts, so that later messages name the same attempts."""

    rng: random.Random
    kv_address: str
    incarnation: int
    prefills: list[tuple[bytes, pb.Request]] = field(default_factory=list)
    decodes: list[tuple[bytes, pb.Request]] = field(default_factory=list)

    def known(self) -> tuple[bytes, pb.Request]:
        return self.rng.choice([*self.prefills[-8:], *self.decodes[-8:]] or [(self.new_id(), self.request())])

    def new_id(self) -> bytes:
        return self.rng.randbytes(16 if self.rng.random() < 0.998 else self.rng.choice((0, 15, 17)))

    def some_id(self) -> bytes:
        return self.known()[0] if self.rng.random() < 0.9 else self.new_id()

    def tokens(self) -> list[int]:
        ids = prompt(self.rng.choice(LENGTHS if self.rng.random() < 0.9 else EXTREMES))
        if ids and self.rng.random() < 0.05:
            ids[self.rng.randrange(len(ids))] = self.rng.choice((511, 512, (1 << 32) - 1))
        return ids

    def sampling(self) -> pb.SamplingParams:
        rng = self.rng
        params = sampling(max_tokens=rng.choice((1, 2, 9, 50, 2000)), ignore_eos=rng.random() < 0.5)
        spoil: list[Callable[[], Any]] = [
            *(
                lambda name=name: setattr(params, name, rng.choice(FLOATS))
                for name in (
                    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                    "frequency_penalty",
                )
            ),
            *(
                lambda name=name: setattr(params, name, rng.choice(NUMBERS))
                for name in ("top_k", "seed", "max_tokens", "min_tokens", "logprobs")
            ),
            lambda: params.stop_token_ids.extend(rng.choices(NUMBERS, k=rng.choice((1, 9, 1100)))),
            lambda: params.logit_bias.update({rng.choice(NUMBERS): rng.choice((-100.0, 3e38, *FLOATS[-3:]))}),
            lambda: params.logit_bias.update(dict.fromkeys(range(rng.choice((512, 1100))), 0.0)),
            lambda: params.structured_output.SetInParent(),
            *(
                lambda kind=kind: setattr(params.structured_output, kind, rng.choice(TEXTS))
                for kind in ("json_schema", "regex", "grammar")
            ),
        ]  # fmt: skip
        for _ in range(rng.choice((0,) * 8 + (1, 1, 2, 5))):
            rng.choice(spoil)()
        return params

    def request(self) -> pb.Request:
        rng = self.rng
        outputs = self.tokens() if rng.random() < 0.1 else []
        timeout = 60_000 if rng.random() < 0.9 else rng.choice(TIMEOUTS)
        made = request(self.tokens(), self.sampling(), outputs, timeout)
        if rng.random() < 0.2:
            made.priority = rng.choice((-(1 << 31), -1, 1, (1 << 31) - 1))
            made.alone, made.retried = rng.random() < 0.5, rng.random() < 0.5
            made.cache_salt = rng.randbytes(rng.choice((0, 1, 64, 65)))
            made.name, made.traceparent = rng.choice(TEXTS), rng.choice(TEXTS)
            made.request_id = rng.randbytes(rng.choice((0, 16, 16)))
        return made

    def source(self, prefill_id: bytes) -> pb.PrefillSource:
        rng = self.rng
        address = self.kv_address if rng.random() < 0.9 else rng.choice(ADDRESSES)
        incarnation = self.incarnation if rng.random() < 0.95 else rng.getrandbits(64)
        return pb.PrefillSource(prefill_id=prefill_id, kv_address=address, incarnation=incarnation)

    def prefill(self) -> pb.RouterMessage:
        prefill_id = self.new_id() if self.rng.random() < 0.9 else self.some_id()
        self.prefills.append((prefill_id, self.request()))
        submit = pb.SubmitPrefill(
            prefill_id=prefill_id, request=self.prefills[-1][1], handover=self.rng.random() < 0.8
        )
        return pb.RouterMessage(prefill=submit)

    def decode(self) -> pb.RouterMessage:
        """Makes a SubmitDecode, mostly for a submitted prefill."""
        prefill_id, asked = self.known()
        if self.rng.random() < 0.2:
            asked = self.request()
        decode_id = self.new_id() if self.rng.random() < 0.9 else self.some_id()
        self.decodes.append((decode_id, asked))
        source = self.source(prefill_id) if self.rng.random() < 0.8 else None
        return pb.RouterMessage(decode=pb.SubmitDecode(decode_id=decode_id, request=asked, source=source))

    def retarget(self) -> pb.RouterMessage:
        output_ids = self.tokens() if self.rng.random() < 0.5 else []
        source = self.source(self.some_id())
        return pb.RouterMessage(
            retarget=pb.Retarget(decode_id=self.some_id(), source=source, output_ids=output_ids)
        )

    def cancel(self) -> pb.RouterMessage:
        return pb.RouterMessage(cancel=pb.Cancel(attempt_id=self.some_id()))

    def rare(self) -> pb.RouterMessage:
        hello = pb.RouterHello(router_id=self.new_id())
        return self.rng.choice((pb.RouterMessage(), pb.RouterMessage(hello=hello)))

    def message(self) -> tuple[str, pb.RouterMessage]:
        """Returns a message and the role of the worker that it is for."""
        made = self.rng.choices(
            (self.prefill, self.decode, self.retarget, self.cancel, self.rare), (30, 30, 20, 20, 5)
        )[0]()
        role = "prefill" if made.HasField("prefill") else "decode"
        return role, made


class Routers:
    """Two streams to each worker. An ended stream is opened again."""

    def __init__(self, workers: Workers) -> None:
        self.seen: Counter[str] = Counter()  # counts of the answers, by kind
        self._workers = workers
        self._streams: dict[tuple[str, int], tuple[AsyncExitStack, WorkerStream]] = {}

    async def write(self, role: str, number: int, message: pb.RouterMessage) -> None:
        key = (role, number)
        if key not in self._streams:
            stack = AsyncExitStack()
            worker = self._workers[role == "decode"]
            self._streams[key] = stack, await stack.enter_async_context(attached(worker))
        stream = self._streams[key][1]
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream ended
            await stream.call.write(message)
        if stream.ended.is_set():
            self.seen["stream ended"] += 1
            await self.close(*key)

    async def ask_status(self) -> None:
        """Waits until each worker answers, so that it has read a part of the messages."""
        for _, stream in self._streams.values():
            await status(stream)

    async def close(self, role: str, number: int) -> None:
        stack, stream = self._streams.pop((role, number))
        await stack.aclose()
        for events in stream.events.values():
            while not events.empty():
                message = events.get_nowait().message
                failed = isinstance(message, pb.AttemptFailed)
                self.seen[pb.FailureCode.Name(message.code) if failed else type(message).__name__] += 1

    async def close_all(self) -> None:
        for key in list(self._streams):
            await self.close(*key)


@pytest.mark.all
@pytest.mark.parametrize("count", [400, pytest.param(100_000, marks=pytest.mark.long)])
async def test_no_signed_message_stops_a_worker(workers: Workers, count: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    params = sampling(max_tokens=4, ignore_eos=True)
    trees = [[process.pid for process in worker.tree()] for worker in workers]
    async with paired(*workers) as pair:
        right = (await pair.generate(prompt(100), params)).tokens
        rng = random.Random(seed)
        forger, routers = Forger(rng, pair.kv_address, pair.incarnation), Routers(workers)
        for _ in range(count):
            role, message = forger.message()
            if rng.random() < 0.05:
                role = rng.choice(("prefill", "decode"))
            await routers.write(role, rng.randrange(2), message)
            if rng.random() < 0.05:
                await routers.ask_status()
            if rng.random() < 0.003:
                await routers.close_all()
        await routers.ask_status()
        await routers.close_all()
        assert (await pair.generate(prompt(100), params)).tokens == right
        await assert_whole(*workers, within=WITHIN)
    after = [{process.pid for process in worker.tree()} for worker in workers]  # grammars start processes
    assert all(pids.issuperset(before) for pids, before in zip(after, trees, strict=True))
    reached = {"TokenEvent", "Reserved", "FAILURE_CODE_INVALID"}
    assert reached <= routers.seen.keys(), routers.seen
