"""Connections to workers: the file that lists them, refusals, defects and reconnects."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from baton.router.api.jobs import Job
from baton.router.config import RouterConfig
from baton.router.endpoints import frontend
from baton.router.generation.generation import Generation
from baton.router.preparation.jobs import make_jobs
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.workers import stream
from baton.router.workers.pool import WorkerPool
from baton.router.workers.stream import WorkerStream
from baton.router.workers.worker import SendQueue, Worker, WorkerState
from baton.rpc import worker_pb2 as pb
from baton.vision.images import Image
from tests.fake_worker import FakeWorker
from tests.within import within

from .conftest import TEXT, Cluster, make_cluster


def rewrite(path: Path, workers: list[FakeWorker]) -> None:
    """Replaces the file atomically, as a supervisor does."""
    new = path.with_suffix(".new")
    new.write_text("# workers\n" + "".join(f"{worker.address}  # {worker.index}\n" for worker in workers))
    new.replace(path)


async def test_workers_come_and_go_with_the_file(cluster: Cluster, tmp_path: Path):
    pool, extra = cluster.pool, FakeWorker(pb.POOL_DECODE, cluster.lanes, cluster.output_ids, index=1)
    await cluster.start(extra)
    rewrite(tmp_path / "workers", [*cluster.workers, extra])
    await cluster.until(lambda: len(pool.ready(pb.POOL_DECODE)) == 2)
    rewrite(tmp_path / "workers", [cluster.prefills[0], extra])
    await cluster.until(lambda: len(pool.ready(pb.POOL_DECODE)) == 1)
    await cluster.complete()
    assert extra.submitted
    assert not cluster.decodes[0].submitted
    (tmp_path / "workers").unlink()
    await cluster.complete()  # the last list stays


async def test_a_retired_worker_finishes_its_requests(cluster: Cluster, tmp_path: Path):
    decode = cluster.decodes[0]
    decode.steps = asyncio.Semaphore(0)
    request = asyncio.create_task(cluster.complete())
    await decode.until(lambda w: w.submitted)
    rewrite(tmp_path / "workers", cluster.prefills)
    await cluster.until(lambda: not cluster.pool.desk.decodes)
    for _ in range(100):
        decode.steps.release()
    assert (await request)["choices"][0]["finish_reason"] == "stop"


async def test_a_retired_worker_that_refuses_its_last_attempt_is_closed(cluster: Cluster, tmp_path: Path):
    pool, decode = cluster.pool, cluster.decodes[0]
    decode.steps = asyncio.Semaphore(0)
    request = asyncio.create_task(cluster.complete())
    await decode.until(lambda w: w.submitted)
    rewrite(tmp_path / "workers", cluster.prefills)
    await cluster.until(lambda: bool(pool._retired))
    decode_id = decode.submitted[0].decode.decode_id
    refusal = pb.AttemptFailed(attempt_id=decode_id, code=pb.FAILURE_CODE_NO_ROOM)
    for outputs in decode.outputs:
        outputs.put_nowait(pb.WorkerMessage(failed=refusal))
    await cluster.until(lambda: not pool._retired)
    request.cancel()


@pytest.mark.all
async def test_a_worker_with_another_model_is_refused(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path) as cluster:
        stranger = FakeWorker(pb.POOL_DECODE, cluster.lanes, cluster.output_ids, index=9)
        stranger.model_fingerprint, stranger.max_model_len = "model=m2", 10
        await cluster.start(stranger)
        rewrite(tmp_path / "workers", [*cluster.workers, stranger])
        await cluster.until(lambda: any(c.state is WorkerState.REFUSED for c in cluster.pool.connections))
        [refused] = [c for c in cluster.pool.connections if c.state is WorkerState.REFUSED]
        assert "in: model (fake, there fake)" in refused.reason
        cluster.pool.availability_changed(cluster.pool.ready(pb.POOL_DECODE)[0])
        assert cluster.pool.max_positions == 8192, "only the workers that serve count"
        await stranger.kill()
        await cluster.until(lambda: refused.state is WorkerState.CONNECTING)
        cluster.pool.availability_changed(cluster.pool.ready(pb.POOL_DECODE)[0])
        assert cluster.pool.max_positions == 8192, "a refused worker that has gone does not count either"
        for _ in range(4):
            await cluster.complete()
        assert not stranger.submitted


async def test_a_request_that_no_decode_worker_can_hold_does_not_stop_the_queue(cluster: Cluster):
    """The only worker that could hold it has gone. The request parks until such a worker comes."""
    pool, [decode] = cluster.pool, cluster.decodes
    [load] = pool.desk.decodes
    await cluster.full(*cluster.prefills)
    load.sent(0)
    load.ended(0, full=True)  # as after a refused reservation
    long = asyncio.create_task(cluster.complete(prompt=[5] * 3000))
    await cluster.until(lambda: len(cluster.router.services.admission.queue) == 1)
    load.blocks_total = 100
    decode.status.blocks_free = 100
    decode.report()
    assert (await cluster.complete(prompt=[5] * 30))["choices"][0]["finish_reason"] == "stop"
    assert len(cluster.router.services.parked.without_worker) == 1
    load.blocks_total = 512
    decode.status.blocks_free = 512
    decode.report()
    await cluster.until(lambda: load.blocks_free == 512)
    pool.availability_changed(pool.ready(pb.POOL_DECODE)[0])
    assert (await long)["choices"][0]["finish_reason"] == "stop"


async def test_a_worker_with_another_tokenizer_is_refused(
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """`/status` shows the reason, and the log has it once, although the router tries again."""
    monkeypatch.setattr(stream, "LAST_BACKOFF", 0.02)
    async with make_cluster(tokenizer, tmp_path, decode=0) as cluster:
        stranger = FakeWorker(pb.POOL_DECODE, cluster.lanes, cluster.output_ids, index=9)
        stranger.vocab_size, stranger.vocabulary_fingerprint = 151936, "of another tokenizer"
        await cluster.start(stranger)
        rewrite(tmp_path / "workers", [*cluster.workers, stranger])
        await cluster.until(lambda: stranger.described >= 3)
        workers = (await cluster.get("/status"))["workers"]
        [refused] = [worker for worker in workers if worker["address"] == stranger.address]
        assert (refused["role"], refused["state"]) == ("decode", "refused")
        assert "its tokenizer (fake) is not the router's (fake)" in refused["reason"]
        assert "--model" in refused["remedy"]
        assert not cluster.pool.desk.decodes
        logged = [record.message for record in caplog.records if stranger.address in record.message]
        assert [("is refused: its tokenizer" in line, "--model" in line) for line in logged] == [(True, True)]


async def test_one_of_two_models_that_connect_together_is_refused(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0) as cluster:
        prefill = FakeWorker(pb.POOL_PREFILL, cluster.lanes, cluster.output_ids)
        decode = FakeWorker(pb.POOL_DECODE, cluster.lanes, cluster.output_ids)
        decode.model_fingerprint = "model=m2"
        for worker, other in ((prefill, decode), (decode, prefill)):
            worker.before_description = lambda other=other: other.until(lambda w: w.described)
            await cluster.start(worker)
        rewrite(tmp_path / "workers", [prefill, decode])
        await cluster.until(
            lambda: {c.state for c in cluster.pool.connections} == {WorkerState.READY, WorkerState.REFUSED}
        )


async def test_a_wrong_secret_is_reported(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, wait=False, secret=b"some other secret") as cluster:
        await cluster.until(
            lambda: [("secret" in c.reason) for c in cluster.pool.connections] == [True, True]
        )


async def test_a_restarted_worker_is_a_new_incarnation(cluster: Cluster):
    prefill = cluster.prefills[0]
    port, before = int(prefill.address.rpartition(":")[2]), prefill.incarnation
    await prefill.kill()
    await cluster.until(lambda: not cluster.pool.complete)
    prefill.incarnation = before + 1
    await prefill.start(port)
    await cluster.until(lambda: cluster.pool.complete)
    await cluster.complete()
    assert cluster.decodes[0].submitted[-1].decode.source.incarnation == before + 1


def open_stream(pool: WorkerPool) -> WorkerStream:
    worker = Worker("127.0.0.1:1", pool.desk, lambda: None, lambda _: None)
    return WorkerStream(worker, pool, RouterConfig(model=None, secret=b"x" * 16))


async def test_a_connection_closes_if_its_stream_breaks_at_the_same_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """grpc.aio then raises only the stream's error (in `_prepare_rpc`) and drops the cancellation. Without a
    check, a router that ends together with its workers sometimes never ends."""
    waits = asyncio.Event()

    async def breaks(opened: WorkerStream) -> None:
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            none, gone = grpc.aio.Metadata(), grpc.StatusCode.UNAVAILABLE
            raise grpc.aio.AioRpcError(gone, none, none, details="gone", debug_error_string="") from None

    monkeypatch.setattr(WorkerStream, "_serve", breaks)
    made = open_stream(cluster.pool)
    await waits.wait()
    await within(made.close())


async def test_an_unknown_failure_code_fails_only_the_attempt(cluster: Cluster):
    """Workers may be upgraded before routers."""
    decode = cluster.decodes[0]
    decode.fail = (1, cast("pb.FailureCode", 99))
    [connection] = cluster.pool.ready(pb.POOL_DECODE)
    assert (await cluster.complete())["choices"][0]["text"] == TEXT
    assert connection.ready
    assert len(decode.submitted) == 2
    assert 'baton:retries_total{cause="unspecified",model_name="fake",role="router"} 1.0' in (
        await cluster.metrics()
    )


async def test_a_failure_code_of_the_other_role_fails_only_the_attempt(cluster: Cluster):
    cluster.prefills[0].fail = (1, pb.FAILURE_CODE_NO_ROOM)
    [connection] = cluster.pool.ready(pb.POOL_PREFILL)
    assert (await cluster.complete())["choices"][0]["text"] == TEXT
    assert connection.ready


async def test_an_unknown_finish_reason_ends_the_request(cluster: Cluster):
    decode = cluster.decodes[0]
    decode.steps = asyncio.Semaphore(1)
    request = asyncio.create_task(cluster.complete())
    await decode.until(lambda w: w.submitted)
    submitted = decode.submitted[0].decode
    await cluster.until(lambda: decode.steps is not None and decode.steps.locked())
    event = pb.TokenEvent(
        attempt_id=submitted.decode_id,
        output_index=1,
        token_id=cluster.output_ids[1],
        finish_reason=cast("pb.FinishReason", 99),
    )
    for outputs in decode.outputs:
        outputs.put_nowait(pb.WorkerMessage(step=pb.StepOutput(tokens=[event])))
    result = await request
    assert result["choices"][0]["finish_reason"] == "length"
    assert result["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("role", [pb.POOL_PREFILL, pb.POOL_DECODE])
async def test_an_invalid_token_fails_only_its_attempt(
    cluster: Cluster, role: "pb.Pool", caplog: pytest.LogCaptureFixture
):
    [worker] = cluster.prefills if role == pb.POOL_PREFILL else cluster.decodes
    other = asyncio.create_task(cluster.complete(prompt="Other", logprobs=2))
    wrong = [pb.TokenLogprobs(logprob=math.nan), pb.TokenLogprobs(top_ids=[1, 2], top_logprobs=[-0.5])]

    def damage(event: pb.TokenEvent) -> None:
        if wrong and event.output_index in (0, 3) and (event.output_index == 3) is (role == pb.POOL_DECODE):
            event.logprobs.CopyFrom(wrong.pop())

    worker.change = damage
    for result in await asyncio.gather(cluster.complete(logprobs=2), other):
        assert result["choices"][0]["text"] == TEXT
        assert all(logprob <= 0 for logprob in result["choices"][0]["logprobs"]["token_logprobs"])
    assert not wrong
    await cluster.until(lambda: len(worker.cancelled) >= 2)
    assert "defect" not in caplog.text


async def test_invalid_rates_count_as_unknown(cluster: Cluster, caplog: pytest.LogCaptureFixture):
    decode, [prefill] = cluster.decodes[0], cluster.prefills
    for worker in (prefill, decode):
        worker.status.prefill_tokens_per_s, worker.status.step_seconds = math.inf, -1.0
        worker.status.long_chunk_seconds, worker.status.long_chunk_tokens = math.nan, 100
        worker.status.step_model.rows.append(1)
        worker.report()
        worker.report()
    await cluster.until(lambda: all(c.status.long_chunk_tokens for c in cluster.pool.connections))
    for made in cluster.pool.connections:
        status = made.status
        assert (status.prefill_tokens_per_s, status.step_seconds, status.long_chunk_seconds) == (0, 0, 0)
        assert not status.HasField("step_model")
        assert made.step_model is None
        status = await made.ask()
        assert status is not None
        assert status.long_chunk_seconds == 0
    assert cluster.pool.desk.window().tokens < math.inf
    assert (await cluster.complete())["choices"][0]["text"] == TEXT
    warned = [record.message for record in caplog.records if "impossible rates" in record.message]
    assert len(warned) == 2
    assert all("step_model" in message for message in warned)
    prefill.status.step_model.CopyFrom(
        pb.StepModel(
            rows=[1],
            decode_seconds=[0.25],
            tokens=[16],
            prompt_seconds=[0.5],
            decode_factor=2,
            prompt_factor=1,
        )
    )
    prefill.report()
    worker = cluster.connection(prefill)
    await cluster.until(lambda: worker.step_model is not None)
    assert worker.step_model is not None
    assert worker.step_model.step(1, 0) == 0.5


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes the next call of this method of any generation raise."""
    method, failures = getattr(Generation, name), [RuntimeError("the test wants it")]

    def fails(generation: Generation, *arguments: object, **named: object) -> None:
        if failures:
            raise failures.pop()
        method(generation, *arguments, **named)

    monkeypatch.setattr(Generation, name, fails)


