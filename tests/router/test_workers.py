"""Which workers there are: the file that names them, who is refused, who comes back."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from bench.fake_worker import FakeWorker
from router.config import RouterConfig
from router.text.tokenizer import ModelTokenizer
from router.workers.connection import State, WorkerConnection
from rpc import worker_pb2 as pb

from .conftest import Cluster, make_cluster


def rewrite(path: Path, workers: list[FakeWorker]) -> None:
    """Atomically, as a supervisor does."""
    new = path.with_suffix(".new")
    new.write_text(
        "# who is there\n" + "".join(f"{worker.address}  # {worker.index}\n" for worker in workers)
    )
    new.replace(path)


async def test_workers_come_and_go_with_the_file(cluster: Cluster, tmp_path: Path):
    pool, extra = (
        cluster.router.services.pool,
        FakeWorker(pb.ROLE_DECODE, cluster.lanes, cluster.answer, index=1),
    )
    await extra.start()
    rewrite(tmp_path / "workers", [*cluster.workers, extra])
    await cluster.until(lambda: len(pool.ready(pb.ROLE_DECODE)) == 2)
    rewrite(tmp_path / "workers", [cluster.prefills[0], extra])
    await cluster.until(lambda: len(pool.ready(pb.ROLE_DECODE)) == 1)
    await cluster.complete()
    assert extra.submitted
    assert not cluster.decodes[0].submitted
    (tmp_path / "workers").unlink()
    await cluster.complete()  # the last list stays
    await extra.kill()


async def test_a_worker_off_the_list_finishes_what_it_has(cluster: Cluster, tmp_path: Path):
    decode = cluster.decodes[0]
    decode.steps = asyncio.Semaphore(0)
    request = asyncio.create_task(cluster.complete())
    await decode.until(lambda w: w.submitted)
    rewrite(tmp_path / "workers", cluster.prefills)
    await cluster.until(lambda: not cluster.router.services.pool.has_decode)
    for _ in range(100):
        decode.steps.release()
    assert (await request)["choices"][0]["finish_reason"] == "stop"


async def test_another_model_is_refused(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path) as cluster:
        stranger = FakeWorker(pb.ROLE_DECODE, cluster.lanes, cluster.answer, index=9)
        stranger.model_fingerprint = "m2"
        await stranger.start()
        rewrite(tmp_path / "workers", [*cluster.workers, stranger])
        pool = cluster.router.services.pool
        await cluster.until(lambda: any(c.state is State.REFUSED for c in pool.connections))
        [refused] = [c for c in pool.connections if c.state is State.REFUSED]
        assert "is not that of" in refused.reason
        for _ in range(4):
            await cluster.complete()
        assert not stranger.submitted
        await stranger.kill()


async def test_a_wrong_secret_is_reported(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, wait=False, secret=b"some other secret") as cluster:
        pool = cluster.router.services.pool
        await cluster.until(lambda: [("secret" in c.reason) for c in pool.connections] == [True, True])


async def test_a_restarted_worker_is_a_new_incarnation(cluster: Cluster):
    prefill = cluster.prefills[0]
    port, before = int(prefill.address.rpartition(":")[2]), prefill.incarnation
    await prefill.kill()
    await cluster.until(lambda: not cluster.router.services.pool.complete)
    prefill.incarnation = before + 1
    await prefill.start(port)
    await cluster.until(lambda: cluster.router.services.pool.complete)
    await cluster.complete()
    assert cluster.decodes[0].submitted[-1].decode.source.incarnation == before + 1


async def test_a_connection_closes_also_where_its_stream_breaks_in_the_same_moment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """grpc.aio then raises the stream's error alone (its `_prepare_rpc`): without help, once in some hundred
    times that a router and its workers end together, the router stays for ever."""
    waits = asyncio.Event()

    async def breaks(connection: WorkerConnection) -> None:
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            none, gone = grpc.aio.Metadata(), grpc.StatusCode.UNAVAILABLE
            raise grpc.aio.AioRpcError(gone, none, none, details="gone", debug_error_string="") from None

    monkeypatch.setattr(WorkerConnection, "_attached", breaks)
    pool = cluster.router.services.pool
    connection = WorkerConnection("127.0.0.1:1", b"x" * 16, b"", pool)
    await waits.wait()
    await asyncio.wait_for(connection.close(), 10)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"port": 70_000}, "--port"),
        ({"request_timeout": 0}, "--request-timeout"),
        ({"worker_wait": -1}, "--worker-wait"),
        ({"workers": ("nowhere",)}, "--worker"),
        ({"workers": ("host:99999",)}, "--worker"),
    ],
)
def test_configuration_errors_name_the_flag(wrong, named):
    with pytest.raises(ValueError, match=named):
        RouterConfig(model="m", secret=b"x" * 16, **wrong)
