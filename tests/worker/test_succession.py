"""Any order of events while engine processes follow each other. The service process is real, its process
trees are played, and the table of `succession` says in which phase it must be."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.rpc import worker_pb2 as pb
from baton.worker.processes import EngineError, TreeError
from baton.worker.service_process.backend import Refused
from baton.worker.service_process.pause import WorkerPause
from baton.worker.service_process.streams import Routers
from baton.worker.service_process.succession import TRANSITIONS, Event
from baton.worker.service_process.weights import WeightsReplacement
from tests.router_messages import cancel as cancelled
from tests.router_messages import new_id
from tests.within import within

from .played import TREES, Tree, Worker, decodes, played_worker
from .test_open_attempts import decode, sent, tokens


def test_the_table_ends_in_one_phase_which_each_other_one_can_reach() -> None:
    after: dict[str, set[str]] = {phase: set() for phase, _ in TRANSITIONS}
    for (phase, _), to in TRANSITIONS.items():
        after[phase].add(to)
    assert {to for each in after.values() for to in each} == {*after, "over"} - {"starting"}
    reached, news = {"starting"}, {"starting"}
    while news:
        news = {to for phase in news for to in after.get(phase, ())} - reached
        reached |= news
    assert reached == {*after, "over"}
    for phase in after:
        assert (phase, "ended") in TRANSITIONS, "an engine process may end at any time"
        assert (phase, "failed") in TRANSITIONS, "and so may another process"


class Walk:
    """What has happened to a worker, and what must be true of it."""

    def __init__(self, worker: Worker, checkpoint: str, *, serves: bool) -> None:
        self.worker = worker
        self._checkpoint = checkpoint
        self.phase = "serving" if serves else "starting"
        self.begun, self.draining, self.planned, self.has_computed = serves, False, False, False
        self._just_begun = False
        self.pool = pb.POOL_DECODE
        self.lacking = False
        """Whether memory is released."""
        self.outputs: dict[bytes, list[int]] = {}
        """Of open attempts."""
        self.version = self.began_with = self._names = 0
        """Of the weights: now, when the engine process began, and that were staged."""
        self._restarts: list[asyncio.Task[None]] = []
        self._commands = asyncio.Queue[pb.WeightsCommand]()
        self._reports: AsyncIterator[pb.WeightsReport] | None = None
        backend = worker.backend
        self._weights = WeightsReplacement(backend, Routers(), WorkerPause(backend), pb.WorkerDescription())
        self._stager: Tree | None = None
        """Whose engine has staged weights."""

    @property
    def engine(self) -> Tree:
        """The last one that is no standby, or no standby any more."""
        return next(tree for tree in reversed(TREES) if tree.taken or not tree.is_standby)

    @property
    def _before(self) -> Tree | None:
        """The last one that has ended and had begun."""
        return next((tree for tree in reversed(TREES) if tree.closed and tree.may_start.is_set()), None)

    @property
    def standby(self) -> Tree | None:
        last = TREES[-1]
        waits = last.is_standby and not last.taken and not last.closed
        return last if waits else None

    def _enter(self, event: Event) -> None:
        self.phase = TRANSITIONS[self.phase, event]  # pyrefly: ignore[bad-index]

    def _ended(self, event: Event, has_standby: bool) -> None:
        if self.has_computed:
            self._enter("computed")
        self._enter(event)
        self.begun = self.has_computed = False
        if self.phase == "taking over" and not has_standby:
            self._enter("no standby")

    # ------------------------------------------------------------ events

    async def engine_is_ready(self) -> None:
        if self.begun:
            return
        self.engine.may_start.set()
        self._enter("ready")
        if self.planned:
            self._enter("computed")
        self.begun, self.planned, self.began_with, self._just_begun = True, False, self.version, True
        if self.draining:
            self.phase = "over"

    async def engine_ends(self) -> None:
        await self._ends(EngineError("it was killed"), "ended")

    async def two_engines_end(self) -> None:
        """Within a moment: the second one has not begun."""
        for _ in range(2):
            if self.phase != "over":
                await self.engine_ends()
                await settled()

    async def another_process_ends(self) -> None:
        await self._ends(TreeError("the transfer process was killed"), "failed")

    async def _ends(self, error: TreeError, event: Event) -> None:
        has_standby = self.standby is not None
        event = "failed" if self.lacking else event
        self.engine.failure.set_exception(error)
        self._ended(event, has_standby)
        self.planned = self.planned and self.phase == "starting alone"

    async def engine_and_standby_end(self) -> None:
        if (standby := self.standby) is not None:
            standby.failure.set_exception(EngineError("it was killed, too"))
            self.engine.failure.set_exception(EngineError("it was killed"))
            self._ended("ended", has_standby=True)
            await settled()
            if self.phase == "taking over" and not self.engine.is_standby:
                self._enter("no standby")  # else another standby had been started before
            self.planned = False

    async def standby_stands_by(self) -> None:
        if self.standby is not None and self.worker.backend.standby is not None:
            self.standby.stands_by.set()
            await within(self.worker.backend.standby.settled())

    async def standby_ends(self) -> None:
        if (standby := self.standby) is not None:
            standby.failure.set_exception(EngineError("it was killed"))

    async def token(self) -> None:
        if self.begun and self.outputs:
            attempt_id, output = next(iter(self.outputs.items()))
            self.engine.deliver(tokens(attempt_id, len(output) + 5, first=len(output)))
            output.append(len(output) + 5)
            self.has_computed = True

    async def late_token(self) -> None:
        """Of the engine process before: it was in the socket."""
        if self.phase == "taking over" and self.outputs and (before := self._before) is not None:
            attempt_id, output = next(iter(self.outputs.items()))
            before.deliver(tokens(attempt_id, len(output) + 5, first=len(output)))
            output.append(len(output) + 5)

    async def move(self) -> None:
        self.pool = pb.POOL_PREFILL if self.pool == pb.POOL_DECODE else pb.POOL_DECODE
        assert (await within(self.worker.backend.set_pool(self.pool))).pool == self.pool

    async def attempt(self) -> None:
        if not self.draining and self.phase != "starting":
            attempt_id = new_id()
            await self.worker.backend.forward(*decode(attempt_id))
            self.outputs[attempt_id] = []

    async def cancel(self) -> None:
        if self.outputs:
            attempt_id, _ = self.outputs.popitem()
            await self.worker.backend.forward(*sent(cancelled(1, attempt_id)))

    async def restart(self) -> None:
        if self.draining or self.phase == "starting":
            return
        self._restarts.append(asyncio.create_task(self.worker.backend.restart_engine()))
        await settled()
        await self.standby_stands_by()
        if self.begun and not self.lacking:
            self.planned = True
            self._ended("restart", self.worker.backend.standby is not None)

    async def memory(self) -> None:
        """Of KV: it is released, or it comes back."""
        if self.begun and not self.draining:
            self.lacking = not self.lacking
            await within(self.worker.backend.set_memory(["kv_cache"], release=self.lacking))

    async def stage(self) -> None:
        if self.begun and self._reports is None and not self.draining:
            commands = self._commands = asyncio.Queue[pb.WeightsCommand]()

            async def asked() -> AsyncIterator[pb.WeightsCommand]:
                while True:
                    yield await commands.get()

            self._reports, self._stager = self._weights.run(asked()), self.engine
            self._names += 1
            stage = pb.StageWeights(path=self._checkpoint, version=str(self._names))
            await self._command(stage=stage)

    async def close_and_apply(self) -> None:
        if self._reports is None or not self.begun:
            return
        while self.outputs:  # they are handed back
            await self.cancel()
        try:
            await self._command(close=True)
            self._commands.put_nowait(pb.WeightsCommand(apply=True))
            assert await within(anext(self._reports, None)) is not None
        except TreeError:
            assert self._stager is not self.engine, "it is there"
        else:
            assert self._stager is self.engine, "no other one has staged them"
            self.version = self._names
        await self._weights_end()

    async def _command(self, **kind: object) -> None:
        assert self._reports is not None
        self._commands.put_nowait(pb.WeightsCommand(**kind))  # pyrefly: ignore[bad-argument-type]
        await within(anext(self._reports))

    async def _weights_end(self) -> None:
        if self._reports is not None:
            await self._reports.aclose()  # pyrefly: ignore[missing-attribute]
            self._reports = None

    async def drain(self) -> None:
        self.worker.service._terminate()
        self.draining = True
        if self.begun or self.phase == "starting":
            self.phase = "over"

    # ------------------------------------------------------------ what must be true

    async def check(self) -> None:
        worker = self.worker
        submitted = [each.decode_id for each in decodes(self.engine)]
        if self.begun:
            assert len(submitted) == len({*submitted}), "an attempt is submitted once"
            assert {*self.outputs} <= {*submitted}, "no attempt is lost"
        if self.phase == "over":
            await within(asyncio.wait([worker.serving]))
            return
        assert not worker.serving.done(), worker.serving.exception()
        assert worker.service.phase == self.phase
        assert [tree for tree in TREES if not tree.closed and tree is not self.standby] == [self.engine]
        status = await worker.backend.status()
        if self.lacking:
            assert self.standby is None, "it would have pages that are released"
        assert status.pool == self.pool
        serves = self.begun and not self.draining
        assert status.health == (
            pb.WorkerStatus.HEALTH_SERVING if serves else pb.WorkerStatus.HEALTH_DRAINING
        )
        if not self.begun:
            return
        assert all(task.done() for task in self._restarts), "it serves"
        for each in decodes(self.engine):
            known = self.outputs.get(each.decode_id, [])
            count = len(known if self._just_begun else each.request.output_ids)
            assert not known or [*each.request.output_ids] == known[:count]
        self._just_begun = False
        assert self.engine.config.engine.weights_version == (str(self.began_with) if self.began_with else "")

    async def end(self) -> None:
        for task in self._restarts:
            task.cancel()
        for result in await asyncio.gather(*self._restarts, return_exceptions=True):
            assert result is None or isinstance(result, Refused | asyncio.CancelledError), result
        await self._weights_end()


Events = list[Callable[[Walk], Awaitable[None]]]
EVENTS: Events = [
    Walk.engine_is_ready, Walk.engine_ends, Walk.two_engines_end, Walk.another_process_ends,
    Walk.engine_and_standby_end, Walk.standby_stands_by, Walk.standby_ends, Walk.token, Walk.late_token,
    Walk.attempt, Walk.cancel, Walk.restart, Walk.move, Walk.memory, Walk.stage, Walk.close_and_apply,
    Walk.drain,
]  # fmt: skip
GOES_ON: Events = [Walk.engine_is_ready, Walk.attempt, Walk.token]
CHANGE: Events = [Walk.stage, Walk.close_and_apply]
ORDERS: list[Events] = [
    [*CHANGE, Walk.engine_ends, *GOES_ON, *CHANGE, Walk.standby_stands_by, Walk.engine_ends, *GOES_ON],
    [*CHANGE, Walk.restart, *GOES_ON, Walk.engine_ends, *GOES_ON],
    [Walk.stage, Walk.engine_ends, *GOES_ON, Walk.close_and_apply, *CHANGE, Walk.engine_ends, *GOES_ON],
    [Walk.memory, Walk.memory, Walk.standby_stands_by, Walk.engine_ends, *GOES_ON],
    [*GOES_ON, Walk.memory, Walk.engine_ends],
    [Walk.attempt, Walk.engine_ends, Walk.cancel, Walk.attempt, Walk.drain, Walk.engine_is_ready],
    [Walk.restart, Walk.engine_is_ready, Walk.restart, *GOES_ON, Walk.restart, Walk.engine_ends, *GOES_ON],
    [Walk.attempt, Walk.engine_ends, Walk.late_token, Walk.engine_is_ready, Walk.engine_ends],
]
"""That random ones rarely have."""


async def settled() -> None:
    """All that is ready has run."""
    for _ in range(30):
        await asyncio.sleep(0)


async def walk(events: Events, *, standby: bool, serves: bool = True) -> None:
    """`serves`: it has begun to, else its first engine process starts."""
    with tempfile.TemporaryDirectory() as checkpoint:
        async with played_worker(standby=standby, serves=serves) as worker:
            walk = Walk(worker, checkpoint, serves=serves)
            await settled()
            for event in events:
                await event(walk)
                await settled()
                await walk.check()
                if walk.phase == "over":
                    break
            await walk.end()


@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("number", range(len(ORDERS)))
async def test_an_order_of_events(number: int, standby: bool) -> None:
    await walk(ORDERS[number], standby=standby)


@pytest.mark.parametrize("ends", [Walk.engine_ends, Walk.another_process_ends, Walk.drain])
async def test_what_ends_in_the_first_start_ends_the_worker(ends: Callable[[Walk], Awaitable[None]]) -> None:
    await walk([Walk.move, ends], standby=True, serves=False)


ANY = st.lists(st.sampled_from([*EVENTS, *CHANGE, *GOES_ON, *GOES_ON]), max_size=30)


@given(ANY, st.booleans(), st.sampled_from([True, True, False]))
@settings(max_examples=100, derandomize=True)
def test_any_order_of_events(events: Events, standby: bool, serves: bool) -> None:
    asyncio.run(walk(events, standby=standby, serves=serves))
