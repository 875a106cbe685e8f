"""Orders of events while an engine process is replaced: what comes in between, and what ends in between. The
service process is real, and the test plays its process trees."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.messages import EngineReady
from baton.worker.processes import EngineError, StandbyError, StartError, TreeError
from baton.worker.service_process import backend, live_engine, service
from baton.worker.service_process.backend import SHUTTING_DOWN, Refused
from baton.worker.service_process.pause import WorkerPause
from baton.worker.service_process.standby import MOST_ENDS, Standby
from baton.worker.service_process.streams import Routers
from baton.worker.service_process.weights import REASON, WeightsReplacement
from tests.layouts import kv_layout
from tests.router_messages import next_message
from tests.within import within

from .played import TREES, Tree, Worker, decodes, played_worker
from .test_open_attempts import A, B, decode, tokens


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with played_worker() as made:
        yield made


async def test_an_attempt_that_comes_in_a_pause_is_sent_once(worker: Worker) -> None:
    """The next engine is asked to pause before it gets the attempts that wait."""
    await worker.backend.forward(*decode(A))
    worker.backend.tell_pause(pb.PAUSE_STEPS)
    second = await worker.dies(0)
    second.answers = False
    second.may_start.set()
    await within(second.asked.wait())
    await worker.backend.forward(*decode(B))
    [asked] = [each for each in second.sent if isinstance(each, messages.Pause)]
    second.answers = True
    second._answer(asked)
    await within(worker.backend.serving())
    assert sorted(worker.decodes_of(1)) == [A, B]


@pytest.mark.parametrize("computes", [True, False])
async def test_an_engine_that_dies_as_soon_as_it_serves(worker: Worker, computes: bool) -> None:
    """It has not told its status yet. If it has computed a token, another one goes on."""
    await worker.backend.forward(*decode(A))
    second = await worker.dies(0)
    second.answers = False
    second.may_start.set()
    await within(second.asked.wait())
    if computes:
        second.deliver(tokens(A, 5))
        third = await worker.dies(1)
        third.may_start.set()
        await within(worker.backend.serving())
        [again] = decodes(third)
        assert again.request.output_ids == [5]
    else:
        second.failure.set_exception(EngineError("engine 1 was killed"))
        with pytest.raises(TreeError, match="engine 1 was killed"):
            await within(worker.serving)


async def test_an_idle_engine_that_lived_for_long_is_replaced_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computed no token because none was asked for."""
    monkeypatch.setattr(live_engine, "LONG_LIFE", 0.0)
    for number in range(3):
        following = await worker.dies(number)
        following.may_start.set()
        await within(worker.backend.serving())


