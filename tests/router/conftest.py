"""A real router with fake workers, and HTTP clients for it."""

import asyncio
import contextlib
import functools
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import grpc
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.router.active_request import ActiveRequest
from baton.router.api.jobs import SamplingDefaults
from baton.router.config import RouterConfig
from baton.router.preparation.child import fork_server
from baton.router.server import RunningRouter, running
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from baton.router.workers.pool import WorkerPool
from baton.router.workers.worker import Worker
from baton.rpc import worker_pb2 as pb
from baton.rpc.tls import TlsFiles
from baton.rpc.token_ids import unpacked_ids
from tests.fake_worker import SECRET, FakeWorker, Lanes
from tests.within import eventually

from .routers import TEXT, forked_roles, start  # noqa: F401  fixtures

NO_DEFAULTS = SamplingDefaults()

THINKING_TEMPLATE = """
{%- if tools %}<tool_call></tool_call>{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
THOUGHT, ANSWER = "\nIt is a tag, a < b.\n", "\n\nA mark."
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@functools.lru_cache(8)
def compiled(grammar: str) -> LLMatcher:
    return LLMatcher(LLTokenizer("byte"), grammar, log_level=0)


def accepts(grammar: str, text: str) -> bool:
    """Whether workers take `text` as the whole output."""
    matcher = compiled(grammar).deep_copy()
    said = text.encode()
    return matcher.try_consume_tokens(list(said)) == len(said) and matcher.is_accepting()


_forks: dict[int, int] = {}
"""Sockets to processes that fork children, by the id() of their tokenizer."""


@contextlib.contextmanager
def shared_forks(tokenizer: ModelTokenizer) -> Iterator[None]:
    """Gives all routers of `make_cluster` with this tokenizer one process that forks their children, as the
    router processes of a host have it. To start it takes half a second of CPU time."""
    server = fork_server("baton tests", tokenizer)
    process = server.spawn()
    try:
        _forks[id(tokenizer)] = server.fd
        yield
    finally:
        del _forks[id(tokenizer)]
        process.kill()
        process.wait()
        asyncio.run(server.close())


@pytest.fixture(scope="session")
def tokenizer(embedded_model_path: Path) -> Iterator[ModelTokenizer]:
    made = load_tokenizer(str(embedded_model_path))
    with shared_forks(made):
        yield made


def forks_of(tokenizer: ModelTokenizer) -> int:
    """The socket to the process that `shared_forks` has started. Children that check grammars need no
    tokenizer, so it may serve a cluster with another tokenizer if the bodies are small."""
    return _forks[id(tokenizer)]


def encode_chat(tokenizer: ModelTokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """The token ids of a chat, as the router makes them."""
    return tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory, tokenizer: ModelTokenizer) -> Path:
    """The same model as a Hugging Face directory, which loads much faster."""
    path = tmp_path_factory.mktemp("model")
    tokenizer._tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    described = {"eos_token": {"content": "<|im_end|>"}, "chat_template": tokenizer.info["chat_template"]}
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


@pytest.fixture(scope="session")
def small_directory(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Path:
    """The same with the single bytes as its vocabulary, which loads at once."""
    path = tmp_path_factory.mktemp("small") / "model"
    shutil.copytree(directory, path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({byte: number for number, byte in enumerate(alphabet)}, [])
    made = Tokenizer(model)
    made.add_special_tokens(["<|im_end|>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def thinking_path(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with Qwen 3's tokens and template."""
    path = tmp_path_factory.mktemp("thinking")
    for file in directory.iterdir():
        (path / file.name).symlink_to(file)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    (path / "tokenizer.json").unlink()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return path


@pytest.fixture(scope="session")
def thinking_tokenizer(thinking_path: Path) -> Iterator[ModelTokenizer]:
    made = load_tokenizer(str(thinking_path))
    with shared_forks(made):
        yield made


