"""Weights that were replaced: workers that start later get them, and answers tell their versions."""

import asyncio
import contextlib
import gc
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from safetensors.torch import load_file

from baton.cluster.options.clients import EndpointOptions
from baton.cluster.tools import weights
from baton.router.admission.keys import ApiKey, api_keys
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.workers import roster
from baton.rpc import inference_pb2
from baton.rpc import worker_pb2 as pb
from baton.rpc.all_workers import NotDone
from baton.rpc.pools import in_turns
from baton.rpc.weights import named, replace_weights
from baton.weights import RefusedUpdate, UnfinishedUpdate, Weights
from tests.fake_worker import SECRET, FakeWorker, Lanes
from tests.loop_clock import Clock
from tests.within import within

from .conftest import Cluster, make_cluster
from .test_grpc import generate
from .test_workers import rewrite

NEWEST = pb.StageWeights(path="/step-200", version="v2", named_at=2)
OLDER = pb.StageWeights(path="/step-100", version="v1", named_at=1)

TRANSFER = (
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
)  # fmt: skip


class Trained(FakeWorker):
    """It takes the weights that it is given. `spoilt`: other ones are at the path now."""

    weights = pb.StageWeights()
    staged = pb.StageWeights()
    spoilt, missing = False, ""
    reads: asyncio.Event | None = None
    """It waits for this event before it has read weights."""
    applies: asyncio.Event | None = None
    """It waits for this event before it applies weights."""
    asked = False
    """To apply weights."""
    peer, wanted = "", ""
    """The worker that has the weights that were staged last, and their fingerprint."""
    staged_files: Sequence[str] = ()
    paused_within: Sequence["pb.Pause"] = ()

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        described = await super().Describe(request, context)
        described.tensor_parallel_size = 2 if self.first_pool == pb.POOL_DECODE else 1
        if self.weights.version:
            found = "w3" if self.spoilt else "w2"
            described.model_fingerprint = f"model=m1; weights={found}; version={self.weights.version}"
            described.weights.CopyFrom(self.weights)
        else:
            described.model_fingerprint = "model=m1; weights=w1"
        return described

    async def ReplaceWeights(
        self, commands: AsyncIterator[pb.WeightsCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WeightsReport]:
        weights = (await anext(commands)).stage
        if self.missing:  # after the read, as real workers: an earlier status is lost at times (grpc#36066)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.missing)
        self.peer, self.wanted = weights.peer, weights.fingerprint
        weights.ClearField("peer")
        weights.ClearField("fingerprint")
        self.staged_files = sorted(file.name for file in Path(weights.path).glob("model*"))
        self.staged = weights
        self.arrived.set()
        try:
            if self.reads is not None:
                await self.reads.wait()
            yield pb.WeightsReport(bytes=100, seconds=1.5)
            assert (await anext(commands)).close
            yield pb.WeightsReport()
            command = await anext(commands)
        finally:
            self.staged = pb.StageWeights()
            self.arrived.set()
        assert command.apply
        self.paused_within = [self.status.pause]
        weights.version = command.version or weights.version
        self.asked = True
        self.arrived.set()
        if self.applies is not None:
            await self.applies.wait()
        self.weights = weights
        yield pb.WeightsReport()


async def change(worker: Trained, context: Any = None) -> None:
    """The worker gets the newest weights in a pause that keeps KV, and tells routers on their streams."""
    worker.weights = NEWEST
    described = await worker.Describe(pb.DescribeRequest(), context)
    described.ClearField("status")
    for outputs in worker.outputs:
        outputs.put_nowait(pb.WorkerMessage(description=described))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({}, ""),
        ({"spoilt": True}, "in: weights (fake, there fake)"),
        ({"missing": "no such file"}, "cannot take the weights of the other workers: no such file"),
    ],
)
async def test_a_worker_that_starts_gets_the_weights_of_the_others(
    tokenizer: ModelTokenizer, tmp_path: Path, fault: dict[str, Any], reason: str
):
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0) as cluster:
        first = Trained(pb.POOL_PREFILL, cluster.lanes, cluster.output_ids)
        started = Trained(pb.POOL_DECODE, cluster.lanes, cluster.output_ids)
        first.weights = NEWEST
        for name, value in fault.items():
            setattr(started, name, value)
        await cluster.start(first, started)
        rewrite(tmp_path / "workers", [first])
        await cluster.until(lambda: bool(cluster.pool.desk.prefills))
        rewrite(tmp_path / "workers", [first, started])
        if not fault:
            await cluster.until(lambda: bool(cluster.pool.desk.decodes))
            assert started.weights == NEWEST
            assert (started.peer, started.wanted) == (first.address, "model=m1; weights=w2; version=v2")
            await cluster.complete()
        else:
            await cluster.until(lambda: any(c.reason.endswith(reason) for c in cluster.pool.connections))
            assert not cluster.pool.desk.decodes


