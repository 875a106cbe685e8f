"""How the engine process ends if vLLM does, and what its service then knows. vLLM is played."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from baton.engine import EngineConfig
from baton.kv_transfer import Heartbeat
from baton.kv_transfer.channel import ChannelClosed
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.adapters import FILES, Adapters
from baton.vllm_worker.attachment import OnDevice, Pool
from baton.vllm_worker.engine import EngineGone
from baton.vllm_worker.engine_process import EngineProcess
from baton.worker import messages
from baton.worker.engine_process.start import EXIT_START_FAILED, EngineProcessConfig
from baton.worker.ipc import EngineLink
from baton.worker.messages import EngineReady
from tests.layouts import kv_layout
from tests.router_messages import submit_decode, work
from tests.stand_in import stand_in
from tests.vllm_worker.played import played
from tests.within import within

pytestmark = pytest.mark.all

D = b"d" * 16
READY = EngineReady(
    pb.WorkerDescription(max_model_len=100, block_size=16, num_blocks=40), kv_layout(3, 2, 8, "float32")
)


class Process(EngineProcess):
    """Its vLLM and its connector say nothing, until each raises an error."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.computes = asyncio.Event()
        self.vllm, self.connector = asyncio.Future[None](), asyncio.Future[Any]()
        self.adapters = Adapters(self._nothing, self._nothing, 2)

    async def _start(self) -> Any:
        self._connector.receive = lambda: self.connector  # type: ignore[method-assign,assignment]
        vllm = played("vllm_worker/llm.py", "VLLM", generate=self._generate, adapters=self.adapters)
        return vllm, READY, Pool(16, 11)

    async def _nothing(self, *_: Any) -> None:
        pass

    async def _generate(self, *_: Any) -> AsyncGenerator[Any, None]:
        self.computes.set()
        yield await asyncio.shield(self.vllm)

    def close(self) -> None:
        self._link.close()
        self._connector.close()


def config_of(service: EngineLink, heartbeat: Heartbeat) -> Any:
    return stand_in(
        EngineProcessConfig,
        address=service.address, heartbeat_fd=heartbeat.fd, arenas=None, rank_arenas=(), incarnation=1,
        engine=EngineConfig("model", enable_prefix_caching=False, max_num_seqs=8),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("which", "error", "code"),
    [("vllm", EngineGone(), 5), ("connector", ChannelClosed(), 5), ("connector", ValueError("broken"), None)],
    ids=["vllm", "connector", "broken"],
)
def test_the_service_reads_what_vllm_computed(which: str, error: Exception, code: int | None) -> None:
    """The process ends at once, and the service blames the requests of the crashed step."""
    heartbeat = Heartbeat.create()

    async def main() -> int:
        with closing(Process(config_of(service, heartbeat))) as process:
            running = asyncio.create_task(process.run())
            await service.send(submit_decode(7, work(D), None))
            computes = asyncio.create_task(process.computes.wait())
            await asyncio.wait({computes, running}, return_when=asyncio.FIRST_COMPLETED)
            assert not running.done(), running
            assert heartbeat.step == [D]
            getattr(process, which).set_exception(error)
            return await running

    ends = pytest.raises(ValueError, match="broken") if code is None else nullcontext()
    with closing(EngineLink(None)) as service, asyncio.Runner() as runner, ends:
        assert runner.run(within(main())) == code
    assert heartbeat.step == [D]


def test_a_status_has_the_adapters_that_are_on_the_device(tmp_path: Path) -> None:
    for file in FILES:
        (tmp_path / file).touch()

    async def main() -> None:
        with closing(Process(config_of(service, Heartbeat.create()))) as process:
            running = asyncio.create_task(process.run())
            assert isinstance(await service.receive(), EngineReady)
            names = [await process.adapters.load(name, str(tmp_path)) for name in ("a", "b")]
            said, process.connector = process.connector, asyncio.Future()
            said.set_result([OnDevice([2], 0.5)])
            await asyncio.sleep(0)  # it is read
            await service.send(messages.AskStatus(7))
            status = await service.receive()
            assert isinstance(status, messages.EngineStatus)
            assert status.told.adapters_on_device == [names[1]]
            assert status.told.adapter_move_seconds == 0.5
            running.cancel()

    with closing(EngineLink(None)) as service, asyncio.Runner() as runner:
        runner.run(within(main()))


def test_what_the_start_has_made_is_not_scanned_again() -> None:
    """The modules of vLLM have 600,000 objects."""
    gc.unfreeze()

    async def main() -> None:
        with closing(Process(config_of(service, Heartbeat.create()))) as process:
            running = asyncio.create_task(process.run())
            assert isinstance(await service.receive(), EngineReady)
            assert gc.get_freeze_count() > len(gc.get_objects())
            running.cancel()

    try:
        with closing(EngineLink(None)) as service, asyncio.Runner() as runner:
            runner.run(within(main()))
    finally:
        gc.freeze()  # as the tests after it expect (`tests.conftest`)


def test_a_vllm_that_does_not_start_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: EngineProcess) -> None:
        raise ValueError("no vLLM")

    monkeypatch.setattr(EngineProcess, "_start", fails)
    with TemporaryDirectory() as directory, asyncio.Runner() as runner:
        monkeypatch.setattr("tempfile.tempdir", directory)

        async def main() -> int:
            with closing(EngineLink(None)) as service:
                return await EngineProcess(config_of(service, Heartbeat.create())).run()

        assert runner.run(within(main())) == EXIT_START_FAILED
        assert [*Path(directory).iterdir()] == []