@pytest.mark.parametrize("error", [OSError("too many open files"), ValueError("no space")])
async def test_a_next_engine_that_cannot_be_started_is_the_end_of_the_worker(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Not a traceback: routers are told of the attempts that were in the last step."""

    def refused(*_: Any) -> Tree:
        raise error

    monkeypatch.setattr(service, "WorkerTree", refused)
    worker.first.failure.set_exception(EngineError("engine 0 was killed"))
    with pytest.raises(TreeError, match=str(error)):
        await within(worker.serving)


async def test_a_next_engine_that_differs_is_the_end_of_the_worker(worker: Worker) -> None:
    """Routers and lanes know what the one before has described."""
    second = await worker.dies(0)
    described = pb.WorkerDescription(num_blocks=9, block_size=4)
    second.ready = EngineReady(described, kv_layout(2, 1, 8, "float32"))
    second.may_start.set()
    with pytest.raises(TreeError, match="the next engine process differs in layout, ") as raised:
        await within(worker.serving)
    differing = str(raised.value).split("layout, ")[1].split(", ")
    assert sorted(differing) == ["block_size", "num_blocks"]


@pytest.mark.parametrize("waits_for", ["the pause", "the status"])
async def test_a_restart_before_the_one_before_is_over_is_the_same(worker: Worker, waits_for: str) -> None:
    """Each is told when the engine serves. The next call is a restart of its own."""
    if waits_for == "the pause":
        worker.backend.tell_pause(pb.PAUSE_STEPS)
    restarts = [asyncio.create_task(worker.backend.restart_engine())]
    second = await worker.next_tree(1)
    second.answers = False
    second.may_start.set()
    await within(second.asked.wait())
    assert isinstance(second.sent[-1], messages.Pause) == (waits_for == "the pause")
    restarts.append(asyncio.create_task(worker.backend.restart_engine()))
    await asyncio.sleep(0)
    assert not any(restart.done() for restart in restarts), "it does not serve yet"
    second.answers = True
    second._answer(second.sent[-1])
    await within(asyncio.gather(*restarts))
    assert [tree.failure.done() for tree in TREES] == [True, False]
    restarts = [asyncio.create_task(worker.backend.restart_engine())]
    (await worker.next_tree(2)).may_start.set()
    await within(restarts[0])


@pytest.mark.parametrize("cancelled", [True, False])
async def test_an_engine_that_does_not_pause_is_replaced_too(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """Also if the call ends meanwhile: the engine would stay frozen."""
    await worker.backend.forward(*decode(A))
    worker.first.answers = False
    if not cancelled:
        monkeypatch.setattr(worker.backend, "_engine_timeout", 0.0)
    restart = asyncio.create_task(worker.backend.restart_engine())
    if cancelled:
        await within(worker.first.asked.wait())
        restart.cancel()
    (await worker.next_tree(1)).may_start.set()
    await within(worker.backend.serving())
    assert worker.decodes_of(1) == [A]
    await asyncio.wait([restart])
    assert restart.cancelled() == cancelled


async def test_a_restart_does_not_wait_for_ever(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    await worker.dies(0)
    monkeypatch.setattr(backend, "LONGEST_RESTART", 0.0)
    with pytest.raises(Refused, match="no other engine process is ready after 0 s"):
        await within(worker.backend.restart_engine())


@pytest.mark.parametrize(
    "error", [StartError("no such model"), TreeError("it exited"), StandbyError("another layout")]
)
async def test_a_restart_does_not_end_an_engine_that_none_can_follow(
    worker: Worker, error: Exception
) -> None:
    """The code on the disk may be broken. One that can only start alone follows."""
    standby = worker.service._standby = worker.backend.standby = Standby(worker.service._standby_tree)
    standby.start()
    first = await worker.next_tree(1)
    first.stands_by.set()
    await within(standby.settled())
    restart = asyncio.create_task(worker.backend.restart_engine())
    for number in range(2, 3 if isinstance(error, StartError) else 2 + MOST_ENDS):
        (await worker.next_tree(number)).failure.set_exception(error)
    if isinstance(error, StandbyError):
        (await worker.next_tree(3)).may_start.set()
        await within(restart)
        return
    with pytest.raises(Refused, match=f"this one goes on: {error}"):
        await within(restart)
    assert not worker.first.failure.done()
    assert (await worker.backend.status()).health == pb.WorkerStatus.HEALTH_SERVING


async def test_routers_learn_at_once_that_a_worker_drains(worker: Worker) -> None:
    """From the last reports: the engine may be in a long step."""
    router = worker.service._routers.open(1.0)
    worker.first.answers = False
    worker.backend.drain("it ends")
    told = next_message(router)
    assert told is not None
    status = pb.WorkerMessage.FromString(told).status
    assert (status.health, status.blocks_total) == (pb.WorkerStatus.HEALTH_DRAINING, 9)


async def test_a_status_of_an_engine_that_has_ended_meanwhile_does_not_say_that_the_worker_serves(
    worker: Worker,
) -> None:
    worker.first.may_count.clear()
    asked = asyncio.create_task(worker.backend.status())
    await within(worker.first.asked.wait())
    second = await worker.dies(0)
    worker.first.may_count.set()
    assert (await within(asked)).health == pb.WorkerStatus.HEALTH_DRAINING
    second.may_start.set()
    await within(worker.backend.serving())
    assert (await worker.backend.status()).health == pb.WorkerStatus.HEALTH_SERVING


@pytest.mark.parametrize("applied", [False, True], ids=["its call ends", "it is applied"])
@pytest.mark.parametrize("signal", ["staged", "closed"])
async def test_a_worker_that_shuts_down_stays_closed_after_a_replacement_of_weights(
    worker: Worker, tmp_path: Path, signal: str, applied: bool
) -> None:
    """Routers must not send it requests again, whichever of the two began first."""
    backend, routers = worker.backend, Routers()
    weights = WeightsReplacement(backend, routers, WorkerPause(backend), pb.WorkerDescription())
    commands = asyncio.Queue[pb.WeightsCommand | None]()

    async def asked() -> AsyncIterator[pb.WeightsCommand]:
        while (command := await commands.get()) is not None:
            yield command

    reports = weights.run(asked())

    async def report(**kind: Any) -> None:
        commands.put_nowait(pb.WeightsCommand(**kind))
        await within(anext(reports))

    await report(stage=pb.StageWeights(path=str(tmp_path), version="1"))
    if signal == "staged":
        await within(worker.service._drain())
    await report(close=True)
    if signal == "closed":
        assert backend.draining == REASON
        await within(worker.service._drain())
    if applied:
        await report(apply=True)
        assert await within(anext(reports, None)) is None
    else:
        commands.put_nowait(None)
        with pytest.raises(Refused, match="the call ended before apply"):
            await within(anext(reports))
    assert weights.is_open, "routers may attach, and learn that it shuts down"
    assert backend.draining == SHUTTING_DOWN
    assert (await backend.status()).health == pb.WorkerStatus.HEALTH_DRAINING
    with pytest.raises(Refused, match=SHUTTING_DOWN):
        await backend.restart_engine()


async def test_a_signal_meanwhile_ends_the_worker(worker: Worker) -> None:
    await worker.dies(0)
    worker.service._interrupt()
    with pytest.raises(service.Interrupted):
        await within(worker.serving)
