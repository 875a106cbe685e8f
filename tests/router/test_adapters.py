"""Adapters (LoRA): all workers load one or none does; requests name it, and it is part of names of KV."""

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.kv_names import prompt_hints, with_adapter
from baton.router.admission.keys import ApiKey
from baton.router.api.jobs import Job
from baton.router.endpoints import frontend
from baton.router.preparation.jobs import make_jobs
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.workers.adapters import KnownAdapters, LacksAdapters
from baton.router.workers.checks import RefusedWorker
from baton.rpc import worker_pb2 as pb
from baton.rpc.adapters import change_adapters
from baton.rpc.all_workers import NotDone
from baton.worker import messages
from baton.worker.service_process.adapters import WorkerAdapters
from baton.worker.service_process.grpc_service import done
from tests.fake_worker import SECRET, FakeWorker, Lanes
from tests.within import WITHIN

from .conftest import Cluster, make_cluster
from .test_workers import rewrite


class Adapting(FakeWorker):
    """Its adapters are those of a real service process. Those that its engine has: `loaded`, by fingerprint.

    `missing`: no such files are on its host. `contents`: of its files."""

    missing, contents, most = "", "", 2
    applies: asyncio.Event | None = None
    """Its engine waits for this event before it loads an adapter."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.about = pb.WorkerDescription(
            served_model_name="fake", max_adapters=self.most, model_fingerprint=self.model_fingerprint
        )
        self.draining = False
        self.loaded = dict[bytes, str]()
        self.adapters = WorkerAdapters(self, self, self.about)  # pyrefly: ignore[bad-argument-type]

    def fingerprint(self, name: str) -> bytes:
        return hashlib.blake2b(f"{name} {self.contents}".encode(), digest_size=16).digest()

    async def load_adapter(self, adapter: pb.Adapter) -> messages.AdapterLoaded:
        name, path = adapter.name, adapter.path
        if self.applies is not None:
            self.arrived.set()
            await self.applies.wait()
        if self.missing == name:
            return messages.AdapterLoaded(0, b"", f"there is no file {path}")
        self.loaded[self.fingerprint(name)] = path
        return messages.AdapterLoaded(0, self.fingerprint(name), "")

    async def send(self, message: messages.UnloadAdapter) -> None:
        del self.loaded[message.fingerprint]

    def broadcast(self, message: bytes) -> None:
        for outputs in self.outputs:
            outputs.put_nowait(pb.WorkerMessage.FromString(message))

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        described = await super().Describe(request, context)
        described.MergeFrom(self.about)
        return described

    async def SetAdapters(self, request: pb.AdapterSet, context: grpc.aio.ServicerContext) -> pb.AdapterSet:
        return await done(self.adapters.set(request), context)


@contextlib.asynccontextmanager
async def adapting(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> AsyncIterator[tuple[Cluster, list[Adapting]]]:
    key = ApiKey.of("admin", "trainer")
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0, admin_key=key) as cluster:
        pools = pb.POOL_PREFILL, pb.POOL_DECODE
        workers = [Adapting(pool, cluster.lanes, cluster.output_ids) for pool in pools]
        await cluster.start(*workers)
        rewrite(tmp_path / "workers", list(workers))
        await cluster.until(lambda: cluster.pool.complete and bool(cluster.pool.desk.decodes))
        yield cluster, workers


async def changed(cluster: Cluster, call: str, key: str = "trainer", **body: Any) -> tuple[int, str]:
    url, headers = f"{cluster.url}/v1/{call}_lora_adapter", {"Authorization": f"Bearer {key}"}
    async with cluster.http.post(url, json=body, headers=headers) as response:
        if response.status == 200:
            return response.status, await response.text()
        return response.status, (await response.json())["error"]["message"]


async def models(cluster: Cluster) -> dict[str, tuple[str, str | None]]:
    async with cluster.http.get(f"{cluster.url}/v1/models") as response:
        cards = (await response.json())["data"]
    return {card["id"]: (card["root"], card["parent"]) for card in cards}


@pytest.mark.all
async def test_an_adapter_is_a_model_of_all_workers(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = list[Job]()

    def kept(*args: Any, **given: Any) -> Iterator[list[Job]]:
        for made in make_jobs(*args, **given):
            jobs.extend(made)
            yield made

    monkeypatch.setattr(frontend, "make_jobs", kept)
    async with adapting(tokenizer, tmp_path) as (cluster, workers):
        [base] = await models(cluster)
        sql = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        assert (await changed(cluster, "load", "client", **sql))[0] == 401
        assert (await changed(cluster, "load", lora_name="sql", lora_path="adapters/sql"))[0] == 400
        assert (await changed(cluster, "load", **{**sql, "lora_name": base}))[0] == 400
        loaded = await changed(cluster, "load", **sql)
        assert loaded == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert await models(cluster) == {base: (base, None), "sql": ("/adapters/sql", base)}
        assert (await changed(cluster, "load", **sql))[0] == 400, "it has been loaded"

        prompt = list(range(100, 300))
        for asked in ("sql", base):
            status, answer = await cluster.post("/v1/completions", model=asked, prompt=prompt, max_tokens=4)
            assert (status, answer["model"]) == (200, asked)
        of_adapter, of_base = (job.chunks for job in jobs)
        salt = with_adapter(b"", workers[0].fingerprint("sql"))
        assert of_adapter == prompt_hints(prompt, b"", salt) != of_base == prompt_hints(prompt, b"", b"")
        fingerprint = workers[0].fingerprint("sql")
        for worker in workers:
            requests = [x.prefill.request or x.decode.request for x in worker.submitted]
            assert {request.adapter for request in requests} <= {fingerprint, b""}
            assert worker.loaded == {fingerprint: "/adapters/sql"}

        assert (await changed(cluster, "unload", lora_name="other"))[0] == 404
        unloaded = await changed(cluster, "unload", lora_name="sql")
        assert unloaded == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert list(await models(cluster)) == [base]
        assert not any(worker.loaded for worker in workers)
        status, answer = await cluster.post("/v1/completions", model="sql", prompt="Hello", max_tokens=4)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"missing": "sql"}, "decode 0 at .*: adapter sql: there is no file /adapters/sql"),
        ({"contents": "other"}, "the files at this path differ between the hosts"),
        (
            {"most": 0},
            "it loads no adapters: .* with --lora-modules or --advanced.max-loras",
        ),
    ],
)
async def test_all_workers_load_an_adapter_or_none(
    tokenizer: ModelTokenizer, tmp_path: Path, fault: dict[str, Any], said: str
) -> None:
    async with adapting(tokenizer, tmp_path) as (cluster, workers):
        for name, value in fault.items():
            setattr(workers[1], name, value)
        workers[1].about.max_adapters = workers[1].most
        status, text = await changed(cluster, "load", lora_name="sql", lora_path="/adapters/sql")
        assert status == 400
        assert text.endswith("The adapters are those of before.")
        assert re.search(said, text), text
        assert not any(worker.loaded or worker.about.adapters for worker in workers)
        assert len(await models(cluster)) == 1


@pytest.mark.all
async def test_a_worker_that_starts_loads_the_adapters_of_the_others(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    """Until then it gets no request, and clients can name the adapter all the time."""
    async with adapting(tokenizer, tmp_path) as (cluster, workers):
        await changed(cluster, "load", lora_name="sql", lora_path="/adapters/sql")
        started = Adapting(pb.POOL_DECODE, cluster.lanes, cluster.output_ids, index=1)
        started.applies = asyncio.Event()
        await cluster.start(started)
        rewrite(tmp_path / "workers", [*workers, started])
        await started.until(lambda w: w.described)
        assert len(cluster.pool.ready(pb.POOL_DECODE)) == 1
        assert "sql" in await models(cluster)
        started.applies.set()
        await cluster.until(lambda: len(cluster.pool.ready(pb.POOL_DECODE)) == 2)
        assert started.about.adapters == workers[0].about.adapters
        assert started.about.adapters_revision == workers[0].about.adapters_revision

        other = Adapting(pb.POOL_DECODE, cluster.lanes, cluster.output_ids, index=2)
        other.contents = "other"
        await cluster.start(other)
        rewrite(tmp_path / "workers", [*workers, started, other])
        said = "the files at /adapters/sql are not those of the other workers"
        await cluster.until(lambda: any(c.reason.endswith(said) for c in cluster.pool.connections))
        assert not other.loaded


async def test_a_request_ends_if_its_adapter_is_unloaded_before_it_starts(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with adapting(tokenizer, tmp_path) as (cluster, workers):
        await changed(cluster, "load", lora_name="sql", lora_path="/adapters/sql")
        for worker in workers:
            worker.fail = 1, pb.FAILURE_CODE_NO_ADAPTER
        status, answer = await cluster.post("/v1/completions", model="sql", prompt="Hello", max_tokens=4)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_of_two_callers_at_the_same_time_one_is_refused() -> None:
    workers = [Adapting(pb.POOL_DECODE, Lanes(), [1]) for _ in range(2)]
    for worker in workers:
        worker.applies = asyncio.Event()
        await worker.start()
    known = {worker.address: pb.AdapterSet() for worker in workers}

    async def load(name: str) -> None:
        wanted = [pb.Adapter(name=name, path=f"/{name}")]
        await change_adapters(known, wanted, SECRET, None, WITHIN)

    first = asyncio.create_task(load("one"))
    for worker in workers:
        await worker.until(lambda w: w.arrived.is_set())
    second = asyncio.create_task(load("two"))
    await asyncio.sleep(0)
    for worker in workers:
        assert worker.applies is not None
        worker.applies.set()
    await first
    with pytest.raises(NotDone):
        await second
    for worker in workers:
        assert [each.name for each in worker.about.adapters] == ["one"]
        await worker.kill()


async def test_a_worker_that_does_not_answer_in_time_is_named() -> None:
    worker = Adapting(pb.POOL_DECODE, Lanes(), [1])
    worker.applies = asyncio.Event()
    await worker.start()
    wanted = [pb.Adapter(name="one", path="/one")]
    with pytest.raises(NotDone) as raised:
        await change_adapters({worker.address: pb.AdapterSet()}, wanted, SECRET, None, 0.01)
    fault = raised.value.faults[worker.address]
    assert fault is not None
    assert fault.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    worker.applies.set()
    await worker.kill()


def test_what_clients_can_name_is_what_all_attached_workers_have() -> None:
    one, two = (
        pb.Adapter(name=name, path="/", fingerprint=name[:1].encode() * 16) for name in ("one", "two")
    )
    known = KnownAdapters()

    def described(*adapters: pb.Adapter, revision: int, most: int = 2) -> pb.WorkerDescription:
        return pb.WorkerDescription(adapters=adapters, adapters_revision=revision, max_adapters=most)

    known.check(described(one, revision=0))
    known.told("a", pb.AdapterSet(adapters=[one]))
    known.told("b", pb.AdapterSet(adapters=[one]))
    assert [*known.served] == ["one"]
    with pytest.raises(RefusedWorker, match="not those of the other workers"):
        known.check(described(two, revision=0))
    known.told("a", pb.AdapterSet(revision=1, adapters=[one, two]))
    assert [*known.served] == ["one"]
    known.told("b", pb.AdapterSet(revision=1, adapters=[one, two]))
    assert [*known.served] == ["one", "two"]
    with pytest.raises(LacksAdapters):
        known.check(described(one, revision=0))
    with pytest.raises(RefusedWorker, match="room for 1 adapters, and the others have 2"):
        known.check(described(revision=0, most=1))
    known.told("a", pb.AdapterSet(revision=2, adapters=[two]))
    assert [*known.served] == ["two"]
    known.left("a")
    known.left("b")
    assert [*known.served] == ["two"], "requests wait for workers"
    nameless = pb.Adapter(name="a b", fingerprint=b"a" * 16)
    for _ in range(2):  # what is refused never counts as known
        with pytest.raises(RefusedWorker, match="without a valid name"):
            known.told("a", pb.AdapterSet(revision=3, adapters=[nameless]))
        with pytest.raises(RefusedWorker, match="without a valid name"):
            known.check(described(nameless, revision=3))


def test_an_adapter_is_part_of_names_and_the_salt_of_a_key_stays() -> None:
    prompt, key = list(range(128)), b"k" * 16
    salts = [with_adapter(key, b""), with_adapter(key, b"a" * 16), with_adapter(key, b"b" * 16), b""]
    salts += [with_adapter(b"", b"a" * 16), with_adapter(key + b"field", b"a" * 16)]
    assert len({tuple(prompt_hints(prompt, b"r" * 32, salt)) for salt in salts}) == len(salts)
    assert {salt[:16] for salt in salts[:3]} == {key}
    assert max(map(len, salts)) <= 64