@pytest.mark.cases(1)
@pytest.mark.parametrize(("weights", "is_first"), [(pb.StageWeights(), True), (OLDER, True), (OLDER, False)])
async def test_workers_with_older_weights_get_the_newest_whichever_came_first(
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: pb.StageWeights,
    is_first: bool,
) -> None:
    monkeypatch.setattr(roster, "CALL_TIMEOUT", 0.0)
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0) as cluster:
        newest = Trained(pb.POOL_PREFILL, cluster.lanes, cluster.output_ids)
        older = Trained(pb.POOL_PREFILL, cluster.lanes, cluster.output_ids)
        newest.weights, older.weights = NEWEST, weights
        workers = [older, newest] if is_first else [newest, older]
        await cluster.start(*workers)
        rewrite(tmp_path / "workers", [workers[0]])
        await cluster.until(lambda: len(cluster.pool.desk.prefills) == 1)
        rewrite(tmp_path / "workers", list(workers))

        def has_both() -> bool:
            older.report()
            return len(cluster.pool.ready(pb.POOL_PREFILL)) == 2

        await cluster.until(has_both)
        assert older.weights == newest.weights == NEWEST


def versions_of(workers: Sequence[Trained]) -> dict[bytes, set[str]]:
    """By request, of the workers that it was sent to."""
    found = defaultdict[bytes, set[str]](set)
    for worker in workers:
        for message in worker.submitted:
            kind = message.WhichOneof("kind")
            if kind in ("prefill", "decode"):
                found[getattr(message, kind).request.request_id].add(worker.weights.version)
    return found


@pytest.mark.all
async def test_while_a_change_rolls_both_versions_serve_and_no_request_mixes_them(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "CALL_TIMEOUT", 0.0)
    rolling = pb.StageWeights(path="/step-200", version="v2", named_at=2, rolls=True)
    pools = [pb.POOL_PREFILL, pb.POOL_DECODE] * 2
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0) as cluster:
        workers = [Trained(pool, cluster.lanes, cluster.output_ids) for pool in pools]
        await cluster.start(*workers)
        rewrite(tmp_path / "workers", [*workers[:2]])
        await cluster.until(lambda: cluster.pool.complete)
        for worker in workers[:2]:
            worker.status.staged_version = "v2"
            worker.report()
        for worker in workers[2:]:
            worker.weights = rolling
        rewrite(tmp_path / "workers", list(workers))
        await cluster.until(lambda: all(len(cluster.pool.ready(pool)) == 2 for pool in set(pools)))
        assert cluster.pool.rolls
        for _ in range(20):
            await cluster.complete()
        found = versions_of(workers)
        assert all(len(versions) == 1 for versions in found.values()), "no request mixes them"
        assert set[str]().union(*found.values()) == {"", "v2"}, "both serve"

        for worker in workers[:2]:  # the coordinator has ended before they had them
            worker.status.staged_version = ""

        def has_all() -> bool:
            for worker in workers:
                worker.report()
            return all(len(cluster.pool.ready(pool)) == 2 for pool in set(pools)) and not cluster.pool.rolls

        await cluster.until(has_all)
        assert {worker.weights.version for worker in workers} == {"v2"}


