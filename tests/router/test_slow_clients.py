"""Clients that send or read too slowly are cut off, without an effect on other clients."""

import asyncio
import contextlib
import json
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest

from baton.router import active_request
from baton.router.admission.keys import ApiKey
from baton.router.generation import generation
from baton.router.generation.output import MAX_TAKEN, Consumers, Delta, Item, TokenQueue
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import inference_pb2 as pb
from baton.rpc.stubs import InferenceStub
from tests.loop_clock import Clock
from tests.within import WITHIN

from .conftest import TEXT, Cluster, make_cluster

PATIENT = {"client_timeout": 200.0, "request_timeout": 4e6}
"""Of a router whose timeout for clients passes by `passing` alone."""

# Twenty alternatives for each of 7,000 tokens: more than the socket buffers hold.
LONG = {"prompt": "Hello", "max_tokens": 7000, "ignore_eos": True, "logprobs": 20, "stream": True}


async def passing(clock: Clock, condition: Callable[[], object]) -> None:
    """Lets the time of clients pass, whenever the router may wait for one, until this holds."""
    while not condition():
        await clock.forward(PATIENT["client_timeout"])
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection with a small receive buffer. It reads only when the test does."""
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()


def request(body: bytes, length: int | None = None, key: str = "") -> bytes:
    sent = len(body) if length is None else length
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    if key:
        head += f"Authorization: Bearer {key}\r\n".encode()
    return head + b"Content-Length: %d\r\n\r\n%s" % (sent, body)


async def test_headers_that_do_not_arrive(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, keep_alive=0.1) as cluster:
        for begun in (b"", b"GET /health HTTP/1.1\r\nHost:", request(b"", 0)[:-2]):
            async with connected(cluster) as (reader, writer), asyncio.timeout(WITHIN):
                writer.write(begun)
                assert await reader.read() == b"", "the router closed the connection"
        assert (await cluster.complete())["choices"][0]["text"] == TEXT


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize(
    "method",
    ["baton.v1.Inference/Generate", "grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"],
)
async def test_a_grpc_message_that_does_not_arrive(
    tokenizer: ModelTokenizer, tmp_path: Path, method: str
) -> None:
    async with make_cluster(tokenizer, tmp_path, client_timeout=0.1) as cluster, cluster.channel() as channel:
        call = channel.stream_stream(f"/{method}", bytes, bytes)(silence(), timeout=WITHIN)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not come within 0.1 s" in (await call.details() or "")


async def test_a_body_that_does_not_arrive(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, client_timeout=0.3) as cluster:
        async with connected(cluster) as (reader, writer), asyncio.timeout(WITHIN):
            writer.write(request(b'{"prompt": "Hel', length=1000))
            status = await reader.readline()
            assert status == b"HTTP/1.1 408 Request Timeout\r\n"
            await reader.readuntil(b"\r\n\r\n")
            result = json.loads(await reader.read(4096))
            assert result["error"]["code"] == "request_timeout"
        assert not cluster.prefills[0].submitted


async def test_bodies_that_arrive_have_a_bound_in_all_and_for_each_key(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    """Each client sends most of its body, and then nothing."""
    keys, size = (ApiKey.of("flood", "k1"), ApiKey.of("other", "k2")), 20_000
    async with (
        make_cluster(tokenizer, tmp_path, api_keys=keys, max_body_bytes=size) as cluster,
        contextlib.AsyncExitStack() as clients,
    ):
        admission, sent = cluster.router.services.admission, size * 9 // 10
        account = cluster.router.frontend.authorize("Bearer k1")
        readers = []
        for waiting in range(1, 16):
            reader, writer = await clients.enter_async_context(connected(cluster))
            writer.write(request(bytes(sent), length=size, key="k1"))
            await cluster.until(lambda n=waiting: account.body_bytes == n * sent)
            readers.append(reader)
        reader, writer = await clients.enter_async_context(connected(cluster))
        writer.write(request(bytes(sent), length=size, key="k1"))
        assert await reader.readline() == b"HTTP/1.1 429 Too Many Requests\r\n"
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Retry-After: 1\r\n" in head
        assert b"rate_limit_exceeded" in await reader.read(4096)
        assert admission.body_bytes == 15 * sent
        assert f'baton:body_bytes{{model_name="fake",role="router"}} {15 * sent}.0' in await cluster.metrics()
        header = {"Authorization": "Bearer k2"}
        body = {"prompt": "x" * 1000, "max_tokens": 2}
        async with cluster.http.post(cluster.url + "/v1/completions", json=body, headers=header) as response:
            assert response.status == 200, "another key is served"
        await clients.aclose()
        await cluster.until(lambda: admission.body_bytes == account.body_bytes == account.requests == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_log_probabilities_that_wait_for_the_end_of_an_answer_count_as_bodies(
    tokenizer: ModelTokenizer, tmp_path: Path, path: str
):
    """Else the answers of one key would take the router's memory. A stream keeps none."""
    asked: dict[str, Any] = {
        "/v1/completions": {"prompt": "x", "logprobs": 2, "max_tokens": 60, "n": 8},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2,
            "max_tokens": 60, "n": 8,
        },
    }[path]  # fmt: skip
    async with make_cluster(tokenizer, tmp_path, max_body_bytes=300) as cluster:
        admission = cluster.router.services.admission
        status, answer = await cluster.post(path, **asked, ignore_eos=True)
        assert status == 429, answer
        assert "log probabilities count" in answer["error"]["message"]
        await cluster.until(lambda: admission.body_bytes == 0)
        async with cluster.http.post(cluster.url + path, json={**asked, "stream": True}) as response:
            assert response.status == 200
            assert "log probabilities count" not in await response.text()
        await cluster.until(lambda: admission.body_bytes == 0)


