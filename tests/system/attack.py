"""A client that means harm, as a process: it floods, stalls and sends false fields.

    python -m tests.system.attack [BLOW ...] < pipe

The first line of its input is a `Target`, as JSON. It strikes all blows, or those that are named, until its
input ends. It prints an empty line whenever each blow was struck once more in each of its ways. In the end it
prints counts: how often it struck each blow, how many of them got no answer, and how many calls a worker
served although it must refuse them.
"""

import asyncio
import contextlib
import json
import os
import random
import ssl
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

import aiohttp
import grpc
import grpc.aio
import msgspec

from baton.processes.limits import raise_descriptor_limit
from baton.rpc import inference_pb2 as inference
from baton.rpc import worker_pb2 as worker
from baton.rpc.auth import certificate
from tests.kv_transfer import second_wire as wire
from tests.kv_transfer.noise import Noise, drained, hostile_frames

BLOWS = {
    "flood": 0.02, "idle_connections": 1.0, "listed_items": 0.1, "huge_bodies": 0.5, "false_fields": 0.02,
    "dear_requests": 0.05, "dear_grammars": 0.05, "costly_schemas": 0.05, "composed_grammars": 0.05,
    "false_bodies": 0.05, "unfinished_bodies": 0.1,
    "garbage": 0.01, "pages": 0.1, "false_messages": 0.05, "huge_messages": 0.5, "stalled_streams": 0.2,
    "strange_calls": 0.1, "half_handshakes": 0.01, "bent_frames": 0.02, "frames_of_an_insider": 0.1,
}  # fmt: skip
"""Methods of `Attack`, and the seconds after each of them."""
AT_ONCE = {"flood": 16}
AHEAD_S = 4.0
"""After a blow of `AT_ONCE` that is ahead of the others, where each counts once."""
STRANGER = os.urandom(32)
MOST_HELD = 80
"""Connections to one port that stay open; the oldest goes when there are more."""
MOST_IDLE = 5000
"""As `MOST_HELD`, of connections to the port of clients that need no key and say nothing."""
FRAMES = 50
"""On a lane of an insider."""
REFUSED = (
    OSError,
    EOFError,
    aiohttp.ClientError,
    grpc.aio.AioRpcError,
    asyncio.IncompleteReadError,
    msgspec.DecodeError,  # an insider, to whom a lane is closed
)
PATIENCE_S = 600.0
"""For the answer to an HTTP request, and until an insider is welcome."""
WORKER, GENERATE = "/baton.v1.Worker/", "/baton.v1.Inference/Generate"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
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
    {"bad_words": ["é" * 1024] * 64},
    {"seed": 2**200},
    {"structured_outputs": {"regex": "(a{1000}){1000}"}},
    {"structured_outputs": {"regex": "((((a*)*)*)*)b"}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"stream_options": {"include_usage": "yes"}},
    {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1"}},
    {"prompt": "\ud800"},
    {"user": None, "stream": None, "echo": None, "logprobs": 10**6},
    {"structured_outputs": {"grammar": 's: "a" | t'}},
    {"structured_outputs": {"grammar": "(" * 10_000}},
    {"structured_outputs": {"json": {"type": ["string", "null"], "exclusiveMinimum": True}}},
    {"structured_outputs": {"json": {"allOf": [{"enum": list(range(20_000))}] * 3}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
)
DEAR_FIELDS: tuple[dict[str, object], ...] = (
    {"stop": ["a" * (1000 + i) for i in range(24)] + ["e" * (985 + i) for i in range(40)]},
    {"n": 128, "max_tokens": 4},
    {"bad_words": [f"{i} word" * 4 for i in range(64)]},
    {"logprobs": 5, "logit_bias": {str(i): 1 for i in range(300)}},
)
"""Valid, and as much work as a request may be."""
DEAR_GRAMMARS: tuple[dict[str, object], ...] = (
    {
        "structured_outputs": {"grammar": 'start: start start | "a" | ""'},
        "ignore_eos": False,
        "min_tokens": 28,
    },
    {"structured_outputs": {"regex": "(a?){60}a{60}"}, "ignore_eos": False},
)
"""As `DEAR_FIELDS`."""
HOSTILE_PARAMETERS: tuple[dict[str, object], ...] = (
    {"properties": {f"p{i}": {"type": "integer"} for i in range(430)}},
    {"properties": {f"p{i}": {"type": ["string", "integer"]} for i in range(200)}},
    {"properties": {"a": {"type": "string", "minLength": '0}/ | "x" | /b{1'}}},
    {"properties": {"a": {"type": "string", "pattern": 'a\\\\/ | "x" | /b'}}},
    {"properties": {"a": {"type": "string", "pattern": "^a|(b$)|[/]/"}}},
    {
        "properties": {"a": {"$ref": "#/$defs/a%20b"}},
        "$defs": {"a b": {"type": "string"}, "a%20b": {"items": {}}},
    },
    {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"allOf": [{"$ref": "#/$defs/b"}] * 9}}},
    {"properties": {"a": {"enum": [f"{i}" * 9 for i in range(9000)]}}},
    {"properties": {"a": {"type": "array", "items": {"type": "integer", "multipleOf": 99_991}}}},
)
"""Of a tool, for a format of calls that is no JSON."""
MIB = 1 << 20


