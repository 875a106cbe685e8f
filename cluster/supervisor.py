"""Follows every role, keeps the registry of ready workers, and gives it to every router.

It starts no process itself: it is given one handle per role. Behind a handle is an actor, or in tests the
runner itself; both answer the same three calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.plan import RoleSpec
from cluster.role_process import RoleState

Observer = Callable[[RoleSpec, RoleState], None]

_LOST_ACTOR_DELAY = 0.2  # seconds until a lost actor is asked again; Ray needs about a second to start it


class RoleHandle(Protocol):
    """How the supervisor reaches one role."""

    async def start(self) -> RoleState: ...

    async def changed(self, token: str) -> RoleState:
        """Waits for another state than that of `token`. Raises ConnectionError if the actor is lost."""
        ...

    async def set_workers(self, addresses: Sequence[str]) -> None:
        """Routers only: the gRPC addresses of all ready workers."""
        ...

    async def stop(self, signum: int, grace: float) -> None: ...


@dataclass
class _Member:
    spec: RoleSpec
    handle: RoleHandle
    state: RoleState
    told: tuple[str, ...] | None = None  # routers: the addresses it was given last


class Supervisor:
    """Owns the registry. `run` follows the roles until `stop` has ended them."""

    def __init__(
        self, roles: Sequence[tuple[RoleSpec, RoleHandle]], observer: Observer = lambda spec, state: None
    ) -> None:
        unknown = RoleState(token="", phase="starting")
        self._members = [_Member(spec, handle, unknown) for spec, handle in roles]
        self._observer = observer
        self._stopping = False

    def states(self) -> list[tuple[RoleSpec, RoleState]]:
        return [(member.spec, member.state) for member in self._members]

    def worker_addresses(self) -> tuple[str, ...]:
        """gRPC addresses of the workers that are ready now."""
        return tuple(
            str(member.state.ready["address"])
            for member in self._members
            if member.spec.role != "router" and member.state.ready is not None
        )

    async def run(self) -> None:
        """Starts every role and follows it until it is stopped."""
        async with asyncio.TaskGroup() as tasks:
            for member in self._members:
                tasks.create_task(self._follow(member))

    async def stop(self, signum: int, grace: float) -> None:
        """Ends routers first, so that no request meets a missing worker; then all workers at once."""
        self._stopping = True
        for routers in (True, False):
            await self._each(
                lambda m: m.handle.stop(signum, grace),
                [m for m in self._members if (m.spec.role == "router") == routers],
            )

    async def _follow(self, member: _Member) -> None:
        while not (self._stopping and member.state.phase == "stopped"):
            try:
                if not member.state.token:
                    await member.handle.start()
                state = await member.handle.changed(member.state.token)
            except ConnectionError as lost:
                if self._stopping:
                    return
                # Its process died with its actor. Ray starts the actor again; there we start the role again.
                member.told = None
                state = RoleState(token="", phase="waiting", error=str(lost))
            member.state = state
            self._observer(member.spec, state)
            await self._tell_routers()
            if not state.token:
                await asyncio.sleep(_LOST_ACTOR_DELAY)

    async def _tell_routers(self) -> None:
        """Brings every running router up to date; one that cannot be reached is told when it is back."""
        if self._stopping:
            return  # routers are the first to go
        addresses = self.worker_addresses()

        async def tell(router: _Member) -> None:
            router.told = addresses
            try:
                await router.handle.set_workers(addresses)
            except ConnectionError:
                router.told = None

        outdated = [m for m in self._members if m.spec.role == "router" and m.state.token]
        await self._each(tell, [m for m in outdated if m.told != addresses])

    @staticmethod
    async def _each(do: Callable[[_Member], Awaitable[None]], members: Sequence[_Member]) -> None:
        results = await asyncio.gather(*(do(member) for member in members), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ConnectionError):
                raise result
