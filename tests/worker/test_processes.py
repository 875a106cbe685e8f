"""The processes of a worker: what a tree of them does when one ends, hangs or cannot start."""

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import msgspec
import pytest

from baton.engine import EngineConfig
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.shared_store import StoreStart
from baton.kv_transfer.spawn import EXIT_ENGINE_GONE
from baton.processes.children import Child
from baton.processes.liveness import Watchdog
from baton.rpc import worker_pb2 as pb
from baton.system.kept_pages import CannotShareError
from baton.worker import messages, processes
from baton.worker.engine_process import rank_process
from baton.worker.engine_process.start import RankProcessConfig
from baton.worker.messages import EngineReady, FromEngine, ToEngine
from baton.worker.processes import (
    EngineError,
    StandbyError,
    StartError,
    TreeError,
)
from baton.worker.service_process import store, tree
from baton.worker.service_process import transfer as transfers
from tests.layouts import kv_layout
from tests.stand_in import stand_in
from tests.within import within

from .test_config import config


async def test_a_tree_that_lacks_a_descriptor_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some calls of ZeroMQ end the process then.
    monkeypatch.setattr(tree, "EngineLink", lambda _: SimpleNamespace(close=lambda: None))
    engine = EngineConfig("model", tensor_parallel_size=2, encoder_pool=True)
    with_all = config(engine=engine, kv_store="mooncake://127.0.0.1:1")
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    refused, made = 0, None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        before = set(os.listdir("/proc/self/fd"))
        while made is None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most + refused, limits[1]))
            try:
                made = tree.WorkerTree(with_all, 1)
            except (OSError, ValueError):
                refused += 1
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                assert set(os.listdir("/proc/self/fd")) == before, f"with {refused} descriptors"
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert refused > 20, "the tree has as many"
        await made.close()
        assert set(os.listdir("/proc/self/fd")) == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


async def test_an_engine_process_that_ends_slowly_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes its sockets first, and may then free memory for many seconds."""
    monkeypatch.setattr(transfers, "_EXIT_SOON", 0.0)
    worker = tree.WorkerTree(config(), 1)
    transfer = worker.transfer
    worker._engine = child("engine", "import time; time.sleep(1000)")
    transfer.process = child("transfer", f"raise SystemExit({EXIT_ENGINE_GONE})")
    transfer._far_end.close()
    try:
        for each in (worker._engine, transfer.process):
            worker.watch(worker._watch_exit(each))
        await within(transfer.process.wait())
        worker.follow(lambda _: None)
        await within(worker._watchers[-1])
        await within(transfer.watch(Watchdog("transfer", lambda: 0, 0.01, TreeError, []).watch()))
        assert not worker.failure.done()
        worker._engine.kill()
        with pytest.raises(EngineError, match=r"engine \(pid \d+\) was killed by SIGKILL"):
            await within(worker.failure)
    finally:
        await worker.kill()
        await worker.close()


@pytest.mark.parametrize("loads_in_its_turn", [False, True])
async def test_a_takeover_is_watched_as_a_step_is(
    loads_in_its_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a standby which has yet to load the model is watched as a start."""
    worker = tree.WorkerTree(config(), 1)
    sent: asyncio.Queue[FromEngine] = asyncio.Queue()
    stages = [messages.Progress("loading weights", 1.0), messages.StandsBy()]
    for message in reversed(stages) if loads_in_its_turn else stages:
        sent.put_nowait(message)
    limits: list[float] = []

    def spawned(*, standby: bool) -> None:
        worker._engine = child("engine", "import time; time.sleep(1000)")

    async def taken(message: ToEngine) -> None:
        assert isinstance(message, messages.TakeOver)
        sent.put_nowait(stand_in(EngineReady))

    def watchdog(
        name: str, ticks: Callable[[], int], limit: float, error: type[TreeError], pids: Sequence[int]
    ) -> Watchdog:
        limits.append(limit)
        return Watchdog(name, ticks, limit, error, pids)

    monkeypatch.setattr(tree, "Watchdog", watchdog)
    monkeypatch.setattr(worker, "_spawn_engine", spawned)
    monkeypatch.setattr(worker, "_spawn_transfer", lambda _: None)
    monkeypatch.setattr(worker.engine_link, "receive", sent.get)
    monkeypatch.setattr(worker.engine_link, "send", taken)
    try:
        worker.start_standby()
        await within(worker.start_engine(lambda stage, fraction: None))
        start = processes.START_SILENCE
        assert limits == [start, start if loads_in_its_turn else config().deadlines.engine_dead]
    finally:
        await worker.kill()
        await worker.close()


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("no GPU 1"), StartError), (CannotShareError("others"), StandbyError)]
)
async def test_a_rank_tells_whether_it_can_start_alone(
    error: ValueError, told: type[StartError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("baton.engine.execution.rank.start_rank", fail)
    monkeypatch.setattr("baton.engine.execution.rank.join", lambda *_: (None, None))
    worker = tree.WorkerTree(config(engine=EngineConfig("model", tensor_parallel_size=2)), 1)
    code = rank_process.run(RankProcessConfig(**worker._rank_config("rank 1", 1, standby=True)))
    worker._ranks = [child("rank 1", f"raise SystemExit({code})")]
    worker.watch(worker._watch_exit(worker._ranks[0]))
    with pytest.raises(StartError, match=str(error)) as failure:
        await within(worker.failure)
    assert failure.type is told
    await worker.close()


def child(name: str, code: str) -> Child:
    return Child(name, subprocess.Popen([sys.executable, "-c", code]))


@pytest.mark.parametrize("encrypt", [False, True])
async def test_lanes_and_the_store_are_encrypted_if_the_worker_is_told_to(
    encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that all forget it understand each other, so tokens show nothing."""
    told: list[bytes] = []

    def started(*arguments: str, given: bytes, pass_fds: Sequence[int]) -> None:
        told.append(given)
        raise TreeError

    monkeypatch.setattr(store, "spawn", started)
    told_to = config(kv_store="mooncake://127.0.0.1:1", kv_encrypt=encrypt)
    with contextlib.closing(store.Store(told_to, 1)) as of_worker, pytest.raises(TreeError):
        await of_worker.keep()
    assert msgspec.json.decode(told[0].splitlines()[0], type=StoreStart).encrypt is encrypt
    worker = tree.WorkerTree(told_to, 1)
    layout = kv_layout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    ready = EngineReady(pb.WorkerDescription(model_fingerprint="model"), layout)
    starting: list[TransferConfig] = []

    async def start(config: TransferConfig, secret: bytes) -> int:
        starting.append(config)
        await asyncio.sleep(0)  # its watch begins
        raise TreeError

    monkeypatch.setattr(worker.transfer, "process", stand_in(Child, pid=os.getpid()))
    monkeypatch.setattr(worker.transfer, "start", start)
    with pytest.raises(TreeError):
        await worker.start_transfer(ready)
    assert starting[0].encrypt is encrypt
    await worker.close()