async def test_workers_change_in_turns_and_a_fault_ends_the_change(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with trained(tokenizer, tmp_path, decode=2) as (_, workers):
        prefill, first, second = (worker.address for worker in workers)
        order = in_turns(
            [
                {"address": first, "role": "decode", "status": {"pool": "pool_decode"}},
                {
                    "address": second,
                    "role": "decode",
                    "status": {"pool": "pool_unspecified"},
                },  # no report yet
                {"address": prefill, "role": "prefill"},
            ]
        )
        assert order == [first, prefill, second]
        workers[2].applies = asyncio.Event()
        new = named("/step-200", "v2", rolls=True)
        going_on = asyncio.create_task(replace_weights(order, new, SECRET, None, 1))
        await within(workers[2].until(lambda worker: worker.asked))
        assert [worker.weights.version for worker in workers] == ["v2", "v2", ""]
        workers[2].applies.set()
        assert (await going_on).outage.startswith("1 at a time did not serve, for ")
        assert workers[2].weights.version == "v2"
        assert workers[0].weights.rolls
        await workers[1].kill()
        newer = named("/step-300", "v3", rolls=True)
        with pytest.raises(NotDone) as caught:
            await replace_weights([prefill, first], newer, SECRET, None, 1)
        assert not caught.value.changed, "all read the weights first"


@contextlib.asynccontextmanager
async def trained(
    tokenizer: ModelTokenizer, tmp_path: Path, decode: int = 1, **config: Any
) -> AsyncIterator[tuple[Cluster, list[Trained]]]:
    """A prefill worker and decode workers with the weights of `--model`."""
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0, **config) as cluster:
        pools = pb.POOL_PREFILL, *[pb.POOL_DECODE] * decode
        workers = [Trained(pool, cluster.lanes, cluster.output_ids) for pool in pools]
        await cluster.start(*workers)
        rewrite(tmp_path / "workers", list(workers))
        await cluster.until(lambda: cluster.pool.complete)
        await cluster.until(lambda: len(cluster.pool.ready(pb.POOL_DECODE)) == decode)
        yield cluster, workers


@contextlib.asynccontextmanager
async def begun_stream(
    cluster: Cluster, decode: FakeWorker
) -> AsyncIterator[tuple[AsyncIterator[bytes], asyncio.Semaphore]]:
    """The lines behind the first token of a stream, and the steps that `decode` may compute: three so far."""
    steps = decode.steps = asyncio.Semaphore(3)
    body = {"prompt": "Hello", "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}
    async with cluster.http.post(cluster.url + "/v1/completions", json=body) as response:
        lines = aiter(response.content)
        while b'"choices"' not in await anext(lines):
            pass
        yield lines, steps


async def test_the_usage_tells_the_first_and_the_last_version(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with trained(tokenizer, tmp_path) as (cluster, workers):
        assert "weights_version" not in (await cluster.complete())["usage"]
        decode = workers[1]
        async with begun_stream(cluster, decode) as (lines, _):
            for worker in workers:
                await worker.kill()
            decode.steps = None
            await cluster.until(lambda: not any(c.attached for c in cluster.pool.connections))
            for worker in workers:
                worker.weights = NEWEST
                await worker.start(int(worker.address.rpartition(":")[2]))
            rest = [json.loads(line[6:]) async for line in lines if line.startswith(b"data: {")]
        assert rest[-1]["usage"]["completion_tokens"] == len(cluster.output_ids)
        assert rest[-1]["usage"]["weights_version"] == {"first": None, "last": "v2"}

        both = {"first": "v2", "last": "v2"}
        assert (await cluster.complete())["usage"]["weights_version"] == both
        messages = [{"role": "user", "content": "Hello"}]
        for path, asked in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 100}),
            ("/v1/responses", {"input": "Hello"}),
        ):
            status, answer = await cluster.post(path, model="fake", **asked)
            assert status == 200, answer
            assert answer["usage"]["weights_version"] == both, path
        *_, last = await generate(cluster, text="Hello", max_tokens=200)
        assert last.usage.weights_version == inference_pb2.WeightsVersion(first="v2", last="v2")


