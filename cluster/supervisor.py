"""Follows every role, keeps the registry of ready workers, and gives it to every router.

It starts no process itself: `place` gives it a handle for each role. Behind a handle is a runner, or a Ray
actor with a runner in it; both answer the same calls. Pools may grow and shrink: a worker that leaves is
first taken off the routers' list, then drained, then forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from cluster.plan import RoleName, RoleSpec
from cluster.role_process import RoleState

Observer = Callable[[RoleSpec, RoleState], None]

_PLACED_WITHIN = 2.0  # seconds for an actor that has said nothing so far to take its order to stop
_LOST_ACTOR_DELAY = 0.2  # seconds until a lost actor is asked again; Ray needs about a second to start it
_ALL_ANSWER_WITHIN = 5.0  # seconds until routers are told of those that have answered a new supervisor
_SHOWN = ("phase", "stage", "fraction", "crash_loop", "seconds_to_ready", "pid", "node")  # of RoleState


class RoleHandle(Protocol):
    """How the supervisor reaches one role. Every call raises ConnectionError if the actor is lost."""

    async def start(self) -> RoleState: ...

    async def changed(self, token: str) -> RoleState:
        """Waits for another state than that of `token`."""
        ...

    async def set_workers(self, addresses: Sequence[str], report: str) -> None:
        """Routers only: the gRPC addresses of all ready workers, and what `baton status` shows (JSON)."""
        ...

    async def tokens_held(self) -> int:
        """Routers only: prompt tokens that wait there for their turn."""
        ...

    async def restart(self, signum: int, grace: float) -> None:
        """Returns when its next process is ready."""
        ...

    async def stop(self, signum: int, grace: float) -> None: ...

    def forget(self) -> None:
        """The role has stopped for good: ends what held it."""
        ...


@dataclass(eq=False)
class _Member:
    spec: RoleSpec
    handle: RoleHandle
    state: RoleState
    answered: bool = False  # since this supervisor asks
    leaving: bool = False  # off the list; it drains, and then it is gone
    restarts: int = 0  # of earlier actors; the present one counts its own
    last_exit: str = ""  # why its last run ended, whichever actor's it was
    told: tuple[tuple[str, ...], str] | None = None  # routers: what it was given last


class Supervisor:
    """Owns the registry. `run` follows the roles until `stop` has ended them.

    Attributes:
        pools: what the autoscaler has to say of each pool; part of the report.
    """

    def __init__(
        self,
        roles: Iterable[RoleSpec],
        place: Callable[[RoleSpec], RoleHandle],
        observer: Observer = lambda spec, state: None,
        drain_grace: float = 0.0,
    ) -> None:
        self.pools: Mapping[str, Any] = {}
        self._place = place
        self._members = [self._placed(spec) for spec in roles]
        self._patterns = {member.spec.role: member.spec for member in self._members}
        self._observer = observer
        self._drain_grace = drain_grace
        self._stopping = False
        self._settled = False
        self._all_answered = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._restarting = asyncio.Lock()
        self._changed = asyncio.Event()  # any state

    def _placed(self, spec: RoleSpec) -> _Member:
        return _Member(spec, self._place(spec), RoleState(token="", phase="starting"))

    # ------------------------------------------------------------ what there is

    def states(self) -> list[tuple[RoleSpec, RoleState]]:
        return [(member.spec, member.state) for member in self._members]

    def pool(self, role: RoleName) -> list[RoleState]:
        """Of those that are there to stay."""
        return [m.state for m in self._members if m.spec.role == role and not m.leaving]

    async def tokens_held(self) -> int | None:
        """Prompt tokens that routers hold back; None where one does not say."""
        routers = [m for m in self._members if m.spec.role == "router" and m.state.ready is not None]
        try:
            return sum(await asyncio.gather(*(m.handle.tokens_held() for m in routers)))
        except ConnectionError:
            return None

    def worker_addresses(self) -> tuple[str, ...]:
        """gRPC addresses of the workers that are ready now, and stay."""
        return tuple(
            str(member.state.ready["address"])
            for member in self._members
            if member.spec.role != "router" and member.state.ready is not None and not member.leaving
        )

    def report(self) -> str:
        """What `baton status` shows of roles and pools, as JSON: also of those that no router can reach."""
        roles = []
        for member in self._members:
            state = asdict(member.state)
            ready = state.pop("ready") or {}
            roles.append(
                {
                    "role": member.spec.role,
                    "index": member.spec.index,
                    "address": ready.get("address"),
                    "leaving": member.leaving,
                    "restarts": member.restarts + state.pop("restarts"),
                    "last_exit": member.last_exit,
                    **{key: state[key] for key in _SHOWN},
                }
            )
        return json.dumps({"roles": roles, "pools": self.pools})

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Starts every role and follows it until it is stopped."""
        async with self._tasks:
            for member in self._members:
                self._tasks.create_task(self._follow(member))
            await self._settle()

    async def restart_workers(self) -> None:
        """Has every worker drain and start anew, one after the other: the next one only when the one before
        serves again and routers know it. One that does not come back stops it, and the others go on."""
        async with self._restarting:
            for member in [m for m in self._members if m.spec.role != "router"]:
                before = member.state.pid
                if self._stopping or member.leaving:
                    continue
                with contextlib.suppress(ConnectionError):  # lost with its actor: its next one is on its way
                    await member.handle.restart(signal.SIGTERM, self._drain_grace)
                while not self._renewed(member, before):
                    self._changed.clear()
                    await self._changed.wait()

    def _renewed(self, member: _Member, before: int | None) -> bool:
        again = member.state.phase == "ready" and member.state.pid != before
        return again or member.leaving or self._stopping

    async def stop(self, signum: int, grace: float) -> None:
        """Ends routers first, so that no request meets a missing worker; then all workers at once."""
        self._stopping = True
        self._all_answered.set()
        self._changed.set()
        for routers in (True, False):
            members = [m for m in self._members if (m.spec.role == "router") == routers]
            await self._each(lambda m: self._end(m, signum, grace), members)

    async def stop_routers(self) -> None:
        """They drain, and are forgotten."""
        routers = [m for m in self._members if m.spec.role == "router"]
        await self._each(lambda m: self._end(m, signal.SIGTERM, self._drain_grace), routers)

    def resize(self, role: RoleName, size: int) -> None:
        """Makes a pool of workers larger, or smaller: then its last ones drain. Returns at once."""
        staying = [m for m in self._members if m.spec.role == role and not m.leaving]
        used = {m.spec.index for m in self._members if m.spec.role == role}
        for index in [i for i in range(size + len(used)) if i not in used][: max(0, size - len(staying))]:
            member = self._placed(replace(self._patterns[role], index=index))
            self._members.append(member)
            self._tasks.create_task(self._follow(member))
        # Those that do not serve go first.
        staying.sort(key=lambda m: (m.state.phase == "ready", -m.spec.index))
        for member in staying[: max(0, len(staying) - size)]:
            member.leaving = True
            self._tasks.create_task(self._leave(member))

    async def refresh(self) -> None:
        """Tells routers what is new in the report."""
        await self._tell_routers()

    async def _leave(self, member: _Member) -> None:
        await self._tell_routers()  # from now on nobody sends it anything new
        with contextlib.suppress(ConnectionError):  # its process died with its actor
            await self._end(member, signal.SIGTERM, self._drain_grace)
        if not self._stopping:
            await self._forget(member)

    @staticmethod
    async def _end(member: _Member, signum: int, grace: float) -> None:
        stopping = asyncio.create_task(member.handle.stop(signum, grace))
        if not member.state.token:
            await asyncio.wait({stopping}, timeout=_PLACED_WITHIN)
            if not stopping.done():  # it has no place yet, and nothing can be asked of it
                stopping.cancel()
                member.handle.forget()
                return
        await stopping

    async def _forget(self, member: _Member) -> None:
        member.handle.forget()
        self._members.remove(member)
        await self._tell_routers()

    async def _follow(self, member: _Member) -> None:
        while member.state.phase != "stopped":
            if not member.state.token and (self._stopping or member.leaving):
                return  # its actor was lost, and its process with it
            try:
                if not member.state.token:
                    await member.handle.start()
                state = await member.handle.changed(member.state.token)
            except ConnectionError as lost:
                if self._stopping or member.leaving:
                    return
                # Its process died with its actor. Ray starts the actor again; there we start the role again.
                member.told = None
                if member.state.token:  # not the second time in a row
                    member.restarts += member.state.restarts + 1
                state = RoleState(token="", phase="waiting", error=str(lost))
            member.state, member.answered = state, True
            if all(each.answered for each in self._members):
                self._all_answered.set()
            member.last_exit = state.error or member.last_exit
            self._observer(member.spec, state)
            await self._tell_routers()
            self._changed.set()
            if not state.token:
                await asyncio.sleep(_LOST_ACTOR_DELAY)
        if not self._stopping and not member.leaving:  # a supervisor before this one had it drain
            await self._forget(member)

    # ------------------------------------------------------------ routers

    async def _settle(self) -> None:
        """A supervisor after another one at first knows nobody: until it has heard them, routers keep their
        lists."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_answered.wait(), _ALL_ANSWER_WITHIN)
        self._settled = True
        await self._tell_routers()

    async def _tell_routers(self) -> None:
        """Brings every running router up to date; one that cannot be reached is told when it is back."""
        if self._stopping or not self._settled:
            return  # (when all stop, routers are the first to go)
        news = (self.worker_addresses(), self.report())

        async def tell(router: _Member) -> None:
            router.told = news
            try:
                await router.handle.set_workers(*news)
            except ConnectionError:
                router.told = None

        outdated = [m for m in self._members if m.spec.role == "router" and m.state.token]
        await self._each(tell, [m for m in outdated if m.told != news])

    @staticmethod
    async def _each(do: Callable[[_Member], Awaitable[None]], members: Sequence[_Member]) -> None:
        results = await asyncio.gather(*(do(member) for member in members), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ConnectionError):
                raise result