async def test_grpc_messages_that_take_long_count_as_the_largest(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, max_body_bytes=20_000) as cluster:
        admission, grpc_address = cluster.router.services.admission, cluster.router.grpc_address
        assert grpc_address is not None
        async with grpc.aio.insecure_channel(grpc_address) as channel:
            generate = channel.stream_stream("/baton.v1.Inference/Generate", bytes, bytes)
            silent = [generate(silence()) for _ in range(16)]
            await cluster.until(lambda: admission.body_bytes == 16 * 20_000)
            refused = generate(silence())
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ("retry-after", "1") in list(await refused.trailing_metadata())
            message = pb.GenerateRequest(text="Hello", max_tokens=2)
            for call in silent[:1]:
                call.cancel()
            await cluster.until(lambda: admission.body_bytes == 15 * 20_000)
            answers = [answer async for answer in InferenceStub(channel).Generate(message)]
            assert len(answers) == 3, "a message that comes at once counts as long as it is"
            for call in silent:
                call.cancel()
            await cluster.until(lambda: admission.body_bytes == 0)


async def test_grpc_checks_the_key_before_the_message(tokenizer: ModelTokenizer, tmp_path: Path):
    async with (
        make_cluster(tokenizer, tmp_path, api_keys=(ApiKey.of("a", "secret"),)) as cluster,
        cluster.channel() as channel,
    ):
        call = channel.stream_stream("/baton.v1.Inference/Generate", bytes, bytes)(silence(), timeout=WITHIN)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.cases(1)
@pytest.mark.parametrize("unread", [50, 10**9])
async def test_a_stream_that_the_client_does_not_read(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, unread: int
):
    """It ends after the timeout, or earlier if too many tokens wait. Both workers are free then."""
    monkeypatch.setattr(active_request, "MAX_UNREAD_TOKENS", unread)
    async with make_cluster(tokenizer, tmp_path, **PATIENT) as cluster:
        cluster.decodes[0].step_seconds = 0.0005
        async with connected(cluster) as (reader, writer):
            writer.write(request(json.dumps(LONG).encode()))
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            await cluster.decodes[0].until(lambda w: w.submitted)
            other = await cluster.complete()
            assert other["choices"][0]["text"] == TEXT
            if unread > 50:
                await passing(clock, lambda: not cluster.router.services.active)
            else:
                await cluster.until(lambda: all(not c.attempts for c in cluster.pool.connections))
                raw = await reader.read(1 << 24)
                while chunk := await reader.read(1 << 20):
                    raw = raw[-4096:] + chunk
                    if raw.endswith(b"0\r\n\r\n"):
                        break
                assert b"left too much of its response unread" in raw


@pytest.mark.all
async def test_a_call_that_the_client_does_not_read(
    tokenizer: ModelTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
):
    async with make_cluster(tokenizer, tmp_path, **PATIENT) as cluster, cluster.channel() as channel:
        asked = pb.GenerateRequest(text="Hello", max_tokens=7000, ignore_eos=True, logprobs=20)
        call = InferenceStub(channel).Generate(asked)
        assert await call.read()
        await passing(clock, lambda: not cluster.router.services.active)
        await cluster.idle()
        # gRPC itself may log that it cannot send the status behind a write that is pending.
        logged = [record for record in caplog.records if not record.name.startswith("grpc.")]
        assert not [record for record in logged if record.exc_info], "no defect is logged"
        call.cancel()


@pytest.mark.all
async def test_the_prompts_of_a_slow_reader_do_not_delay_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """A request leaves the window when its first token is computed, not when it is read."""
    reads, take = asyncio.Event(), TokenQueue.take

    async def slow_take(token_queue: TokenQueue, timeout: float) -> list[Item]:
        await reads.wait()
        return await take(token_queue, timeout)

    monkeypatch.setattr(TokenQueue, "take", slow_take)
    await cluster.full(*cluster.prefills)  # they decode none
    slow = asyncio.create_task(cluster.complete(prompt=[[5] * 3000] * 3, max_tokens=2))
    await cluster.decodes[0].until(lambda w: len(w.submitted) == 3)
    await cluster.until(lambda: cluster.router.services.admission.waiting_tokens == 0)
    reads.set()
    assert len((await slow)["choices"]) == 3