async def test_the_command_gives_all_workers_the_weights_also_those_with_one_name(
    tokenizer: ModelTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers that were started one by one are all of index 0. No task is left, also after a fault."""
    async with trained(tokenizer, tmp_path, decode=2) as (cluster, workers):
        # In this thread: gRPC does not bear an event loop in another one.
        given = "/step-200", EndpointOptions(url=cluster.url), SECRET, None
        assert (await weights._replace(*given)).startswith("The weights of 3 workers are /step-200, version ")
        [version] = {worker.weights.version for worker in workers}
        assert version
        workers[1].missing = "no such file"
        with pytest.raises(ValueError, match=r"^decode 0: no such file\. No weights have changed\.$"):
            await weights._replace(*given)
        assert {worker.weights.version for worker in workers} == {version}
        gc.collect()
        assert not [record.message for record in caplog.records if "was destroyed" in record.message]


async def test_a_trainer_replaces_the_weights_over_http(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    """With the admin key, which is none of the API keys."""
    keys = {"admin_key": ApiKey.of("admin", "trainer"), "api_keys": api_keys(["client"], None)}
    async with trained(tokenizer, tmp_path, **keys) as (cluster, workers):

        async def asked(method: str, path: str, key: str, **body: Any) -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {key}"}
            given: dict[str, Any] = {"json": body} if body else {}
            async with cluster.http.request(method, cluster.url + path, headers=headers, **given) as response:
                return response.status, await response.json()

        path = "/update_weights_from_disk"
        checkpoint = {"model_path": "/step-200", "weight_version": "200"}
        for key in ("client", "wrong"):
            assert (await asked("POST", path, key, **checkpoint))[0] == 401
            assert (await asked("GET", "/get_world_size", key))[0] == 401
        status, answer = await asked("POST", path, "trainer", **{**checkpoint, "keep_pause": True})
        assert (status, answer["error"]["param"]) == (400, "keep_pause")
        workers[1].missing = "no such file"
        status, answer = await asked("POST", path, "trainer", **checkpoint)
        assert (status, answer["error"]["param"]) == (400, "model_path")
        assert answer["error"]["message"].endswith(": no such file. No weights have changed.")
        assert not any(worker.weights.version for worker in workers)

        workers[1].missing = ""
        status, answer = await asked("POST", path, "trainer", **checkpoint)
        assert (status, answer["success"]) == (200, True), answer
        assert answer["weight_version"].startswith("200-")
        for worker in workers:
            assert (worker.weights.path, worker.weights.version) == ("/step-200", answer["weight_version"])
            assert worker.weights.named_at
        assert await asked("GET", "/get_world_size", "trainer") == (200, {"world_size": 3})


async def test_a_trainer_moves_weights_by_the_calls_of_vllm(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    init, start, update, finish = TRANSFER
    key, headers = ApiKey.of("admin", "trainer"), {"Authorization": "Bearer trainer"}
    async with trained(tokenizer, tmp_path, admin_key=key) as (cluster, workers):

        async def call(path: str, **body: Any) -> tuple[int, Any]:
            given: dict[str, Any] = {"json": body} if body else {}
            async with cluster.http.post(cluster.url + path, headers=headers, **given) as response:
                return response.status, await response.json()

        info = {"path": "/dev/shm/step-200"}
        assert (await call(init, init_info={"backend": "nccl"}))[1]["error"]["param"] == "init_info.backend"
        assert (await call(init, init_info={})) == (200, {"message": "Weight transfer initialized"})
        for early in (finish, update):
            status, answer = await call(early, update_info=info)
            assert (status, "call /start_weight_update first" in answer["error"]["message"]) == (400, True)
        assert (await call(start))[0] == 200
        assert (await call(update, update_info={"path": "step-200"}))[0] == 400
        workers[1].missing = "no such file"
        status, answer = await call(update, update_info=info)
        assert (status, answer["error"]["param"]) == (400, "update_info")
        assert answer["error"]["message"].endswith("no such file. No weights have changed.")
        workers[1].missing = ""

        await call(start)
        assert (await call(finish))[0] == 400, "it has no weights"
        assert (await call(update, update_info=info))[0] == 200
        assert (await call(update, update_info=info))[0] == 400, "one checkpoint for each update"
        assert [worker.staged.path for worker in workers] == [info["path"]] * 2
        assert not any(worker.weights.version for worker in workers)
        assert (await call(start))[0] == 200, "the trainer has died, and begins again"
        for worker in workers:
            await worker.until(lambda w: not w.staged.path)
        assert (await call(update, update_info=info))[0] == 200
        status, answer = await call(finish, weight_version="200")
        assert status == 200
        assert answer["weight_version"].startswith("200-")
        found = [(worker.weights.path, worker.weights.version) for worker in workers]
        assert found == [(info["path"], answer["weight_version"])] * 2
        assert (await call(finish))[0] == 400


@pytest.mark.all
async def test_the_helper_of_trainers_gives_workers_a_state_dict(
    tokenizer: ModelTokenizer, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ApiKey.of("admin", "trainer")
    async with trained(tokenizer, tmp_path, admin_key=key) as (cluster, workers):
        weights = Weights(cluster.url, "trainer", directory, directory=tmp_path)

        async def update(state: Any, version: str) -> str:
            return await asyncio.to_thread(weights.update, state, version)

        first = await update({"x": torch.ones(2)}, "1")
        assert first.startswith("1-")
        [path] = {Path(worker.weights.path) for worker in workers}
        assert {worker.weights.version for worker in workers} == {first}
        assert torch.equal(load_file(path / "model-00001-of-00001.safetensors")["x"], torch.ones(2))
        assert json.loads((path / "config.json").read_text()) == {"max_position_embeddings": 8192}
        workers[1].missing = "x has another shape"
        with pytest.raises(RefusedUpdate, match=r"x has another shape\. No weights have changed"):
            await update({"x": torch.ones(3)}, "2")
        assert path.exists(), "workers that start later read it"
        workers[1].missing = ""
        await update([{"x": torch.ones(3)}, {"y": torch.ones(1)}], "3")
        assert not path.exists()
        assert len([*Path(workers[0].weights.path).glob("*.safetensors")]) == 2

        def frozen() -> "pb.Pause":
            with weights.paused():
                return workers[0].status.pause

        assert await asyncio.to_thread(frozen) == pb.PAUSE_STEPS
        assert workers[0].status.pause == pb.PAUSE_NONE

        def updated_within() -> tuple["pb.Pause", bool]:
            with weights.paused():
                weights.update({"x": torch.ones(3)}, "4", keep_kv=True)
                return workers[0].status.pause, workers[0].paused.keep_kv

        assert await asyncio.to_thread(updated_within) == (pb.PAUSE_STEPS, False), "the outer pause goes on"
        assert workers[0].status.pause == pb.PAUSE_NONE
        assert await asyncio.to_thread(weights.world_size) == 3
        weights.close()
        assert not Path(workers[0].weights.path).exists()

        monkeypatch.setattr("baton.weights._handles", lambda tensors: json.dumps([*tensors]))
        for later, files in (("memfd", ["model-00001-of-00001.safetensors"]), (None, [])):
            weights = Weights(cluster.url, "trainer", directory, memory="cuda", later=later)
            version = await asyncio.to_thread(weights.update, {"x": torch.ones(4)}, keep_kv=True)
            assert workers[0].staged_files == ["model-00001-of-00001.cuda.json"]
            assert workers[0].paused_within == [pb.PAUSE_STEPS]
            assert workers[0].status.pause == pb.PAUSE_NONE
            assert workers[0].weights.version == version
            spent = weights.spent
            assert (spent.nbytes, spent.read) == (100, 1.5)
            assert spent.write > 0
            assert spent.pause > 0
            assert (spent.keep > 0) == (later is not None)
            assert [x.name for x in Path(workers[0].weights.path).glob("model*")] == files
            weights.close()

        weights = Weights(cluster.url, "trainer", directory, memory="cuda")
        with monkeypatch.context() as full:

            def no_room(*_: Any) -> None:
                raise OSError("no memory is left")

            full.setattr("baton.weights.Checkpoint._to_host", no_room)
            with pytest.raises(UnfinishedUpdate, match=r"all workers compute .* no memory is left") as caught:
                await asyncio.to_thread(weights.update, {"x": torch.ones(4)}, "full")
        assert caught.value.version.startswith("full-")
        assert {worker.weights.version for worker in workers} == {caught.value.version}
        assert not Path(workers[0].weights.path).exists(), "half of a checkpoint"
        weights.close()

        def unresumed(weights: Weights, path: str, *more: Any) -> Any:
            if path == "/resume":
                raise RefusedUpdate("no router answers")
            return call(weights, path, *more)

        call = Weights._call
        monkeypatch.setattr(Weights, "_call", unresumed)
        weights = Weights(cluster.url, "trainer", directory, memory="memfd")
        with pytest.raises(UnfinishedUpdate, match="no router answers") as caught:
            await asyncio.to_thread(weights.update, {"x": torch.ones(4)}, keep_kv=True)
        assert workers[0].weights.version == caught.value.version
        assert workers[0].staged_files == ["model-00001-of-00001.safetensors"]
        assert Path(workers[0].weights.path).exists(), "workers that start later read them"
        weights.close()


async def test_an_update_that_is_not_finished_ends_after_a_time(
    tokenizer: ModelTokenizer, tmp_path: Path, clock: Clock
) -> None:
    """After the last of its calls, however long that took."""
    _, start, update, finish = TRANSFER
    key, headers = ApiKey.of("admin", "trainer"), {"Authorization": "Bearer trainer"}
    async with trained(tokenizer, tmp_path, admin_key=key, request_timeout=200.0) as (cluster, workers):

        async def call(path: str, body: Any = None) -> int:
            async with cluster.http.post(cluster.url + path, headers=headers, json=body) as response:
                return response.status

        info = {"update_info": {"path": "/step-200"}}
        assert await call(start) == 200
        workers[0].reads = asyncio.Event()
        staging = asyncio.create_task(call(update, info))
        await workers[0].until(lambda w: w.staged.path)
        await clock.forward(200.0)
        workers[0].reads.set()
        assert await staging == 200
        assert await call(finish) == 200, "the time begins when workers have read"

        assert await call(start) == 200
        assert await call(update, info) == 200
        await clock.forward(200.0)
        for worker in workers:
            await worker.until(lambda w: not w.staged.path)
        assert await call(finish) == 400


async def test_without_an_admin_key_there_are_no_calls_for_weights(cluster: Cluster) -> None:
    status, answer = await cluster.post("/update_weights_from_disk", model_path="/step-200")
    assert status == 404
    assert "--admin-key-file FILE or BATON_ADMIN_KEY" in answer["error"]["message"]


async def test_a_caller_that_is_cancelled_in_the_last_step_waits_for_all_workers() -> None:
    """Else the first ones would have other weights than the others."""
    workers = [Trained(pb.POOL_DECODE, Lanes(), [1]) for _ in range(2)]
    for worker in workers:
        worker.applies = asyncio.Event()
        await worker.start()
    addresses = [worker.address for worker in workers]
    replacing = asyncio.create_task(replace_weights(addresses, NEWEST, SECRET, None))
    for worker in workers:
        await worker.until(lambda w: w.asked)
    replacing.cancel()
    ended, _ = await asyncio.wait([replacing], timeout=0.1)
    assert not ended
    for worker in workers:
        assert worker.applies is not None
        worker.applies.set()
    with pytest.raises(asyncio.CancelledError):
        await within(replacing)
    assert [worker.weights for worker in workers] == [NEWEST, NEWEST]
    for worker in workers:
        await worker.kill()


async def test_streams_go_on_while_workers_get_other_weights_one_after_the_other(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with trained(tokenizer, tmp_path) as (cluster, [prefill, decode]):
        async with begun_stream(cluster, decode) as (lines, steps):
            await change(decode)
            await cluster.until(lambda: not cluster.pool.desk.prefills)
            assert cluster.pool.desk.decodes, (
                "the worker with other weights gets nothing until it says the same"
            )
            prefill.report()
            await change(prefill)
            await cluster.until(lambda: cluster.pool.complete)
            assert decode.submitted
            for _ in range(1000):
                steps.release()
            rest = [json.loads(line[6:]) async for line in lines if line.startswith(b"data: {")]
        assert rest[-1]["usage"]["completion_tokens"] == len(cluster.output_ids)
        assert rest[-1]["usage"]["weights_version"] == {"first": None, "last": "v2"}
        assert sum(message.HasField("decode") for message in decode.submitted) == 1, "nothing began anew"