def huge_bodies(mib: int) -> list[tuple[bytes, str]]:
    """Of nearly so many MiB, each for a path. A router takes 16."""
    half = mib * MIB // 2 - 100
    zeros = b"[" + b"0," * half + b"0]"
    deep = b"[" * half + b"]" * half
    one = json.dumps({"messages": [{"role": "user", "content": "word " * (200_000 * mib)}]}).encode()
    many = json.dumps({"messages": [{"role": "user", "content": "a"}] * (19_000 * mib)}).encode()
    chats = [one, many, b'{"messages": ' + zeros + b"}", b'{"messages": ' + deep + b"}", zeros]
    text = json.dumps("1 a" * (310_000 * mib)).encode()
    others = [
        (b'{"prompt": ' + text + b', "return_token_strs": true}', "/tokenize"),
        (b'{"tokens": ' + zeros + b"}", "/detokenize"),
        (b'{"prompt": ' + text + b', "truncate_prompt_tokens": 5, "max_tokens": 2}', "/v1/completions"),
        (one, "/v1/messages/count_tokens"),
        (b'{"input": ' + text + b"}", "/v1/responses/input_tokens"),
    ]
    return [*((body, "/v1/chat/completions") for body in chats), *others]


BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GARBAGE = (
    b"",
    b"GET / HT",
    BEGUN,
    BEGUN + b"Content-Length: 999999999999\r\n\r\n{",
    BEGUN + b"Content-Length: -1\r\n\r\n",
    BEGUN + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    BEGUN + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n" + b"{",
    BEGUN + b"".join(b"X-%d: y\r\n" % i for i in range(5000)),
    b"GET /" + b"x" * 100_000,
    PREFACE,
    PREFACE + os.urandom(200),
    wire.frame(wire.HELLO, b"")[:30],
    b"\0" * 300,
    os.urandom(300),
)
"""What never ends, and what the port does not understand."""
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    url: str
    grpc_port: int
    flooding: str
    """A key with limits of its own, as the next two. Most of the time it has reached them."""
    stalling: str
    """As `flooding`."""
    key: str
    """For what is to be looked at before it is refused."""
    workers: list[str]
    """Of both roles, their gRPC addresses."""
    ports: list[int]
    """All ports of the cluster."""
    pages: list[str]
    """URLs of metrics, status and health."""
    kv_port: int
    """Of a prefill worker."""
    secret: str
    """Only for an insider."""
    prompt: str
    seed: int = 0
    once: bool = False
    """Each way of each blow counts once, without pauses between them. A blow that is ahead waits for the
    others; one of `AT_ONCE` goes on at long intervals. Huge bodies are a quarter as large."""


@dataclass
class Attack:
    target: Target
    http: aiohttp.ClientSession
    rng: random.Random
    struck: Counter[str]
    """All blows that it may strike."""
    huge: list[tuple[bytes, str]]
    ways: Counter[str] = field(default_factory=Counter)
    """How many ways there are to strike them, where there are several."""
    rounds: int = 0
    """How often each of them was struck at least, in each way."""
    round_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Of the present round."""
    believed: Counter[str] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    held: dict[object, list[Callable[[], object]]] = field(default_factory=dict)
    listed: str = ""
    """The id of a response to many items."""
    who: bytes = b""
    """The identity with which an insider is welcome."""
    said: int = 0
    """Frames of an insider that did not end the lane."""

    def turn(self, blow: str, ways: Sequence[T]) -> T:
        """One way after the other."""
        self.ways[blow] = len(ways)
        return ways[self.struck[blow] % len(ways)]

    # ---------------------------------------------------------------- HTTP

    async def flood(self) -> None:
        """Prompts of any length and priority. The answer is read, left unread, or cut."""
        words = self.target.prompt.split()
        prompt = " ".join(self.rng.choices(words, k=self.rng.choice((5, 50, 400))))
        body = {"prompt": prompt, "max_tokens": 60, "stream": True, "ignore_eos": True}
        # None among the requests of other keys. Of its own, some would wait for the end of the attack.
        body |= {"priority": -self.rng.randrange(1 << 30), "timeout": 20}
        async with self._post(json.dumps(body).encode(), key=self.target.flooding) as response:
            match self.rng.randrange(3):
                case 0:
                    await response.read()
                case 1:
                    await asyncio.sleep(3)
                case _:
                    await response.content.readline()

    async def huge_bodies(self) -> None:
        with_key = [(*each, self.target.key) for each in self.huge]
        body, path, key = self.turn("huge_bodies", [*with_key, (*self.huge[0], "")])
        async with self._post(body, path, key=key) as response:
            await response.read()

    async def idle_connections(self) -> None:
        """Without a key."""
        for _ in range(50):
            _, writer = await asyncio.open_connection("127.0.0.1", int(self.target.url.rpartition(":")[2]))
            self._hold("idle", lambda writer=writer: end(writer), most=MOST_IDLE)

    async def listed_items(self) -> None:
        """Many clients list the items before one response, once it is there."""
        self.ways["listed_items"] = 2
        if not self.listed:
            items = [{"role": "user", "content": "a"}] * 200
            body = json.dumps({"input": items, "max_output_tokens": 1}).encode()
            async with self._post(body, "/v1/responses") as response:
                self.listed = (await response.json())["id"] if response.status == 200 else ""
                return
        url = f"{self.target.url}/v1/responses/{self.listed}/input_items?after=item_1&order=asc"
        headers = {"Authorization": f"Bearer {self.target.key}"}

        async def ask() -> None:
            async with self.http.get(url, headers=headers) as response:
                if response.status == 404:  # newer responses have taken its place
                    self.listed = ""
                await response.read()

        await asyncio.gather(*(ask() for _ in range(8)))

    async def false_fields(self) -> None:
        # Some are taken for the longest answer.
        false = {"prompt": "x", "max_tokens": 2, "timeout": 5, **self.turn("false_fields", FALSE_FIELDS)}
        async with self._post(json.dumps(false).encode()) as response:
            await response.read()

    async def dear_requests(self) -> None:
        await self._ask_dearly(DEAR_FIELDS)

    async def dear_grammars(self) -> None:
        await self._ask_dearly(DEAR_GRAMMARS)

    async def costly_schemas(self) -> None:
        """Each is another one, and the choices of a request are as many as there may be."""
        array = {
            "type": "array",
            "items": {"type": "integer", "multipleOf": self.rng.randrange(20_000, 99_991)},
        }
        fields = {"structured_outputs": {"json": array}, "n": 128, "max_tokens": 4}
        async with self._post(json.dumps({"prompt": "x", **fields}).encode()) as response:
            said = await response.text()
            assert response.status in (200, 400, 429), said

    async def composed_grammars(self) -> None:
        parameters = self.turn("composed_grammars", HOSTILE_PARAMETERS)
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        fields = {"tools": tools, "tool_choice": "required", "max_tokens": 20}
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        async with self._post(json.dumps(body).encode(), "/v1/chat/completions") as response:
            said = await response.text()
            assert response.status in (200, 400, 429), said

    async def _ask_dearly(self, ways: Sequence[dict[str, object]]) -> None:
        """In all ways at once."""
        for error in await asyncio.gather(*map(self._ask_for, ways), return_exceptions=True):
            if error is not None:
                raise error

    async def _ask_for(self, fields: dict[str, object]) -> None:
        dear = {"prompt": "x", "max_tokens": 30, "stream": True, "ignore_eos": True, **fields}
        async with self._post(json.dumps(dear).encode()) as response:
            said = await response.text()
            assert response.status in (200, 429), said

    async def false_bodies(self) -> None:
        bodies = (b"{", b"[" * 100_000, b"\x1f\x8b" + os.urandom(1000), b'{"prompt": "' + b"\xff" * 99)
        encodings: tuple[dict[str, str], ...] = ({}, {"Content-Encoding": "gzip"})
        body, encoding = self.turn("false_bodies", list(product(bodies, encodings)))
        async with self._post(body, **encoding) as response:
            await response.read()

    def _post(
        self, body: bytes, path: str = "/v1/completions", key: str | None = None, **headers: str
    ) -> Any:
        key = self.target.key if key is None else key
        headers |= {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        return self.http.post(self.target.url + path, data=body, headers=headers)

    async def unfinished_bodies(self) -> None:
        """Nearly 16 MiB of each, as far as the router reads them."""
        _, writer = await asyncio.open_connection("127.0.0.1", int(self.target.url.rpartition(":")[2]))
        self._hold("unfinished", lambda: end(writer))
        authorized = f"Authorization: Bearer {self.target.stalling}\r\nContent-Type: application/json\r\n"
        writer.write(BEGUN + authorized.encode() + b"Content-Length: %d\r\n\r\n" % (16 * MIB))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                for _ in range(15):
                    writer.write(bytes(MIB))
                    await writer.drain()

    async def garbage(self) -> None:
        """On every port."""
        said, port = self.turn("garbage", list(product(GARBAGE, self.target.ports)))
        await self._say(port, said)

    async def pages(self) -> None:
        """They are asked for again and again, by clients that read nothing, and by others."""
        page, reads = self.turn("pages", list(product(self.target.pages, (True, False))))
        if reads:
            async with self.http.get(page) as response:
                await response.read()
        else:
            address, _, path = page.removeprefix("http://").partition("/")
            asked = f"GET /{path} HTTP/1.1\r\nHost: {address}\r\n\r\n" * 200
            await self._say(int(address.rpartition(":")[2]), asked.encode())

    # ---------------------------------------------------------------- the router's gRPC

    async def false_messages(self) -> None:
        """With a key, a wrong one and none: bytes that are no message, and fields that are out of bounds."""
        fields: tuple[dict[str, Any], ...] = (
            {"temperature": 1e39},
            {"max_tokens": 2**32 - 1},
            {"n": 2**32 - 1},
            {"logprobs": 2**31},
            {"top_k": -5},
        )
        false = [inference.GenerateRequest(text="x", **field).SerializeToString() for field in fields]
        false += [os.urandom(200), false[0][:-1], b"\x12" + b"\xff" * 9]
        keys = ([("authorization", f"Bearer {key}")] for key in (self.target.key, "wrong"))
        await self._generate(*self.turn("false_messages", list(product(false, (*keys, [])))))

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
        metadata = [("authorization", f"Bearer {self.target.stalling}")]
        call = channel.unary_stream(GENERATE, None, None)(message.SerializeToString(), metadata=metadata)
        self._hold("unread", call.cancel, most=4)
        await asyncio.sleep(0.2)

    # ---------------------------------------------------------------- workers

    async def strange_calls(self) -> None:
        """Without TLS; with TLS, and no certificate or that of another secret."""
        address, method = self.rng.choice(self.target.workers), self.rng.choice(("GetStatus", "Attach"))
        message = worker.RouterMessage(hello=worker.RouterHello(router_id=os.urandom(16))).SerializeToString()
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream(WORKER + method, None, None)(message, timeout=10)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    self.believed["without TLS"] += 1
                    call.cancel()
                    break  # the next read would raise CancelledError
        host, _, port = address.rpartition(":")
        for secret in (None, STRANGER):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            if secret is not None:
                shown = certificate(secret)
                with tempfile.NamedTemporaryFile() as file:
                    file.write(shown.key + shown.chain)
                    file.flush()
                    context.load_cert_chain(file.name)
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(PREFACE + bytes(3) + b"\x04" + bytes(5))
            with contextlib.suppress(OSError):  # the alert
                async with asyncio.timeout(10):
                    if await reader.read(1):
                        self.believed["stranger"] += 1
            writer.close()

    # ---------------------------------------------------------------- KV

    async def half_handshakes(self) -> None:
        opened = wire.pack(["open", os.urandom(16), 0, 4, os.urandom(32), wire.identity("decode")])
        proof = wire.pack(["proof", os.urandom(32)])
        hello = wire.frame(wire.HELLO, opened)
        said = (b"", hello[:30], hello, hello + wire.frame(wire.HELLO, proof))
        await self._say(self.target.kv_port, self.turn("half_handshakes", said))

    async def bent_frames(self) -> None:
        kind = self.rng.randrange(12)
        said = (
            os.urandom(100),
            wire.frame(kind, b"", length=2**32 - 1),
            wire.frame(kind, os.urandom(100)),
            wire.frame(wire.HELLO, b"", version=255),
            wire.frame(wire.HELLO, b"\xdd" + struct.pack(">I", 2**32 - 1)),
            wire.frame(wire.HELLO, os.urandom(100), checksum=1),
        )
        await self._say(self.target.kv_port, self.turn("bent_frames", said))

    async def frames_of_an_insider(self) -> None:
        """It knows the secret, and says what no worker would say, once it has learned what a peer is. Beside
        other blows it is refused at times, and comes again until a lane has outlived a frame."""
        said = self.said
        async with asyncio.timeout(PATIENCE_S):
            while self.said == said:
                with contextlib.suppress(*REFUSED):
                    await asyncio.to_thread(self._inside)
                await asyncio.sleep(BLOWS["frames_of_an_insider"])

    def _inside(self) -> None:
        lane = wire.connect(self.target.kv_port, self.target.secret.encode(), who=self.who)
        with lane.sock:
            if not self.who:
                _, versions, *_, ranks, model, layout, dtype, slot = wire.unpack(lane.peer)
                about = [0, ranks, model, layout, dtype, slot]
                self.who = wire.pack(["receiver", versions, "insider", 1, *about])
                return
            frames = hostile_frames(Noise(self.rng, [os.urandom(16)]))
            for _, said in zip(range(FRAMES), frames, strict=False):
                lane.sock.sendall(said)
                if not drained(lane.sock):
                    return
                self.said += 1

    # ---------------------------------------------------------------- connections

    async def _say(self, port: int, said: bytes) -> None:
        """Opens a connection, says that, and keeps it as it is."""
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        self._hold(port, lambda: end(writer))
        writer.write(said)

    def _hold(self, kind: object, end: Callable[[], object], most: int = MOST_HELD) -> None:
        held = self.held.setdefault(kind, [])
        held.append(end)
        if len(held) > most:
            held.pop(0)()

    async def strike(self, name: str) -> None:
        """Again and again."""
        while True:
            try:
                await getattr(self, name)()
            except TimeoutError:
                self.unanswered[name] += 1
            except REFUSED:
                pass
            self.struck[name] += 1
            if min(count // max(1, self.ways[blow]) for blow, count in self.struck.items()) > self.rounds:
                self.rounds += 1
                print(flush=True)
                self.round_over.set()
                self.round_over = asyncio.Event()
            ahead = self.target.once and self.struck[name] // max(1, self.ways[name]) > self.rounds
            if ahead and name not in AT_ONCE:
                await self.round_over.wait()
            await asyncio.sleep(AHEAD_S if ahead else BLOWS[name] * (not self.target.once))


def end(writer: asyncio.StreamWriter) -> None:
    if not writer.transport.is_closing():
        writer.transport.abort()


async def main() -> None:
    raise_descriptor_limit()
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    target = msgspec.json.decode(await reader.readline(), type=Target)
    patience = aiohttp.ClientTimeout(PATIENCE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=patience) as http:
        blows = sys.argv[1:] or list(BLOWS)
        struck, bodies = Counter(dict.fromkeys(blows, 0)), huge_bodies(4 if target.once else 16)
        attack = Attack(target, http, random.Random(target.seed), struck, bodies)
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
    counts = (attack.struck, attack.unanswered, attack.believed, attack.said)
    print(json.dumps(dict(zip(("struck", "unanswered", "believed", "frames"), counts, strict=True))))


if __name__ == "__main__":
    asyncio.run(main())
