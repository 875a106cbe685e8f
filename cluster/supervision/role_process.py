"""Runs one role as a child process: starts it, reads its ready pipe, restarts it when it dies.

`processes.restarts` has its life: `restart` replaces the child, and `stop` ends all.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from baton.cluster.supervision.role_log import keep_bounded, open_log
from baton.processes import ready_pipe
from baton.processes.children import Child, describe_exit
from baton.processes.keep import keep
from baton.processes.restarts import TRANSITIONS, Event, Phase, RestartPolicy


@dataclass(frozen=True, slots=True)
class RoleState:
    """A snapshot of a role for the supervisor. Every change gets a new `token`, unique across actors."""

    token: str
    phase: Phase
    stage: str = "starting"
    fraction: float = 0.0
    ready: Mapping[str, Any] | None = None  # the role's ready line: addresses, incarnation, pid
    pid: int | None = None
    restarts: int = 0
    error: str = ""  # why the last run ended, for people; "" after a clean end
    crash_loop: bool = False
    seconds_to_ready: float | None = None  # of the current run
    node: str = ""  # the machine, for people

    @property
    def addresses(self) -> Sequence[str]:
        """gRPC addresses of a ready worker, or of those of a group. Empty: they are not ready."""
        if self.ready is None:
            return ()
        return [str(each) for each in self.ready.get("addresses", (self.ready.get("address"),))]


# Takes the ready line of a role. Returns when the role counts as dead, with the reason for people.
Watch = Callable[[Mapping[str, Any]], Coroutine[Any, Any, str]]


class RoleProcess:
    """Keeps `command --ready-fd N` running until `stop`. All calls belong to one event loop.

    The child gets its own session: a Ctrl-C in the terminal reaches only this process, which stops the child.
    The child dies with the *thread* that spawned it (see `processes`). So the thread of the event loop must
    live as long as this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        policy: RestartPolicy,
        until_silent: Watch,
        node: str = "",
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._log = log
        self._policy = policy
        self._until_silent = until_silent
        self._epoch = os.urandom(8).hex()
        self._changes = 0
        self._changed = asyncio.Event()
        self.state = RoleState(token=f"{self._epoch}.0", phase="starting", node=node)
        self._child: Child | None = None
        self._watching: asyncio.Task[str] | None = None
        self._stopping = asyncio.Event()
        self._restarting = False
        self._restarts = 0
        self._task: asyncio.Task[None] | None = None

    def launch(self, **environment: str) -> RoleState:
        """Starts the child, unless it was started before. It and its successors get the `environment`."""
        if self._task is None:
            self._environment |= environment
            self._task = asyncio.create_task(self._supervise())
            self._task.add_done_callback(self._ended)
            bounding = asyncio.create_task(keep_bounded(self._log))
            self._task.add_done_callback(lambda _: bounding.cancel())
        return self.state

    async def changed(self, token: str) -> RoleState:
        """Waits until the state has another token than `token`, and returns the state. Raises the defect that
        has ended the supervision, after its state was returned."""
        while self.state.token == token:
            if self._task is not None and self._task.done():
                self._task.result()
            await self._changed.wait()
        return self.state

    async def stop(self, signum: int, grace: float) -> None:
        """Ends the child with `signum`, and after `grace` seconds with SIGKILL. May be repeated."""
        self._stopping.set()
        if self._task is None:
            return
        self._signal(signum)
        done, _ = await asyncio.wait([self._task], timeout=grace)
        if not done:
            self._kill()
            await self._task
        self._task.result()

    async def restart(self, signum: int, grace: float) -> None:
        """Ends the child as `stop` does, and returns when the next child is ready.

        A child that is not ready yet is not ended: `restart` waits until it is.
        """
        if self.state.phase == "ready":
            self._restarting = True
            self._signal(signum)
            try:
                pid = self.state.pid
                async with asyncio.timeout(grace):
                    await self._until(lambda state: state.pid != pid)
            except TimeoutError:
                self._kill()
        await self._until(lambda s: s.phase == "stopped" or (s.phase == "ready" and not self._restarting))

    async def _until(self, holds: Callable[[RoleState], bool]) -> None:
        while not holds(state := self.state):
            await self.changed(state.token)

    async def _supervise(self) -> None:
        await keep(self._run, self._policy, self._stopping, self._has_ended)
        self._set("stop", ready=None, pid=None)

    async def _run(self) -> tuple[float, str]:
        """Runs the child, and another one after each `restart`, as `keep.keep` has it."""
        while True:
            started = time.monotonic()
            if self.state.phase == "waiting":
                self._set("delay over")
            try:
                code, why = await self._run_once()
            except (OSError, ValueError) as error:  # no process or memory is left, or a secret is missing
                code, why = 1, f"cannot be started: {error}"
            if self._stopping.is_set():
                # A starting child has no signal handlers yet, so the signal kills it: that is no error.
                unclean = code != 0 and self.state.phase == "ready"
                self._set(error=why if unclean else "")
            elif self._restarting:
                self._restarting = False
                self._set("replaced", stage="starting", fraction=0.0, ready=None, pid=None, error="")
                continue
            return time.monotonic() - started, why

    def _has_ended(self, why: str, delay: float) -> None:
        self._restarts += 1
        loop = self._policy.crash_loop(time.monotonic())
        self._set("ended", ready=None, pid=None, error=why, restarts=self._restarts, crash_loop=loop)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            why = f"it is supervised no more ({type(error).__name__}: {error})"
            self._set(phase="waiting", ready=None, pid=None, error=why)

    async def _run_once(self) -> tuple[int, str]:
        """Runs the child once. Returns its exit code, and why it ended, for people.

        Raises OSError or ValueError if the child cannot be started or watched. Then it does not run.
        """
        started = time.monotonic()
        with open_log(self._log) as log:
            # The start blocks the loop for milliseconds. It must be here: the child dies with its thread.
            environment = {**self._environment, **self._secrets()}
            popen, pipe = ready_pipe.start(self._command, environment, output=log)
        child = self._child = Child(self._log.name, popen, session=True)
        self._set(
            stage="starting", fraction=0.0, pid=popen.pid, seconds_to_ready=None, restarts=self._restarts
        )
        failure = asyncio.create_task(self._beside_child(lambda: self._follow(pipe, started)))
        self._watching = watching = asyncio.create_task(self._beside_child(self._watch))
        try:
            code = await child.wait()
            hung = watching.result() if watching.done() and not watching.cancelled() else ""
        finally:
            watching.cancel()
            child.kill()
            self._child = None
        return code, hung or await failure or describe_exit(code)

    async def _beside_child(self, work: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """A defect of `work` ends the child. Otherwise nothing would tell of it before the child ends."""
        try:
            return await work()
        except Exception:
            self._kill()
            raise

    def _secrets(self) -> Mapping[str, str]:
        """Variables that are read at each start. Raises ValueError if they cannot be."""
        return {}

    async def _watch(self) -> str:
        """Waits until the child hangs, kills it, and returns the reason for people."""
        await self._until(lambda state: state.ready is not None)
        assert self.state.ready is not None
        why = await self._until_silent(self.state.ready)
        self._kill()
        return why

    async def _follow(self, pipe: BinaryIO, started: float) -> str:
        """As `ready_pipe.follow`."""

        def ready(line: Mapping[str, Any]) -> None:
            seconds = time.monotonic() - started
            self._set("ready", stage="ready", fraction=1.0, ready=line, seconds_to_ready=seconds)

        def stage(name: str, fraction: float) -> None:
            self._set(stage=name, fraction=fraction)

        return await ready_pipe.follow(pipe, ready, stage, self._kill)

    def _set(self, event: Event | None = None, **changes: Any) -> None:
        self._changes += 1
        if event is not None:
            changes["phase"] = TRANSITIONS[self.state.phase, event]
        self.state = replace(self.state, token=f"{self._epoch}.{self._changes}", **changes)
        self._changed.set()
        self._changed = asyncio.Event()

    def _signal(self, signum: int) -> None:
        """Tells the child to end. A router that drains does not listen any more, so silence says nothing from
        now on: the caller's grace limits the time."""
        if self._watching is not None:
            self._watching.cancel()
        if self._child is not None:
            self._child.signal(signum)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
