"""Follows every role, keeps the registry of ready workers, and sends the registry to every router.

The supervisor starts no process itself. `place` returns a handle for each role: a runner in this process, or
a Ray actor that holds a runner. Both implement `RoleHandle`.

A worker is in the pool of its role until it is flipped, and again after a restart.

Life of a worker that leaves the cluster: removed from the list of the routers → drained → forgotten.
"""

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from baton.cluster.supervision.blueprint import WORKERS, Pool, RoleName, RoleSpec
from baton.cluster.supervision.calls import ask_pools
from baton.cluster.supervision.role_process import RoleState

log = logging.getLogger(__name__)

_PLACED_WITHIN = 2.0  # seconds that an actor without a state has to accept `stop`: it may not be placed yet
_LOST_ACTOR_DELAY = 0.2  # seconds until a lost actor is called again; Ray needs about a second to restart it
_POOL_WITHIN = 2.0  # seconds for a worker to tell its pool; without an answer it counts as not flipped
# The fields of RoleState that the report contains.
_SHOWN = ("phase", "stage", "fraction", "crash_loop", "seconds_to_ready", "pid", "node")


class RoleHandle(Protocol):
    """Connects the supervisor to one role. Every call raises ConnectionError if the actor is lost."""

    async def start(self) -> RoleState: ...

    async def changed(self, token: str) -> RoleState:
        """Waits until the state has another token than `token`, and returns the state."""

    async def set_workers(self, addresses: Mapping[str, str | None], report: str) -> None:
        """Routers only: sets the gRPC addresses of all ready workers, and the report for `baton status`.

        `addresses`: by the name of the worker. None: the router keeps the address that it has.
        """

    async def tokens_held(self) -> int:
        """Routers only: prompt tokens that the router holds back because prefill workers have enough work."""

    async def restart(self, signum: int, grace: float) -> None:
        """Ends the process of the role and returns when its next process is ready."""

    async def stop(self, signum: int, grace: float) -> None: ...

    def forget(self) -> None:
        """Ends the actor of a role that has stopped for good. A runner without an actor does nothing."""


@dataclass(eq=False)
class _Member:
    spec: RoleSpec
    handle: RoleHandle
    state: RoleState
    pool: RoleName  # where it serves: at first, and after each restart, that of its spec
    answered: bool = False  # it has answered this supervisor, or its actor was found lost
    leaving: bool = False  # removed from the list of the routers; it drains
    restarts: int = 0  # in earlier actors; the present actor counts its own
    last_exit: str = ""  # why its last run ended, in this actor or an earlier one, or is not followed
    sent: tuple[dict[str, str | None], str] | None = None  # routers only: the addresses and report last sent
    _entry: str = ""
    _entry_of: tuple[RoleState, bool, str] | None = None

    @property
    def entry(self) -> str:
        """Its part of the report, in JSON: one object for each worker. Made again after a change: the other
        roles may be a thousand."""
        if self._entry_of != (now := (self.state, self.leaving, self.last_exit)):
            self._entry_of = now
            entry = {
                "role": self.spec.role,
                "leaving": self.leaving,
                "restarts": self.restarts + self.state.restarts,
                "last_exit": self.last_exit,
                **{field: getattr(self.state, field) for field in _SHOWN},
            }
            store = self.spec.role == "store"
            addresses = [(self.state.ready or {}).get("store")] if store else self.addresses
            ranks = zip(self.spec.indices, addresses, strict=True)
            entries = [{"index": index, "address": address, **entry} for index, address in ranks]
            self._entry = ", ".join(map(json.dumps, entries))
        return self._entry

    @property
    def addresses(self) -> Sequence[str | None]:
        """Of its workers, in the order of `spec.indices`. None: they are not ready."""
        return self.state.addresses or [None] * self.spec.workers