async def test_a_connection_is_opened_again_after_a_defect(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    fail_once(monkeypatch, "_on_event")
    assert (await cluster.complete())["choices"][0]["text"] == TEXT
    assert "the test wants it" in caplog.text
    await cluster.until(lambda: cluster.pool.complete)


LARGE = pb.RouterMessage(cancel=pb.Cancel(attempt_id=bytes(1 << 20)))


async def test_many_large_messages_at_once_do_not_cut_off_a_worker_that_reads(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    [decode] = cluster.decodes
    for _ in range(40):
        cluster.connection(decode).send(LARGE)
    await decode.until(lambda w: len(w.cancelled) == 40)
    await cluster.complete()
    assert "does not read its messages" not in caplog.text


async def test_pixels_have_a_bound_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.workers.worker.MOST_UNSENT_BYTES", 100)
    monkeypatch.setattr("baton.router.workers.worker.MOST_UNSENT_PIXELS", 300)
    full: list[int] = []
    queue = SendQueue(lambda: full.append(1))
    pixels = bytes(140)
    queue.put_pixels(pixels)
    queue.put(pb.RouterMessage(cancel=pb.Cancel(attempt_id=bytes(60))))
    queue.put_pixels(pixels)
    assert not full
    read = queue.messages()
    assert await anext(read) == pb.RouterMessage(pixels=pb.Pixels(data=pixels))
    queue.put_pixels(pixels)
    assert not full
    queue.put_pixels(pixels)
    assert len(full) == 1
    queue.close()


@pytest.mark.parametrize(("limit", "value"), [("UNREAD_SECONDS", 0.3), ("MOST_UNSENT_BYTES", 20 << 20)])
async def test_a_worker_that_does_not_read_its_messages_is_cut_off(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
):
    read = FakeWorker._read

    async def read_hello(deaf: FakeWorker, messages: AsyncIterator[pb.RouterMessage], *to: Any) -> None:
        async def first() -> AsyncIterator[pb.RouterMessage]:
            yield await anext(aiter(messages))

        await read(deaf, first(), *to)

    monkeypatch.setattr(FakeWorker, "_read", read_hello)
    monkeypatch.setattr(f"baton.router.workers.worker.{limit}", value)
    async with make_cluster(tokenizer, tmp_path) as cluster:
        connection = cluster.connection(cluster.decodes[0])
        for _ in range(40):
            connection.send(LARGE)
        await cluster.until(lambda: connection.state is WorkerState.REFUSED)
        assert connection.reason == "it does not read the messages that the router sends"


async def test_a_connection_that_ends_at_once_is_opened_less_often(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    waits: asyncio.Queue[float] = asyncio.Queue()
    sleep = asyncio.sleep

    async def ends(made: WorkerStream) -> None:
        made.worker.send_queue = SendQueue(lambda: None)
        raise RuntimeError("the test wants it")

    async def told(seconds: float, *result: None) -> None:
        if asyncio.current_task() is made._task:
            waits.put_nowait(seconds)
        await sleep(0 if asyncio.current_task() is made._task else seconds, *result)

    monkeypatch.setattr(WorkerStream, "_serve", ends)
    monkeypatch.setattr(asyncio, "sleep", told)
    made = open_stream(cluster.pool)
    for doublings in range(8):
        most = min(stream.FIRST_BACKOFF * 2**doublings, stream.LAST_BACKOFF)
        assert most / 2 <= await waits.get() <= most
    await made.close()


async def test_a_defect_in_one_request_does_not_hide_a_lost_worker_from_the_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    decode = cluster.decodes[0]
    decode.steps = asyncio.Semaphore(0)
    requests = [asyncio.create_task(cluster.complete()) for _ in range(2)]
    await decode.until(lambda w: len(w.submitted) == 2)
    fail_once(monkeypatch, "_failed")
    port = int(decode.address.rpartition(":")[2])
    await decode.kill()
    await cluster.until(lambda: "the test wants it" in caplog.text)
    decode.steps = None
    await decode.start(port)
    done, waits = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
    assert [(await request)["choices"][0]["text"] for request in done] == [TEXT]
    for request in waits:
        request.cancel()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"drain_timeout": -1}, "--drain-timeout"),
        ({"decode_only": True, "overflow": False}, "--advanced.no-overflow"),
        ({"workers": ("nowhere",)}, "--worker"),
        ({"workers": ("host:99999",)}, "--worker"),
    ],
)
def test_configuration_errors_name_the_flag(wrong, named):
    with pytest.raises(ValueError, match=named):
        RouterConfig(model="m", secret=b"x" * 16, **wrong)


async def test_only_the_worker_that_computes_the_prompt_gets_pixels(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.workers.worker.PIXELS_SENT", 4)
    image = Image(bytes(32), 1, 2, 3, memoryview(b"pixels"))

    def with_image(*args: Any, **given: Any) -> Iterator[list[Job]]:
        for made in make_jobs(*args, **given):
            yield [replace(job, images=(image,)) for job in made]

    monkeypatch.setattr(frontend, "make_jobs", with_image)
    await cluster.complete()
    decoded = cluster.decodes[0].submitted[-1].decode.request
    for sent, has in ((cluster.sent, True), (decoded, False)):
        assert list(sent.images) == [pb.Image(name=bytes(32), start=1, rows=2, columns=3, with_pixels=has)]
    assert cluster.prefills[0].pixels == [b"pixe", b"ls"]
    assert cluster.decodes[0].pixels == []
