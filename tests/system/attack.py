"""A client that means harm, as a process: it floods, stalls, replays and sends false fields.

    python -m tests.system.attack [BLOW ...] < pipe

The first line of its input is a `Target`, as JSON. It strikes all blows, or those that are named, until its
input ends. It prints an empty line whenever each blow was struck once more. In the end it prints two counts:
how often it struck each blow, and how many calls a worker served although it must refuse them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import grpc.aio
import msgspec

from baton.rpc import auth
from baton.rpc import inference_pb2 as inference
from baton.rpc import worker_pb2 as worker
from tests.kv_transfer import second_wire as wire

BLOWS = {
    "flood": 0.02, "huge_bodies": 0.5, "false_fields": 0.02, "false_bodies": 0.05, "bent_http": 0.02,
    "false_messages": 0.05, "huge_messages": 0.5, "stalled_streams": 0.2,
    "unsigned_calls": 0.1, "replayed_calls": 0.1, "bent_grpc": 0.02,
    "half_handshakes": 0.01, "bent_frames": 0.02,
}  # fmt: skip
"""Methods of `Attack`, and the seconds after each of them."""
AT_ONCE = {"flood": 16}
MOST_HELD = 80
"""Connections of one kind that stay open; the oldest goes when there are more."""
REFUSED = (
    OSError,
    EOFError,
    TimeoutError,
    aiohttp.ClientError,
    grpc.aio.AioRpcError,
    asyncio.IncompleteReadError,
)
WORKER, GENERATE = "/baton.v1.Worker/", "/baton.v1.Inference/Generate"
FALSE_FIELDS: tuple[dict[str, object], ...] = (
    {"temperature": 1e39},
    {"temperature": float("nan")},
    {"top_p": -0.0, "top_k": 2**63},
    {"logit_bias": {"999999999": 1e38}},
    {"repetition_penalty": 1e-320},
    {"max_tokens": 2**64},
    {"max_tokens": -1},
    {"n": 10**9},
    {"prompt": [-1, 2**40]},
    {"prompt": {"a": []}},
    {"stop": ["x" * 100_000] * 4},
    {"seed": 2**200},
    {"structured_outputs": {"regex": "(a{1000}){1000}"}},
    {"structured_outputs": {"regex": "((((a*)*)*)*)b"}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"stream_options": {"include_usage": "yes"}},
    {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1"}},
    {"prompt": "\ud800"},
    {"user": None, "stream": None, "echo": None, "logprobs": 10**6},
)


@dataclass(frozen=True)
class Target:
    url: str
    grpc_port: int
    key: str
    """With limits of its own."""
    workers: list[str]
    """Of both roles, their gRPC addresses."""
    kv_port: int
    secret: str
    """Only to make the signed calls that are recorded and sent again."""
    prompt: str
    seed: int = 0

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@dataclass
class Attack:
    target: Target
    http: aiohttp.ClientSession
    rng: random.Random
    struck: Counter[str]
    """All blows that it may strike."""
    rounds: int = 0
    """How often each of them was struck at least."""
    believed: Counter[str] = field(default_factory=Counter)
    held: dict[str, list[Callable[[], object]]] = field(default_factory=dict)

    # ---------------------------------------------------------------- HTTP

    async def flood(self) -> None:
        """Prompts of any length. The answer is read, left unread, or cut."""
        words = self.target.prompt.split()
        prompt = " ".join(self.rng.choices(words, k=self.rng.choice((5, 50, 400))))
        body = {"prompt": prompt, "max_tokens": 60, "stream": True, "ignore_eos": True}
        async with self._post(json.dumps(body).encode()) as response:
            match self.rng.randrange(3):
                case 0:
                    await response.read()
                case 1:
                    await asyncio.sleep(3)
                case _:
                    await response.content.readline()

    async def huge_bodies(self) -> None:
        one = {"messages": [{"role": "user", "content": "word " * 3_200_000}]}
        many = {"messages": [{"role": "user", "content": "a"}] * 300_000}
        body = json.dumps(self.rng.choice((one, many))).encode()
        async with self._post(
            body, "/v1/chat/completions", key=self.rng.choice((self.target.key, ""))
        ) as response:
            await response.read()

    async def false_fields(self) -> None:
        false = {"prompt": "x", "max_tokens": 2, **self.rng.choice(FALSE_FIELDS)}
        async with self._post(json.dumps(false).encode()) as response:
            await response.read()

    async def false_bodies(self) -> None:
        body = self.rng.choice(
            (b"{", b"[" * 100_000, b"\x1f\x8b" + os.urandom(1000), b'{"prompt": "' + b"\xff" * 99)
        )
        encoding = {"Content-Encoding": "gzip"} if self.rng.random() < 0.5 else {}
        async with self._post(body, **encoding) as response:
            await response.read()

    def _post(
        self, body: bytes, path: str = "/v1/completions", key: str | None = None, **headers: str
    ) -> Any:
        key = self.target.key if key is None else key
        headers |= {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        return self.http.post(self.target.url + path, data=body, headers=headers)

    async def bent_http(self) -> None:
        """What is not HTTP, and what never ends."""
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        said = self.rng.choice(
            (
                os.urandom(300),
                b"",
                b"GET / HT",
                begun,
                begun + b"Content-Length: 999999999999\r\n\r\n{",
                begun + b"Content-Length: -1\r\n\r\n",
                begun + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
                begun + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n" + b"{",
                begun + b"".join(b"X-%d: y\r\n" % i for i in range(5000)),
            )
        )
        await self._say("http", self.target.port, said)

    # ---------------------------------------------------------------- the router's gRPC

    async def false_messages(self) -> None:
        """With a key and without: bytes that are no message, and fields that are out of bounds."""
        sampling: dict[str, Any] = self.rng.choice(
            (
                {"temperature": 1e39},
                {"max_tokens": 2**32 - 1},
                {"n": 2**32 - 1},
                {"logprobs": 2**31},
                {"top_k": -5},
            )
        )
        message = inference.GenerateRequest(text="x", **sampling).SerializeToString()
        message = self.rng.choice((message, os.urandom(200), message[:-1], b"\x12" + b"\xff" * 9))
        metadata = [("authorization", f"Bearer {self.target.key}")] if self.rng.random() < 0.7 else []
        await self._generate(message, metadata)

    async def huge_messages(self) -> None:
        """Without a key, so that no byte of them need be looked at."""
        await self._generate(inference.GenerateRequest(text="word " * 700_000).SerializeToString(), [])

    async def _generate(self, message: bytes, metadata: list[tuple[str, str]]) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.target.grpc_port}") as channel:
            call = channel.unary_stream(GENERATE, None, None)(message, metadata=metadata, timeout=10)
            async for _ in call:
                pass

    async def stalled_streams(self) -> None:
        """Answers that are asked for and never read."""
        message = inference.GenerateRequest(text=self.target.prompt, max_tokens=200, ignore_eos=True)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.target.grpc_port}")
        metadata = [("authorization", f"Bearer {self.target.key}")]
        call = channel.unary_stream(GENERATE, None, None)(message.SerializeToString(), metadata=metadata)
        self._hold("grpc", call.cancel, most=4)
        await asyncio.sleep(0.2)

    # ---------------------------------------------------------------- workers

    async def unsigned_calls(self) -> None:
        for sign in (
            None,
            "",
            f"{2**70}.x.y",
            "1.2",
            auth.sign(os.urandom(32), os.urandom(16), WORKER + "Attach"),
        ):
            for method in ("GetStatus", "Attach"):
                await self._call("unsigned", self.rng.choice(self.target.workers), method, sign)

    async def replayed_calls(self) -> None:
        """A genuine call is recorded, and sent again to its worker and to the other ones."""
        first, *others = self.rng.sample(self.target.workers, len(self.target.workers))
        method = self.rng.choice(("GetStatus", "Describe"))
        async with grpc.aio.insecure_channel(first) as channel:
            server_id = await auth.ask_server_id(channel, timeout=5)
            header = auth.sign(self.target.secret.encode(), server_id, WORKER + method)
            call = channel.unary_unary(WORKER + method, None, None)
            await call(b"", metadata=[("x-baton-auth", header)], timeout=10)
        for address in (first, *others):
            await self._call("replayed", address, method, header)

    async def _call(self, what: str, address: str, method: str, header: str | None) -> None:
        metadata = [("x-baton-auth", header)] if header is not None else []
        message = worker.RouterMessage(hello=worker.RouterHello(router_id=os.urandom(16))).SerializeToString()
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream(WORKER + method, None, None)(message, metadata=metadata, timeout=10)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    self.believed[what] += 1
                    call.cancel()

    async def bent_grpc(self) -> None:
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        said = self.rng.choice((b"", os.urandom(500), preface, preface + os.urandom(200)))
        port = int(self.rng.choice(self.target.workers).rpartition(":")[2])
        await self._say("worker", port, said)

    # ---------------------------------------------------------------- KV

    async def half_handshakes(self) -> None:
        opened = wire.pack(["open", os.urandom(16), 0, 4, os.urandom(32), wire.identity("decode")])
        proof = wire.pack(["proof", os.urandom(32)])
        hello = wire.frame(wire.HELLO, opened)
        said = self.rng.choice((b"", hello[:30], hello, hello + wire.frame(wire.HELLO, proof)))
        await self._say("kv", self.target.kv_port, said)

    async def bent_frames(self) -> None:
        kind = self.rng.randrange(12)
        said = self.rng.choice(
            (
                os.urandom(100),
                wire.frame(kind, b"", length=2**32 - 1),
                wire.frame(kind, os.urandom(100)),
                wire.frame(wire.HELLO, b"", version=255),
                wire.frame(wire.HELLO, b"\xdd" + struct.pack(">I", 2**32 - 1)),
                wire.frame(wire.HELLO, os.urandom(100), checksum=1),
            )
        )
        await self._say("kv", self.target.kv_port, said)

    # ---------------------------------------------------------------- connections

    async def _say(self, kind: str, port: int, said: bytes) -> None:
        """Opens a connection, says that, and keeps it as it is."""
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        self._hold(kind, writer.transport.abort)
        writer.write(said)
        await writer.drain()

    def _hold(self, kind: str, end: Callable[[], object], most: int = MOST_HELD) -> None:
        held = self.held.setdefault(kind, [])
        held.append(end)
        if len(held) > most:
            held.pop(0)()

    async def strike(self, name: str) -> None:
        """Again and again."""
        while True:
            with contextlib.suppress(*REFUSED):
                await getattr(self, name)()
            self.struck[name] += 1
            if min(self.struck.values()) > self.rounds:
                self.rounds += 1
                print(flush=True)
            await asyncio.sleep(BLOWS[name])


async def main() -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    target = msgspec.json.decode(await reader.readline(), type=Target)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        blows = sys.argv[1:] or list(BLOWS)
        attack = Attack(target, http, random.Random(target.seed), Counter(dict.fromkeys(blows, 0)))
        striking = [
            asyncio.create_task(attack.strike(name)) for name in blows for _ in range(AT_ONCE.get(name, 1))
        ]
        ended = asyncio.create_task(reader.read())
        await asyncio.wait([ended, *striking], return_when=asyncio.FIRST_COMPLETED)
        for task in striking:
            if task.done():
                task.result()  # a defect of this client
            task.cancel()
        await asyncio.gather(*striking, return_exceptions=True)
    print(json.dumps({"struck": attack.struck, "believed": attack.believed}))


if __name__ == "__main__":
    asyncio.run(main())