class Supervisor:
    """Owns the registry of roles. `run` follows the roles until `stop` has ended them.

    Attributes:
        pools: size and need of each pool, written by the autoscaler; part of the report.
    """

    def __init__(
        self,
        roles: Iterable[RoleSpec],
        place: Callable[[RoleSpec], RoleHandle],
        observer: Callable[[RoleSpec, RoleState], None] = lambda spec, state: None,
        drain_grace: float = 0.0,
    ) -> None:
        self.pools: Mapping[str, Any] = {}
        self._place = place
        self._members = [self._placed(spec) for spec in roles]
        self._templates = {member.spec.role: member.spec for member in self._members}
        self._observer = observer
        self._drain_grace = drain_grace
        self._stopping = False
        self._tasks = asyncio.TaskGroup()
        self._restarting = asyncio.Lock()
        self._changed = asyncio.Event()  # set when the state of any member changes

    def _placed(self, spec: RoleSpec) -> _Member:
        return _Member(spec, self._place(spec), RoleState(token="", phase="starting"), spec.role)

    # ------------------------------------------------------------ registry

    def states(self) -> list[tuple[RoleSpec, RoleState]]:
        return [(member.spec, member.state) for member in self._members]

    def pool(self, pool: Pool) -> list[RoleState]:
        """The states of the workers, or groups, that are in a pool now, without those that leave."""
        return [m.state for m in self._members if m.pool == pool and not m.leaving]

    def set_pools(self, pools: Mapping[str, Pool]) -> None:
        """Notes the present pools of workers, by address. The first worker of a group speaks for it."""
        for member in self._workers():
            if member.state.ready is not None:
                member.pool = pools.get(str(member.state.ready["address"]), member.pool)

    def _workers(self) -> list[_Member]:
        return [m for m in self._members if m.spec.role in WORKERS]

    async def tokens_held(self) -> int | None:
        """Prompt tokens that all routers hold back; None if a router does not answer."""
        routers = [m for m in self._members if m.spec.role == "router" and m.state.ready is not None]
        try:
            return sum(await asyncio.gather(*(m.handle.tokens_held() for m in routers)))
        except ConnectionError:
            return None

    def worker_addresses(self) -> tuple[str, ...]:
        """The gRPC addresses of all ready workers, without those that leave."""
        return tuple(address for address in self._listed().values() if address is not None)

    def _listed(self) -> dict[str, str | None]:
        """These addresses for routers, by the name of the worker. None: the worker has not answered yet.

        A supervisor that replaces a lost one knows no worker at first, but the routers do.
        """
        staying = [member for member in self._workers() if not member.leaving]
        return {
            f"{member.spec.role} {index}": address
            for member in staying
            if not member.answered or member.state.ready is not None
            for index, address in zip(member.spec.indices, member.addresses, strict=True)
        }

    def report(self) -> str:
        """The JSON report of roles and pools for `baton status`. Includes roles that no router can reach."""
        roles = ", ".join([member.entry for member in self._members])
        return f'{{"roles": [{roles}], "pools": {json.dumps(self.pools)}}}'

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Starts every role and follows each of them until it has stopped."""
        async with self._tasks:
            for member in self._members:
                self._tasks.create_task(self._follow(member))

    async def restart_workers(self) -> None:
        """Drains and restarts every worker, one after the other, flipped workers first.

        A restarted worker is in its first pool again, so each pool has its workers before the others restart.
        Of the flipped workers, one in the larger pool goes next. The next worker follows when the present one
        is ready and the routers have its address. If a worker does not become ready again, the restart waits
        for it and the other workers keep serving.
        """
        async with self._restarting:
            workers = self._workers()
            addresses = [str(m.state.ready["address"]) for m in workers if m.state.ready is not None]
            secret, tls = workers[0].spec.secret, workers[0].spec.tls
            self.set_pools(await ask_pools(addresses, secret, tls, _POOL_WITHIN))
            while workers:
                workers.remove(member := max(workers, key=self._restart_order))
                before = member.state.pid
                if self._stopping or member.leaving:
                    continue
                with contextlib.suppress(ConnectionError):  # its actor was lost, so it restarts anyway
                    await member.handle.restart(signal.SIGTERM, self._drain_grace)
                while not self._has_restarted(member, before):
                    self._changed.clear()
                    await self._changed.wait()

    def _restart_order(self, member: _Member) -> int:
        """The highest is next: flipped workers, one of the larger pool before one of the smaller."""
        return 0 if member.pool == member.spec.role else sum(m.pool == member.pool for m in self._workers())

    def _has_restarted(self, member: _Member, before: int | None) -> bool:
        restarted = member.state.phase == "ready" and member.state.pid != before
        return restarted or member.leaving or self._stopping

    async def stop(self, signum: int, grace: float) -> None:
        """Stops all routers, then all workers, so that no request needs a stopped worker. Then the store, to
        which workers write until they end."""
        self._stopping = True
        self._changed.set()
        for roles in (("router",), WORKERS, ("store",)):
            members = [m for m in self._members if m.spec.role in roles]
            await self._each(lambda m: self._end(m, signum, grace), members)

    async def stop_routers(self) -> None:
        routers = [m for m in self._members if m.spec.role == "router"]
        await self._each(lambda m: self._end(m, signal.SIGTERM, self._drain_grace), routers)

    def resize(self, pool: Pool, size: int) -> None:
        """Changes the size of a pool, without waiting for workers to start or drain.

        A smaller pool drops workers that are not ready first, then those with the highest index.
        """
        staying = [m for m in self._members if m.pool == pool and not m.leaving]
        used = {m.spec.index for m in self._members if m.spec.role == pool}
        for index in [i for i in range(size + len(used)) if i not in used][: max(0, size - len(staying))]:
            member = self._placed(replace(self._templates[pool], index=index))
            self._members.append(member)
            self._tasks.create_task(self._follow(member))
        staying.sort(key=lambda m: (m.state.phase == "ready", -m.spec.index))
        for member in staying[: max(0, len(staying) - size)]:
            member.leaving = True
            self._tasks.create_task(self._leave(member))

    async def _leave(self, member: _Member) -> None:
        await self.tell_routers()  # before the drain, so that routers send it no new request
        try:
            await self._end(member, signal.SIGTERM, self._drain_grace)
        except ConnectionError:
            pass  # its process died with its actor
        except Exception:  # a defect must not end the cluster
            log.exception("%s could not be ended", member.spec.name)
        if not self._stopping:
            await self._forget(member)

    @staticmethod
    async def _end(member: _Member, signum: int, grace: float) -> None:
        stopping = asyncio.create_task(member.handle.stop(signum, grace))
        if not member.state.token:
            await asyncio.wait({stopping}, timeout=_PLACED_WITHIN)
            if not stopping.done():  # Ray has not placed the actor yet, so it cannot answer
                stopping.cancel()
                member.handle.forget()
                return
        await stopping

    async def _forget(self, member: _Member) -> None:
        member.handle.forget()
        self._members.remove(member)
        await self.tell_routers()

    async def _follow(self, member: _Member) -> None:
        while member.state.phase != "stopped":
            if not member.state.token and (self._stopping or member.leaving):
                return  # its actor was lost, and its process died with the actor
            try:
                if not member.state.token:
                    await member.handle.start()
                state = await member.handle.changed(member.state.token)
            except Exception as error:  # noqa: BLE001  (a defect must not end the cluster)
                if self._stopping or member.leaving:
                    return
                state = self._not_followed(member, error)
            is_new = state != member.state
            if state.pid != member.state.pid:
                member.pool = member.spec.role
            member.state, member.answered = state, True
            if is_new:
                member.last_exit = state.error or member.last_exit
                self._observer(member.spec, state)
            await self.tell_routers()
            self._changed.set()
            if not (is_new and state.token):
                await asyncio.sleep(_LOST_ACTOR_DELAY)
        if not self._stopping and not member.leaving:  # an earlier supervisor had told it to leave
            await self._forget(member)

    @staticmethod
    def _not_followed(member: _Member, error: Exception) -> RoleState:
        """The state of a role whose handle failed. The handle is asked again."""
        why = str(error)
        if not isinstance(error, ConnectionError):
            why = f"it cannot be followed ({type(error).__name__}: {error})"
            if why != member.last_exit:
                log.error("%s: %s", member.spec.name, why, exc_info=error)
                member.last_exit = why
            if member.state.token:
                return member.state  # its process lives on
        # The process died with its actor. Ray restarts the actor; then `start` starts the role again.
        member.sent = None
        if member.state.token:  # count a lost actor once, however often it is called
            member.restarts += member.state.restarts + 1
        return RoleState(token="", phase="waiting", error=why)

    # ------------------------------------------------------------ routers

    async def tell_routers(self) -> None:
        """Sends workers and report to each running router that lacks them. One that cannot be told gets them
        later."""
        if self._stopping:
            return
        news = (self._listed(), self.report())

        async def tell(router: _Member) -> None:
            router.sent = news
            try:
                await router.handle.set_workers(*news)
            except ConnectionError:
                router.sent = None
            except Exception:  # a defect must not end the cluster
                log.exception("%s cannot be told its workers", router.spec.name)
                router.sent = None

        outdated = [m for m in self._members if m.spec.role == "router" and m.state.token]
        await self._each(tell, [m for m in outdated if m.sent != news])

    @staticmethod
    async def _each(do: Callable[[_Member], Awaitable[None]], members: Sequence[_Member]) -> None:
        results = await asyncio.gather(*(do(member) for member in members), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ConnectionError):
                raise result