@dataclass
class Cluster:
    """Fake workers behind a router that listens on a real port."""

    router: RunningRouter
    http: aiohttp.ClientSession
    tokenizer: ModelTokenizer
    lanes: Lanes
    output_ids: list[int]
    workers: list[FakeWorker] = field(default_factory=list)
    late: list[FakeWorker] = field(default_factory=list)
    """Of `start`."""

    async def start(self, *workers: FakeWorker) -> None:
        """Starts workers that the router hears of later, if at all. They end with the cluster."""
        for worker in workers:
            self.late.append(await worker.start())

    @property
    def url(self) -> str:
        return self.router.url

    def channel(self) -> grpc.aio.Channel:
        """To its gRPC API."""
        assert self.router.grpc_address is not None
        return grpc.aio.insecure_channel(self.router.grpc_address)

    @property
    def pool(self) -> WorkerPool:
        return self.router.services.pool

    @property
    def prefills(self) -> list[FakeWorker]:
        return [w for w in self.workers if w.first_pool == pb.POOL_PREFILL]

    @property
    def decodes(self) -> list[FakeWorker]:
        return [w for w in self.workers if w.first_pool == pb.POOL_DECODE]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Polls for a state of the router that no event announces."""
        await eventually(condition)

    async def rooms(self, blocks: Mapping[FakeWorker, int]) -> None:
        """Makes workers report so many free blocks, and waits until the router knows it."""
        for worker, free in blocks.items():
            worker.status.blocks_free = free
            worker.report()
        wanted = {worker.address: free for worker, free in blocks.items()}
        await self.until(
            lambda: all(
                c.status.blocks_free == wanted.get(c.address, c.status.blocks_free)
                for c in self.router.services.pool.connections
            )
        )

    async def full(self, *workers: FakeWorker) -> None:
        """Without arguments: all workers."""
        await self.rooms(dict.fromkeys(workers or self.workers, 0))

    async def heard(self, prefill_id: bytes) -> None:
        """Waits until the router has the prefill's token. Real KV comes later; fake KV might come earlier.

        Then `usage` would miss the number of cached tokens, which only prefill reports.
        """
        connections = self.router.services.pool.connections
        while any((attempt := c.attempts.get(prefill_id)) and attempt.work for c in connections):  # noqa: ASYNC110
            await asyncio.sleep(0.0002)

    @property
    def active(self) -> list[ActiveRequest]:
        """The requests that generate."""
        return [abort.__self__ for abort in self.router.services.active._generating]  # type: ignore[attr-defined]

    async def idle(self) -> None:
        """Waits until the router holds no attempt, no waiting generation and no waiting token."""
        services = self.router.services
        await self.until(
            lambda: (
                not services.active
                and not len(services.admission.queue)
                and not services.parked.without_worker
                and services.admission.waiting_tokens == services.admission.uncached_tokens == 0
                and all(not c.attempts for c in services.pool.connections)
                and all(load.router_requests == 0 for load in services.pool.desk.decodes)
            )
        )

    async def expire(self, timer: Literal["deadline", "worker"] = "deadline", *, tokens: int = 1) -> None:
        """Ends this timer of each generation. "deadline": as soon as a client has had so many tokens."""
        if timer == "deadline":
            await self.until(lambda: any(each.usage().completion_tokens >= tokens for each in self.active))
        waits = [generation._waits for each in self.active for generation in each._generations]
        handles = [getattr(each, f"_{timer}_timer") for each in waits]
        for handle in filter(None, handles):
            handle._run()

    @property
    def sent(self) -> pb.Request:
        """The last request that a prefill worker got."""
        return self.prefills[0].submitted[-1].prefill.request

    @property
    def prompt(self) -> str:
        """The text of its prompt."""
        return self.tokenizer.decode(list(unpacked_ids(self.sent.prompt_ids)), skip_special_tokens=False)

    async def post(
        self, path: str, headers: Mapping[str, str] | None = None, /, **body: Any
    ) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    def connection(self, worker: FakeWorker) -> Worker:
        """What the router knows of a worker that is listed."""
        return self.router.services.pool.listed[worker.address]

    async def get(self, path: str, expected: int = 200) -> Any:
        """Returns the JSON or the text of a response with this status."""
        async with self.http.get(self.url + path) as response:
            assert response.status == expected, await response.text()
            is_json = response.content_type == "application/json"
            return await response.json() if is_json else await response.text()

    async def metrics(self) -> str:
        return await self.get("/metrics")

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, result = await self.post("/v1/completions", **{"prompt": "Hello", "max_tokens": 200, **body})
        assert status == 200, result
        return result

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Returns the events of a stream without [DONE], which must be the last."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            raw = (await response.read()).decode()
        lines = [line for line in raw.split("\n\n") if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    async def typed_events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Returns the events of a stream in which each event has its type as its name."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            raw = (await response.read()).decode()
        events = []
        for lines in raw.removesuffix("\n\n").split("\n\n"):
            if not lines.startswith(":"):
                name, data = lines.split("\n")
                events.append(json.loads(data.removeprefix("data: ")))
                assert name == f"event: {events[-1]['type']}"
        return events


@contextlib.asynccontextmanager
async def make_cluster(
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    text: str = TEXT,
    wait: bool = True,
    ends_idle: bool = True,
    secret: bytes = SECRET,
    worker_tls: TlsFiles | None = None,
    new_worker: Callable[..., FakeWorker] = FakeWorker,
    defaults: SamplingDefaults = NO_DEFAULTS,
    **config: Any,
) -> AsyncIterator[Cluster]:
    """`wait`: until the router has all workers. `ends_idle`: it holds nothing in the end."""
    lanes, output_ids = Lanes(), [*tokenizer.encode(text), 2]
    workers = [
        new_worker(pool, lanes, output_ids, index=i, tls=worker_tls)
        for pool, count in ((pb.POOL_PREFILL, prefill), (pb.POOL_DECODE, decode))
        for i in range(count)
    ]
    for worker in workers:
        await worker.start()
    workers_file = tmp_path / "workers"
    workers_file.write_text("".join(f"{worker.address}\n" for worker in workers))
    config = {"grpc_port": 0, "forks_fd": _forks.get(id(tokenizer)), **config}
    made = RouterConfig(model="fake", secret=secret, port=0, workers_file=str(workers_file), **config)
    async with running(made, tokenizer, defaults) as router, aiohttp.ClientSession() as http:
        cluster = Cluster(router, http, tokenizer, lanes, output_ids, workers)
        for worker in cluster.workers:
            worker.transfer = cluster.heard
        if wait:
            pool = router.services.pool
            await cluster.until(lambda: len(pool.ready(pb.POOL_PREFILL)) == prefill)
            await cluster.until(lambda: len(pool.ready(pb.POOL_DECODE)) == decode)
            await cluster.until(lambda: all(worker.attached for worker in workers))
        try:
            yield cluster
            if ends_idle:
                await cluster.idle()
        finally:
            for worker in [*workers, *cluster.late]:
                await worker.kill()


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """One worker of each role."""
    async with make_cluster(tokenizer, tmp_path) as made:
        yield made


@pytest.fixture
async def pair(tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two workers of each role."""
    async with make_cluster(tokenizer, tmp_path, prefill=2, decode=2) as made:
        yield made


@pytest.fixture
async def thinking(thinking_tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A model that thinks, writes some text, and calls a tool."""
    text = f"<think>{THOUGHT}</think>{ANSWER}{CALL}"
    async with make_cluster(thinking_tokenizer, tmp_path, text=text) as made:
        yield made


async def prefills_at(cluster: Cluster, speed: float) -> None:
    """Prefill workers report that they compute so many tokens a second."""
    for worker in cluster.prefills:
        worker.status.prefill_tokens_per_s = speed
        worker.report()
    known = len(cluster.prefills) * speed
    await cluster.until(lambda: cluster.pool.desk.loads.tokens_per_s() == known)