async def test_a_queue_is_full_with_more_than_its_limit():
    full = asyncio.Event()
    token_queue = TokenQueue(2, full.set, Consumers())
    for is_full in (False, False, True):
        token_queue.put(0, Delta(1))
        await asyncio.sleep(0)
        assert full.is_set() is is_full


async def test_a_long_backlog_is_taken_in_parts():
    """Otherwise writing thousands of tokens for a client that reads again would block the event loop."""
    token_queue, others = TokenQueue(10_000, lambda: None, Consumers()), 0
    for i in range(1000):
        token_queue.put(i, Delta(i))

    async def count() -> None:
        nonlocal others
        while True:
            await asyncio.sleep(0)
            others += 1

    counting = asyncio.create_task(count())
    taken: list[int] = []
    while len(taken) < 1000:
        before, items = others, await token_queue.take(1.0)
        assert len(items) <= MAX_TAKEN
        assert others > before or not taken or len(taken) + len(items) == 1000
        taken += [index for index, _ in items]
    counting.cancel()
    assert taken == list(range(1000))


async def test_what_comes_at_once_is_consumed_in_parts_and_in_order():
    token_queue, got, flushed = TokenQueue(10_000, lambda: None, Consumers()), list[int](), list[int]()

    def flush(now: float) -> bool:
        flushed.append(len(got))
        return len(got) < 300

    token_queue.consume(lambda index, item: got.append(index), flush)
    taking = asyncio.create_task(token_queue.take(WITHIN))
    await asyncio.sleep(0)
    for i in range(300):
        token_queue.put(i, Delta(i))
    assert await taking == [], "they were consumed"
    assert got == list(range(300))
    assert flushed == [MAX_TAKEN, 2 * MAX_TAKEN, 300]
    token_queue.put(7, Delta(7))
    assert await token_queue.take(WITHIN) == [(7, Delta(7))], "it came while nothing waited"


@pytest.mark.parametrize("fails_in", ["add", "flush"])
async def test_a_defect_of_a_consumer_ends_the_task_that_waits(fails_in: str):
    token_queue = TokenQueue(10_000, lambda: None, Consumers())

    def defect(*_: object) -> Any:
        raise RuntimeError("a defect")

    def nothing(*_: object) -> Any:
        return True

    add, flush = (defect, nothing) if fails_in == "add" else (nothing, defect)
    token_queue.consume(add, flush)
    taking = asyncio.create_task(token_queue.take(WITHIN))
    await asyncio.sleep(0)
    token_queue.put(0, Delta(0))
    token_queue.put(0, Delta(1))
    with pytest.raises(RuntimeError, match="a defect"):
        await taking


@pytest.mark.all
async def test_a_whole_response_keeps_no_deltas(cluster: Cluster, deltas: Collection[Delta]):
    decode = cluster.decodes[0]
    decode.steps = asyncio.Semaphore(50)
    asked = asyncio.create_task(cluster.complete(**(LONG | {"stream": False})))
    await cluster.until(lambda: any(each.usage().completion_tokens >= 50 for each in cluster.active))
    assert 0 < len(deltas) < 25, "not all 50"
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    decode.steps = None


@pytest.mark.all
@pytest.mark.parametrize("endpoint", ["http", "grpc"])
async def test_a_stream_keeps_no_sent_deltas(cluster: Cluster, endpoint: str, deltas: Collection[Delta]):
    decode = cluster.decodes[0]
    decode.steps = asyncio.Semaphore(1)
    async with contextlib.AsyncExitStack() as stack:
        if endpoint == "http":
            response = await stack.enter_async_context(
                cluster.http.post(cluster.url + "/v1/completions", json=LONG)
            )
            for _ in range(50):
                assert await response.content.readuntil(b"\n\n")
                decode.steps.release()
        else:
            channel = grpc.aio.insecure_channel(cluster.router.grpc_address or "")
            await stack.enter_async_context(channel)
            asked = pb.GenerateRequest(text="Hello", max_tokens=7000, ignore_eos=True, logprobs=20)
            call = InferenceStub(channel).Generate(asked)
            tokens = 0
            while tokens < 50:
                message = await call.read()
                assert isinstance(message, pb.GenerateResponse)
                tokens += len(message.deltas)
                decode.steps.release()
            call.cancel()
        assert 0 < len(deltas) < 25, "not all 50"
    decode.steps = None


class CountedDelta(Delta, weakref=True, eq=False):
    """The collector of garbage does not track deltas, so it cannot name them."""

    alive: ClassVar[weakref.WeakSet["CountedDelta"]] = weakref.WeakSet()

    def __post_init__(self) -> None:
        self.alive.add(self)


@pytest.fixture
def deltas(monkeypatch: pytest.MonkeyPatch) -> Collection[Delta]:
    """Those that are alive."""
    monkeypatch.setattr(generation, "Delta", CountedDelta)
    return CountedDelta.alive
