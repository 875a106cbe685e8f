"""Start and end of whole process trees, as a supervisor and a router see them. Tiny model."""

import asyncio
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from baton.kv_transfer import TransferDeadlines
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from tests.cluster_helpers import (
    SECRET,
    WorkerProcess,
    WorkerStream,
    assert_whole,
    attached,
    health,
    paired,
    request,
    sampling,
    side_by_side,
    start_worker,
    tiny_model,
)
from tests.device import DEVICE
from tests.forked.clock import VARIABLE, Clock
from tests.within import WITHIN, within

TINY = {"load_format": "dummy", "num_blocks": 300, "max_num_batched_tokens": 64}
RANKS = 2 if DEVICE == "cpu" else 1
ENDLESS = sampling(max_tokens=2000, ignore_eos=True)


def assert_nothing_left(worker: WorkerProcess, tree: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(tree[1:], timeout=WITHIN)
    assert alive == []
    assert list(worker.run_dir.iterdir()) == []


async def exit_code(worker: WorkerProcess) -> int:
    return await asyncio.to_thread(worker.popen.wait, WITHIN)


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    directory = tmp_path_factory.mktemp("one")
    model, engine = tiny_model(directory / "model"), TINY | {"tensor_parallel_size": RANKS}
    with start_worker("prefill", model, directory, index=3, engine=engine, fresh=True) as worker:
        yield worker.wait_ready()


# ---------------------------------------------------------------- start


@pytest.mark.all
async def test_a_worker_reports_its_start_and_describes_itself(prefill: WorkerProcess) -> None:
    worker = prefill
    assert all(0 <= told["fraction"] <= 1 for told in worker.told[:-1])
    assert worker.told[0]["stage"] == "starting the engine process"
    assert worker.ready["role"] == "prefill"
    assert worker.ready["index"] == 3
    titles = [" ".join(p.cmdline()).strip() for p in worker.tree()]
    titles = [title for title in titles if ", lanes " not in title]  # on many cores
    children = ["engine", *(f"rank {rank}" for rank in range(1, RANKS)), "transfer"]
    assert sorted(titles) == ["baton: prefill 3", *(f"baton: prefill 3 {child}" for child in children)]
    assert list(worker.run_dir.iterdir()) == [], "the socket file is removed when the worker is ready"
    for title, loaded in (("engine", ["libtorch."]), ("transfer", [])):
        maps = Path(f"/proc/{worker.child(title).pid}/maps").read_text()
        assert [library for library in ("cygrpc", "libtorch.") if library in maps] == loaded, title
    async with connect(worker.address, SECRET) as channel:
        described = await WorkerStub(channel).Describe(pb.DescribeRequest())
        assert await health(channel) == "SERVING"
    assert described.first_pool == pb.POOL_PREFILL
    assert (described.index, described.pid) == (3, worker.popen.pid)
    assert (described.kv_address, described.incarnation) == (
        worker.ready["kv_address"],
        worker.ready["incarnation"],
    )
    assert (described.block_size, described.num_blocks, described.max_model_len) == (16, 300, 4096)
    assert described.layout_fingerprint
    assert described.model_fingerprint
    assert (described.vocab_size, described.vocabulary_fingerprint) == (512, ""), "the model has no tokenizer"
    assert described.served_model_name == described.model
    await assert_whole(worker)


@pytest.mark.all
async def test_addresses_of_ipv6_stand_in_brackets(tmp_path: Path) -> None:
    """Prometheus puts the address of metrics into a URL."""
    model = tiny_model(tmp_path / "model")
    with start_worker("prefill", model, tmp_path, host="::1", engine=TINY) as worker:
        worker.wait_ready()
        assert probed(worker) == 200
        async with connect(worker.address, SECRET) as channel:
            described = await WorkerStub(channel).Describe(pb.DescribeRequest())
        assert described.metrics_address == worker.ready["metrics_address"]
        for address in (worker.address, described.metrics_address, described.kv_address):
            assert address.startswith("[::1]:")


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model": Path("/nonexistent/model")}, "--model /nonexistent/model"),
    # This is no mistake on a machine that has a GPU.
    *([({"engine": TINY | {"device": "cuda"}}, "--device cuda")] if DEVICE == "cpu" else []),
    ({"host": "192.0.2.1"}, "--host 192.0.2.1: cannot listen there: no network interface of this machine"),
    *[
        ({option: "taken"}, f"{flag} TAKEN: cannot listen on 127.0.0.1:TAKEN: the port is in use")
        for option, flag in (("port", "--port"), ("metrics_port", "--metrics-port"), ("kv_port", "--kv-port"))
    ],
]


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[int, WorkerProcess], int]]:
    """One worker for each mistake, and the port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        workers = {
            i: {"role": "prefill", "engine": TINY}
            | {name: taken if value == "taken" else value for name, value in settings.items()}
            for i, (settings, _) in enumerate(MISTAKES)
        }
        with side_by_side(tmp_path_factory.mktemp("mistaken"), workers) as started:
            yield started, taken


@pytest.mark.cases(1)
@pytest.mark.parametrize(("number", "reason"), [(i, reason) for i, (_, reason) in enumerate(MISTAKES)])
def test_a_wrong_setting_ends_the_start_with_a_message_and_no_traceback(
    mistaken: tuple[dict[int, WorkerProcess], int], number: int, reason: str
) -> None:
    worker, taken = mistaken[0][number], mistaken[1]
    worker.wait_told()
    assert reason.replace("TAKEN", str(taken)) in worker.told[-1]["error"]
    assert worker.popen.wait(WITHIN) != 0
    assert list(worker.run_dir.iterdir()) == []
    assert "Traceback" not in worker.log.read_text()


def test_sigterm_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    with start_worker("prefill", tiny_model(tmp_path / "model"), tmp_path, engine=TINY) as worker:
        assert worker.ready_pipe.read(1)
        tree = worker.tree()
        assert worker.stop() == 0
        assert_nothing_left(worker, tree)


# ---------------------------------------------------------------- end


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    """Of the workers in `ending`."""
    with closing(Clock()) as clock:
        yield clock


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[dict[str, WorkerProcess]]:
    """Workers that the tests end."""
    workers = {
        "drains prefill": {"role": "prefill", "engine": TINY},
        "drains decode": {"role": "decode", "engine": TINY},
        "hurried": {"role": "prefill", "engine": TINY, "drain_timeout": 0.5},
    }
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv(VARIABLE, clock.path)
        started = stack.enter_context(side_by_side(tmp_path_factory.mktemp("ending"), workers))
        patch.undo()
        yield started


async def drains(stream: WorkerStream, worker: WorkerProcess) -> None:
    """Returns when a worker that gets SIGTERM says that it drains."""
    worker.popen.terminate()
    while (await stream.next_status()).health != pb.WorkerStatus.HEALTH_DRAINING:
        pass


@pytest.mark.all
async def test_after_sigterm_accepted_requests_end_and_new_ones_are_refused(
    ending: dict[str, WorkerProcess], clock: Clock
) -> None:
    started = [ending["drains prefill"], ending["drains decode"]]
    prefill, decode = (worker.wait_ready() for worker in started)
    trees = [worker.tree() for worker in started]
    async with paired(prefill, decode) as pair:
        asked, prefill_id = request(range(100), sampling(max_tokens=5, ignore_eos=True)), os.urandom(16)
        decode_id = await pair.decode.reserve(asked, pair.source(prefill_id))
        held = await pair.prefill.submit_prefill(asked, handover=True)
        await pair.prefill.token(held)
        assert await asyncio.to_thread(probed, decode) == 200
        await drains(pair.decode, decode)
        assert await asyncio.to_thread(probed, decode) == 503
        late = await pair.decode.submit_decode(asked, pair.source(os.urandom(16)))
        assert (await pair.decode.failure(late)).code == pb.FAILURE_CODE_DRAINING
        submit = pb.SubmitPrefill(prefill_id=prefill_id, request=asked, handover=True)
        await pair.prefill.send(prefill=submit)
        assert len(await pair.decode.tokens(decode_id)) == 5
        assert await exit_code(decode) == 0
        await within(pair.decode.ended.wait())
        await drains(pair.prefill, prefill)
        # No decode worker fetches this prefill, so the drain waits for the hold deadline.
        clock.later(TransferDeadlines().hold)
        failure = await pair.prefill.failure(held)
        assert (failure.code, failure.message) == (
            pb.FAILURE_CODE_DROPPED,
            "not fetched before the hold deadline",
        )
        assert await exit_code(prefill) == 0
    for worker, tree in zip(started, trees, strict=True):
        assert_nothing_left(worker, tree)


def probed(worker: WorkerProcess) -> int:
    """The status that a kubelet gets: it has no certificate."""
    try:
        with urllib.request.urlopen(
            f"http://{worker.ready['metrics_address']}/health", timeout=WITHIN
        ) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


@pytest.mark.all
async def test_a_drain_ends_at_its_deadline(ending: dict[str, WorkerProcess]) -> None:
    worker = ending["hurried"].wait_ready()
    async with attached(worker) as stream:
        held = await stream.submit_prefill(request(range(10), ENDLESS), handover=True)
        await stream.token(held)
        worker.popen.terminate()
        assert (await stream.failure(held)).code == pb.FAILURE_CODE_DRAINING
        assert await exit_code(worker) == 0


# ---------------------------------------------------------------- routers that misbehave


@pytest.mark.all
async def test_a_router_with_another_secret_gets_nothing(prefill: WorkerProcess) -> None:
    async with connect(prefill.address, b"another secret, long enough") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
            await WorkerStub(channel).GetStatus(pb.StatusRequest())


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (pb.RouterMessage(cancel=pb.Cancel(attempt_id=b"x" * 16)), "a stream begins with a RouterHello"),
        (pb.RouterMessage(hello=pb.RouterHello(router_id=b"short")), "router_id must have 16 bytes"),
        (
            pb.RouterMessage(hello=pb.RouterHello(router_id=b"x" * 16, report_seconds=-1)),
            "report_seconds must be a number of seconds, not -1",
        ),
        (pb.RouterMessage(), "a stream begins with a RouterHello"),
    ],
)
async def test_a_stream_that_does_not_begin_with_hello_is_refused(
    prefill: WorkerProcess, first: pb.RouterMessage, reason: str
) -> None:
    async with connect(prefill.address, SECRET) as channel:
        call = WorkerStub(channel).Attach(iter([first]))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason in (await call.details() or "")


@pytest.mark.parametrize(
    "message",
    [
        {"cancel": pb.Cancel(attempt_id=b"short")},
        {"prefill": pb.SubmitPrefill(prefill_id=b"")},
        {"hello": pb.RouterHello(router_id=b"x" * 16)},
    ],
)
async def test_a_broken_protocol_ends_that_stream_alone(
    prefill: WorkerProcess, message: dict[str, Any]
) -> None:
    async with attached(prefill) as other, attached(prefill) as stream:
        await stream.submit_prefill(request(range(100), sampling()), handover=True)
        await stream.send(**message)
        await within(stream.ended.wait())
        assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await assert_whole(prefill)
        prefill_id = await other.submit_prefill(request([1], sampling(max_tokens=1)), handover=False)
        await other.token(prefill_id)


@pytest.mark.all
async def test_the_stream_of_a_router_that_does_not_read_is_ended(prefill: WorkerProcess) -> None:
    async with attached(prefill) as stream:
        held = await stream.submit_prefill(request(range(100), sampling()), handover=True)
        await stream.token(held)
        stream.may_read.clear()
        # Each refusal repeats all biases of the request, so it is long.
        biased = request([1], sampling(logit_bias=dict.fromkeys(range(512), 1e7)))

        async def flood() -> None:
            while True:
                await stream.submit_prefill(biased, handover=True)

        flooding = asyncio.create_task(flood())
        await assert_whole(prefill, within=WITHIN)
        stream.may_read.set()
        await within(stream.ended.wait())
        assert await stream.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        flooding.cancel()  # not earlier: a write that is cancelled cancels the stream
        await asyncio.gather(flooding, return_exceptions=True)


# ---------------------------------------------------------------- the end of the shared worker


async def test_ctrl_c_ends_the_worker_without_a_drain(prefill: WorkerProcess) -> None:
    """The last test of `prefill`."""
    worker, tree = prefill, prefill.tree()
    async with attached(worker) as stream:
        source = pb.PrefillSource(prefill_id=os.urandom(16), kv_address="127.0.0.1:9", incarnation=1)
        await stream.reserve(request([1], ENDLESS), source)
        for process in tree:
            process.send_signal(signal.SIGINT)
        assert await exit_code(worker) == 0
    assert "interrupted: stopping" in worker.log.read_text()
    assert "draining, for" not in worker.log.read_text()
    assert_nothing_left(worker, tree)
