"""An engine process that stands by takes the place of one that ends."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import pytest

from baton.bench.lab.survive import stages_in
from baton.rpc import worker_pb2 as pb
from baton.worker.processes import StartError, TreeError
from baton.worker.service_process.standby import MOST_ENDS, Standby
from baton.worker.service_process.tree import WorkerTree
from tests.cluster_helpers import (
    WorkerProcess,
    WorkerStream,
    assert_whole,
    attached,
    request,
    sampling,
    start_worker,
    tiny_model,
)
from tests.device import TWO
from tests.forked.popen import FORKS_AGAIN
from tests.within import within

from .test_replaced_engine import (
    ENGINE,
    HELD_ENGINE,
    PROMPT,
    goes_on,
    held,
    ids,
    kill,
    open_files,
    read,
    serving,
    status,
)
from .test_weights import described, first_token, memory, pages_of, replaced, saved

pytestmark = pytest.mark.all

STANDBY = "engine standby"


@contextlib.contextmanager
def started(directory: Path, engine: dict[str, Any] = ENGINE, **more: Any) -> Iterator[WorkerProcess]:
    """A decode worker that is ready, beside which an engine process stands by. `more`: as of
    `start_worker`."""
    settings: dict[str, Any] = {"engine_module": HELD_ENGINE, **more}
    with start_worker(
        "decode", tiny_model(directory / "model"), directory, engine=engine,
        replace_engine=True, standby=True, variables={FORKS_AGAIN: "1"} | TWO,
        **settings,
    ) as worker:  # fmt: skip
        yield worker.wait_ready()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    directory = tmp_path_factory.mktemp("standby")
    with started(directory) as worker:
        yield worker


async def next_standby(worker: WorkerProcess, stream: WorkerStream, before: psutil.Process) -> psutil.Process:
    """Waits until another one than `before` stands by."""
    while True:
        if (await status(stream)).standby == "ready":
            with contextlib.suppress(psutil.Error, IndexError, StopIteration):  # one ends, or starts
                if (found := worker.child(STANDBY)) != before:
                    return found
        await stream.next_status()


async def test_a_standby_takes_over_again_and_again(worker: WorkerProcess) -> None:
    asked = request(PROMPT, sampling(max_tokens=80, ignore_eos=True))
    service, engine, files = psutil.Process(worker.popen.pid), worker.child("engine"), []
    async with attached(worker) as stream:
        right = ids(await read(stream, await stream.submit_decode(asked)))
        for _ in range(2):
            standby = await within(next_standby(worker, stream, engine))
            assert (await status(stream)).standby_memory_bytes > 0
            files.append(open_files(worker))
            decode_id = await held(stream, asked, 50)
            kill(worker)
            await goes_on(stream, decode_id, right)
            engine = worker.child("engine")
            assert engine == standby
            assert priorities(engine) == priorities(service), "no thread gives way any more"
            assert killed_first(engine.pid) == killed_first(service.pid)
        last = await within(next_standby(worker, stream, engine))
        assert killed_first(last.pid) > killed_first(service.pid)
        assert {*files} == {open_files(worker)}
    assert len(stages_in(worker.log.read_text())["waking the standby"]) == 2
    assert [*worker.run_dir.iterdir()] == [], "kill -9 would leave no file"
    await assert_whole(worker)


def priorities(process: psutil.Process) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()}


def killed_first(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_a_planned_restart_uses_code_that_is_new(worker: WorkerProcess) -> None:
    """A version of Baton may have come on the disk since the standby was started."""
    asked = request(PROMPT[1:], sampling(max_tokens=60, ignore_eos=True))
    async with attached(worker) as stream:
        right = ids(await read(stream, await stream.submit_decode(asked)))
        old = await within(next_standby(worker, stream, worker.child("engine")))
        log = worker.log.read_text()
        decode_id = await held(stream, asked, 20)
        await within(stream.stub.RestartEngine(pb.RestartEngineRequest()))
        assert not old.is_running()
        assert ids(await within(read(stream, decode_id))) == right
        await within(next_standby(worker, stream, worker.child("engine")))
    assert [*stages_in(worker.log.read_text().removeprefix(log))] == [
        "ending processes", "waking the standby", "mapping KV", "verifying KV", "preparing transfers",
        "starting the transfer process", "submitting attempts",
    ]  # fmt: skip
    await assert_whole(worker)


async def test_a_standby_has_the_newest_weights(worker: WorkerProcess, tmp_path: Path) -> None:
    """One with other weights is never used, however soon the engine dies."""
    path, log = saved(tmp_path / "trained", 7), worker.log.read_text()
    before = await first_token(worker)
    async with attached(worker) as stream:
        old = await within(next_standby(worker, stream, worker.child("engine")))
    await replaced(worker, path, "a")
    names, token = await described(worker), await first_token(worker)
    assert token != before
    async with attached(worker) as stream:
        for ready in (False, True):
            if ready:
                old = await within(next_standby(worker, stream, old))
            kill(worker)
            await stream.until(serving)  # it is replaced
            assert await first_token(worker) == pytest.approx(token)
            assert await described(worker) == names
    assert "cannot take over" not in worker.log.read_text().removeprefix(log), (
        "one with the old weights is not even asked"
    )
    assert "of weights are others" not in worker.log.read_text(), "both have those in the pages"
    await assert_whole(worker)


async def test_standbys_end_with_the_worker_and_are_not_started_for_ever(tmp_path: Path) -> None:
    with started(tmp_path) as worker:
        async with attached(worker) as stream:
            standby = worker.child("engine")
            for _ in range(MOST_ENDS):
                standby = await within(next_standby(worker, stream, standby))
                standby.kill()
            await stream.until(lambda now: now.standby == "ended")
            kill(worker)
            await stream.until(serving)
            standby = await within(next_standby(worker, stream, standby))
        assert await asyncio.to_thread(worker.stop) == 0
        assert not standby.is_running()
        assert [*worker.run_dir.iterdir()] == []


async def test_a_standby_that_cannot_share_weights_is_no_end_of_streams(tmp_path: Path) -> None:
    """It is tried once, and again when the code may be newer. Engines start without it, and streams go on."""
    with started(tmp_path, engine_module="tests.worker.other_layout_engine") as worker:

        async def without_standby(tries: int) -> None:
            def refused() -> int:
                return worker.log.read_text().count("cannot share them")

            # "ended" may be the state from before the last engine started.
            await stream.until(lambda now: now.standby == "ended" and refused() >= tries)
            assert worker.log.read_text().count("no engine process can stand by") == refused() == tries

        asked = request(PROMPT, sampling(max_tokens=80, ignore_eos=True))
        async with attached(worker) as stream:
            right = ids(await read(stream, await stream.submit_decode(asked)))
            await without_standby(1)
            decode_id = await held(stream, asked, 50)
            kill(worker)
            await goes_on(stream, decode_id, right)
            await without_standby(2)
            decode_id = await held(stream, asked, 20)
            await within(stream.stub.RestartEngine(pb.RestartEngineRequest()))
            assert ids(await within(read(stream, decode_id))) == right
            await without_standby(4)
        assert len(stages_in(worker.log.read_text())["loading weights"]) == 2
        await assert_whole(worker)


async def test_a_new_layout_of_kv_is_no_end_of_streams(tmp_path: Path) -> None:
    """No standby of the new version is made beside the old one. Those after that share KV again."""
    with started(tmp_path, engine_module="tests.worker.other_pages_engine") as worker:
        asked = request(PROMPT, sampling(max_tokens=80, ignore_eos=True))
        async with attached(worker) as stream:
            right = ids(await read(stream, await stream.submit_decode(asked)))
            await stream.until(lambda now: now.standby == "ended")
            assert "the caches of KV have another layout" in worker.log.read_text()
            old, decode_id = worker.child("engine"), await held(stream, asked, 20)
            await within(stream.stub.RestartEngine(pb.RestartEngineRequest()))
            assert ids(await within(read(stream, decode_id))) == right
            await within(next_standby(worker, stream, old))
            decode_id = await held(stream, asked, 50)
            kill(worker)
            await goes_on(stream, decode_id, right)
        assert len(stages_in(worker.log.read_text())["waking the standby"]) == 1
        await assert_whole(worker)


@pytest.mark.parametrize("kind", ["engine", "transfer"])
async def test_a_standby_that_hangs_in_its_takeover_is_no_end_of_streams(kind: str, tmp_path: Path) -> None:
    with started(tmp_path, deadlines={"engine_dead": 4.0}) as worker:
        asked = request(PROMPT, sampling(max_tokens=80, ignore_eos=True))
        async with attached(worker) as stream:
            right = ids(await read(stream, await stream.submit_decode(asked)))
            standby = await within(next_standby(worker, stream, worker.child("engine")))
            decode_id = await held(stream, asked, 50)
            transfer = max(worker.tree(), key=psutil.Process.create_time)  # it starts last
            (standby if kind == "engine" else transfer).suspend()
            kill(worker)
            await goes_on(stream, decode_id, right)
            await within(next_standby(worker, stream, standby))
        assert f"the standby cannot take over: decode 0 {kind} gave no sign of life" in worker.log.read_text()
        await assert_whole(worker)


async def test_memory_for_a_trainer_is_no_standbys(tmp_path: Path) -> None:
    """Both have the same pages. With the memory another one comes, and it has what is kept from then on."""
    with started(tmp_path, ENGINE | {"enable_memory_saver": True}) as worker:
        asked = request(PROMPT, sampling(max_tokens=80, ignore_eos=True))
        async with attached(worker) as stream:
            right = ids(await read(stream, await stream.submit_decode(asked)))
            engine = worker.child("engine")
            old, before = await within(next_standby(worker, stream, engine)), pages_of(worker)
            await stream.stub.SetMemory(memory("kv_cache", release=True))
            assert (await status(stream)).standby == "ended"
            assert not old.is_running()
            assert before > pages_of(worker)
            with pytest.raises(grpc.aio.AioRpcError, match="its memory is released"):
                await stream.stub.RestartEngine(pb.RestartEngineRequest())
            await stream.stub.SetMemory(memory("kv_cache", release=False))
            await within(next_standby(worker, stream, old))
            decode_id = await held(stream, asked, 50)
            kill(worker)
            await goes_on(stream, decode_id, right)
        await assert_whole(worker)


class Tree:
    """One whose processes end when the test says so."""

    def __init__(self) -> None:
        self.failure = asyncio.get_running_loop().create_future()
        self.stands_by = asyncio.Event()
        self.started, self.killed, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.closed, self.standby_bytes = False, 0

    def start_standby(self) -> None:
        self.started.set()

    async def kill(self) -> None:
        self.killed.set()
        await self.may_end.wait()

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("within_the_end", [False, True])
async def test_a_cancelled_close_ends_and_leaves_no_standby(within_the_end: bool) -> None:
    tree = Tree()
    standby = Standby(lambda: cast(WorkerTree, tree))
    standby.start()
    await within(tree.started.wait())
    closing = asyncio.create_task(standby.close())
    await (within(tree.killed.wait()) if within_the_end else asyncio.sleep(0))
    closing.cancel()
    tree.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await within(closing)
    await within(standby.close())
    assert tree.closed


@pytest.mark.parametrize("error", [StartError("no room"), TreeError("killed")])
async def test_a_standby_that_is_renewed_while_the_last_one_ends_is_started(error: Exception) -> None:
    """One that could not start, or that ended for the last time: the next one is another one."""
    trees = asyncio.Queue[Tree]()

    def new_tree() -> WorkerTree:
        trees.put_nowait(tree := Tree())
        return cast(WorkerTree, tree)

    standby = Standby(new_tree)
    standby.start()
    for ends in range(1, 2 if isinstance(error, StartError) else MOST_ENDS + 1):
        tree = await within(trees.get())
        tree.failure.set_exception(error)
        await within(tree.killed.wait())
        if isinstance(error, StartError) or ends == MOST_ENDS:
            standby.renew()
        tree.may_end.set()
    tree = await within(trees.get())
    tree.may_end.set()
    tree.stands_by.set()
    await within(standby.settled())
    assert standby.state == "ready"
    await within(standby.close())


@pytest.mark.long
async def test_a_group_of_ranks_stands_by(tmp_path: Path) -> None:
    """Whichever of the old ones dies. If one that stands by dies, all are started again. On two GPUs, too."""
    with started(tmp_path, ENGINE | {"tensor_parallel_size": 2}) as worker:
        asked = request(PROMPT, sampling(max_tokens=60, ignore_eos=True))
        async with attached(worker) as stream:
            right = ids(await read(stream, await stream.submit_decode(asked)))
            for kind in ("engine", "rank 1"):
                first = await within(next_standby(worker, stream, worker.child("engine")))
                worker.child("rank 1 standby").kill()
                standby = await within(next_standby(worker, stream, first))
                decode_id = await held(stream, asked, 50)
                worker.child(kind).kill()
                await goes_on(stream, decode_id, right)
                assert worker.child("engine") == standby
        await assert_whole(worker)


@pytest.mark.long
async def test_nothing_leaks_in_50_kills(worker: WorkerProcess) -> None:
    """Of an engine, of its standby and of both."""
    params = sampling(max_tokens=100, ignore_eos=True)
    async with attached(worker) as stream:
        right = ids(await read(stream, await stream.submit_decode(request(PROMPT, params))))
        counts, standby = [], worker.child("engine")
        for number in range(50):
            standby = await within(next_standby(worker, stream, standby))
            memory = [psutil.Process(each.pid).memory_info().shared for each in worker.tree()]
            counts.append((open_files(worker), len(worker.tree()), sum(memory)))
            asked = request(PROMPT, params)
            if number % 5 == 3:  # a held engine would compute no more
                decode_id = await stream.submit_decode(asked)
                standby.kill()
            else:
                decode_id = await held(stream, asked, 20)
                if number % 5 == 4:
                    standby.kill()
                kill(worker)
            assert ids(await within(read(stream, decode_id))) == right
        # Some files are open for a while after a kill, so the fewest of five are compared.
        files, processes, memory = ([min(each[5:10]), min(each[-5:])] for each in zip(*counts, strict=True))
        assert files[1] <= files[0]
        assert processes[1] == processes[0]
        assert memory[1] <= 1.1 * memory[0]
    await assert_whole(worker)
