"""A service process whose process trees a test plays."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from baton.kv_transfer import TransferStats
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.config import WorkerConfig
from baton.worker.messages import EngineReady, FromEngine, FromRouter, ToEngine
from baton.worker.processes import EngineError, EngineRestart
from baton.worker.service_process import service
from baton.worker.service_process.service import Service
from baton.worker.service_process.tree import WorkerTree
from tests.layouts import kv_layout
from tests.stand_in import implements
from tests.within import within

from .test_config import config
from .test_counts import engine_status

READY = EngineReady(pb.WorkerDescription(), kv_layout(1, 1, 8, "float32"))
WITH_WEIGHTS = EngineReady(
    pb.WorkerDescription(model_fingerprint="files", content_root=b"root"), READY.layout
)
"""As the engine that replaces its weights says."""
TRANSFERS = TransferStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 9, 0, 0, {}, {}, {}, {}, {}, {}, {})


@implements(WorkerTree)
class Tree:
    """Its engine answers questions while `answers`."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config, self.closed, self.taken = config, False, False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heartbeat = SimpleNamespace(step=[])
        self.engine_link = SimpleNamespace(send=self._send)
        self.transfer = SimpleNamespace(stats=self._stats)
        self.is_standby, self.standby_bytes = False, 0
        self.stands_by, self.may_count = asyncio.Event(), asyncio.Event()
        self.may_count.set()
        self.may_start, self.started = asyncio.Event(), asyncio.Event()
        self.sent: list[ToEngine] = []
        self.asked = asyncio.Event()
        self.answers = True
        self.ready = READY if not config.engine.weights_version else WITH_WEIGHTS
        self._tasks: list[asyncio.Task[None]] = []
        self.deliver: Callable[[FromEngine], None] = lambda _: None

    async def _send(self, message: ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, messages.AskStatus | messages.Pause):
            self.asked.set()
        if self.answers:
            self._answer(message)

    def _answer(self, asked: ToEngine) -> None:
        match asked:
            case messages.Pause(question):
                self.deliver(messages.Paused(question, computing=False, error=""))
            case messages.AskStatus(question):
                status = engine_status(1, [], running=0)
                status.question = question
                self.deliver(status)
            case messages.StageWeights(question):
                self.deliver(messages.WeightsStaged(question, 1, "", "files"))
            case messages.SetMemory(question, release, tags):
                self.deliver(messages.MemorySet(question, tags if release else [], False, False, ""))
            case messages.ReplaceWeights(question):
                self.deliver(messages.WeightsReplaced(question, "files", b"root"))

    async def _stats(self) -> TransferStats:
        await self.may_count.wait()
        return TRANSFERS

    async def start_engine(self, progress: Callable[[str, float], None]) -> EngineReady:
        self.taken = True
        self.started.set()
        await self.may_start.wait()
        return self.ready

    def start_standby(self) -> None:
        self.is_standby = True
        self.started.set()

    async def start_transfer(self, engine: EngineReady) -> str:
        return "127.0.0.1:1"

    def follow(self, deliver: Callable[[FromEngine], None]) -> None:
        self.deliver = deliver

    def watch(self, watcher: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(watcher))
        return self._tasks[-1]

    def end_engine(self) -> None:
        self.failure.set_exception(EngineRestart("asked for"))

    async def kill(self) -> None: ...

    async def close(self) -> None:
        self.closed = True
        for task in self._tasks:
            task.cancel()


def decodes(tree: "Tree") -> list[pb.SubmitDecode]:
    """That were sent to its engine."""
    said = [pb.RouterMessage.FromString(x.data) for x in tree.sent if isinstance(x, FromRouter)]
    return [each.decode for each in said if each.HasField("decode")]


class Worker:
    """A service process that serves."""

    def __init__(self, *, standby: bool = False) -> None:
        self._told, ready = os.pipe()
        replaced = config(role="decode", replace_engine=True, standby=standby, ready_fd=ready)
        self.service = Service(replaced, 1)
        self.backend = self.service._backend
        [self.first] = TREES
        self.serving = asyncio.create_task(self.service._live())

    async def serves(self) -> None:
        """Returns when its first engine, which starts, and its server are ready."""
        self.first.may_start.set()
        told = await within(asyncio.to_thread(self._read_told))  # it closes the pipe then
        assert '"ready"' in told
        self.first.asked.clear()

    def _read_told(self) -> str:
        with open(self._told) as told:
            return told.read()

    async def dies(self, number: int) -> "Tree":
        """The engine of this tree ends. Returns the next tree, which starts."""
        TREES[number].failure.set_exception(EngineError(f"engine {number} was killed"))
        return await self.next_tree(number + 1)

    async def next_tree(self, number: int) -> "Tree":
        while len(TREES) <= number:
            assert not self.serving.done(), self.serving.exception()
            await asyncio.sleep(0)
        await within(TREES[number].started.wait())
        return TREES[number]

    def decodes_of(self, number: int) -> list[bytes]:
        return [each.decode_id for each in decodes(TREES[number])]


TREES: list[Tree] = []
"""Of one worker, in the order of their starts."""


@asynccontextmanager
async def played_worker(*, standby: bool = False, serves: bool = True) -> AsyncIterator[Worker]:
    """It serves, or its first engine process starts."""

    def next_tree(config: WorkerConfig, *_: Any) -> Tree:
        TREES.append(Tree(config))
        return TREES[-1]

    TREES.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(service, "WorkerTree", next_tree)
        made = Worker(standby=standby)
        await made.next_tree(0)
        if serves:
            await made.serves()
        yield made
        made.serving.cancel()
        await asyncio.wait([made.serving])
        if made.backend.standby is not None:
            await made.backend.standby.close()
        await made.service._close()
    for tree in TREES:
        await tree.close()
        if tree.failure.done():
            tree.failure.exception()
