"""A pause of the worker, which a coordinator sets for all workers (`rpc.pause`).

    none ─▶ new ─▶ steps ─▶ none        in any order

With `new` routers hold the requests that no worker has had. With `steps` the engine launches no step, too:
attempts stay as they are between two steps, and KV whose steps are over goes on to move. Each pause has an
end, since its coordinator may die.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from baton.rpc import worker_pb2 as pb
from baton.worker.service_process.backend import Backend, Refused
from baton.worker.service_process.live_engine import STILL_CHECK

log = logging.getLogger(__name__)

LONGEST = 7 * 24 * 3600.0
"""Seconds of a pause."""
FREEZE_WITHIN = 30.0
"""Seconds in which the engine ends the step that it computes: as long as a change of weights waits for it."""
_ABORTED = "its request was aborted: the cluster is paused with mode=abort"


class WorkerPause:
    """Of one worker."""

    def __init__(self, backend: Backend) -> None:
        self.keeps_kv = False
        """Frozen requests keep their KV if weights change."""
        self._backend = backend
        self._asked: pb.Pause = pb.PAUSE_NONE
        """Without memory the worker computes no step, whatever was asked."""
        self._one_at_a_time = asyncio.Lock()
        self._seconds, self._over = 0.0, 0.0
        """What the pause may last, and when it is over, by the clock of the loop."""
        self._ending: asyncio.Task[None] | None = None
        """Waits until the pause is over."""

    async def set(self, request: pb.PauseRequest) -> pb.WorkerStatus:
        """Returns when the engine does what was asked for. Raises Refused."""
        if request.pause not in pb.Pause.values():
            raise Refused(f"pause is {request.pause}: it must be one of {', '.join(pb.Pause.keys())}")
        if request.pause and not 0 < request.seconds <= LONGEST:
            raise Refused(f"seconds is {request.seconds:g}: it must be above 0, at most {LONGEST:g}")
        async with self._one_at_a_time:
            if not request.pause and self._backend.lacks_memory:
                raise Refused(_lacks(self._backend))
            if self._ending is not None:
                self._ending.cancel()
                self._ending = None
            try:
                pause = pb.PAUSE_STEPS if self._backend.lacks_memory else request.pause
                status = await self._apply(pause, abort=request.abort)
                self._asked = request.pause
                self.keeps_kv = request.keep_kv and request.pause == pb.PAUSE_STEPS
                self._seconds, self._over = request.seconds, _now() + request.seconds
                return status
            finally:  # also if the engine has refused it, and the pause before goes on
                if self._backend.pause:
                    self._ending = asyncio.create_task(self._end())

    @contextlib.asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """While it is open, no pause begins or ends."""
        async with self._one_at_a_time:
            yield

    async def freeze(self) -> None:
        """No step is computed until `settle`. The caller has `unchanged`. Raises Refused if the engine still
        computes after `FREEZE_WITHIN`."""
        try:
            async with asyncio.timeout(FREEZE_WITHIN):
                await self._apply(pb.PAUSE_STEPS, abort=False)
        except TimeoutError:
            raise Refused(f"its engine is still busy after {FREEZE_WITHIN:g} s") from None

    async def settle(self) -> None:
        """The worker goes on as was asked, unless it lacks memory."""
        async with self._one_at_a_time:
            if not self._backend.lacks_memory and self._backend.pause != self._asked:
                await self._apply(self._asked, abort=False)

    async def _end(self) -> None:
        """If the engine refuses to go on, it is asked again each time that the pause has lasted once more."""
        while self._backend.pause:
            await asyncio.sleep(self._over - _now())
            async with self._one_at_a_time:
                self.keeps_kv, self._asked = False, pb.PAUSE_NONE
                if self._backend.lacks_memory:
                    log.warning("the pause has lasted %g s, but %s", self._seconds, _lacks(self._backend))
                    return
                log.warning("the pause has lasted %g s: the worker goes on", self._seconds)
                try:
                    await self._apply(pb.PAUSE_NONE, abort=False)
                except Refused as error:
                    self._over = _now() + self._seconds
                    log.error("the engine stays paused, and is asked again in %g s: %s", self._seconds, error)

    async def _apply(self, pause: "pb.Pause", *, abort: bool) -> pb.WorkerStatus:
        backend = self._backend
        if pause != backend.pause:
            log.info("pause: %s", pb.Pause.Name(pause).removeprefix("PAUSE_").lower())
        before, frozen = backend.pause, pause == pb.PAUSE_STEPS
        backend.tell_pause(pause)  # first: what ends now shall not come again
        while True:
            paused = await backend.freeze(frozen=frozen, abort=_ABORTED if abort else "")
            if paused.error:
                backend.tell_pause(before)
                raise Refused(paused.error)
            if not (frozen and paused.computing):
                return await backend.status()
            abort = False
            await asyncio.sleep(STILL_CHECK)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _lacks(backend: Backend) -> str:
    if backend.released:
        text = f"memory is released ({', '.join(backend.released)}): call /resume_memory_occupation"
        return f"{text}, and then load weights" if backend.lost_weights else text
    return "its weights were released: load weights, such as by /update_weights_from_disk"
