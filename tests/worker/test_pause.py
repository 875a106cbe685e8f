"""The pause of a worker whose engine refuses."""

import asyncio
from unittest.mock import create_autospec

import pytest

from baton.rpc import worker_pb2 as pb
from baton.worker.messages import Paused
from baton.worker.service_process.backend import Backend, Refused
from baton.worker.service_process.pause import FREEZE_WITHIN, WorkerPause
from tests.loop_clock import Clock
from tests.within import within


class Engine:
    """An engine that may refuse, behind a backend."""

    def __init__(self) -> None:
        self.refusals = list[str]()
        """Of the next calls."""
        self.computes = False
        self.serves = asyncio.Event()
        self.backend = create_autospec(Backend, instance=True)
        self.backend.pause, self.backend.lacks_memory = pb.PAUSE_NONE, False
        self.backend.tell_pause = self._tell
        self.backend.freeze = self._freeze
        self.pause = WorkerPause(self.backend)

    def _tell(self, pause: "pb.Pause") -> None:
        self.backend.pause = pause

    async def _freeze(self, *, frozen: bool, abort: str) -> Paused:
        if self.refusals:
            return Paused(0, False, self.refusals.pop(0))
        if not frozen:
            self.serves.set()
        return Paused(0, frozen and self.computes, "")


def steps(seconds: float) -> pb.PauseRequest:
    return pb.PauseRequest(pause=pb.PAUSE_STEPS, seconds=seconds)


async def test_an_engine_that_refuses_to_go_on_is_asked_again() -> None:
    engine = Engine()
    await engine.pause.set(steps(0.01))
    engine.refusals = ["one", "two"]
    await within(engine.serves.wait())
    assert (engine.backend.pause, engine.refusals) == (pb.PAUSE_NONE, [])


async def test_a_pause_that_is_refused_leaves_the_end_of_the_pause_before() -> None:
    engine = Engine()
    await engine.pause.set(pb.PauseRequest(pause=pb.PAUSE_NEW, seconds=600.0))
    for request in (steps(0.001), pb.PauseRequest()):
        engine.refusals = ["requests cannot be frozen"]
        engine.serves.clear()
        with pytest.raises(Refused, match="requests cannot be frozen"):
            await engine.pause.set(request)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await engine.serves.wait()
        assert engine.backend.pause == pb.PAUSE_NEW


async def test_an_engine_whose_step_does_not_end_is_not_frozen_for_ever(clock: Clock) -> None:
    engine = Engine()
    engine.computes = True

    async def freeze() -> None:
        try:
            async with engine.pause.unchanged():
                await engine.pause.freeze()
        finally:
            await engine.pause.settle()

    freezing = asyncio.create_task(freeze())
    await clock.forward(FREEZE_WITHIN - 1)
    assert engine.backend.pause == pb.PAUSE_STEPS
    await clock.forward(2.0)
    with pytest.raises(Refused, match="its engine is still busy after 30 s"):
        await within(freezing)
    assert engine.backend.pause == pb.PAUSE_NONE
    assert engine.serves.is_set()
