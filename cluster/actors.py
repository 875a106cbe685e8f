"""One Ray actor per role. Only control goes through Ray: states, addresses, stop. Never tokens, never KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from cluster.plan import RoleSpec
from cluster.role_process import RoleState
from cluster.runner import RoleRunner


class RoleActor(RoleRunner):
    """The runner as an actor. Named so that no process of Ray is called after a role."""


class RemoteRole:
    """A `supervisor.RoleHandle` to an actor, here or on another machine."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def start(self) -> RoleState:
        return await self._call(self._actor.start.remote())

    async def changed(self, token: str) -> RoleState:
        return await self._call(self._actor.changed.remote(token))

    async def set_workers(self, addresses: Sequence[str]) -> None:
        await self._call(self._actor.set_workers.remote(tuple(addresses)))

    async def stop(self, signum: int, grace: float) -> None:
        await self._call(self._actor.stop.remote(signum, grace))

    @staticmethod
    async def _call(reference: Any) -> Any:
        try:
            return await reference
        except RayActorError as error:
            raise ConnectionError(f"lost its actor ({type(error).__name__})") from error


def place(spec: RoleSpec, directory: Path, logs: Path) -> RemoteRole:
    """Starts the actor of one role in the local Ray, which ends with us."""
    actor = ray.remote(RoleActor).options(
        num_cpus=spec.cpus,
        num_gpus=spec.gpus,
        max_restarts=-1,  # an actor only holds a role; a lost one is always worth replacing
        max_task_retries=0,  # the supervisor asks again itself: it must see that the role was lost
    )
    return RemoteRole(actor.remote(spec, directory, logs))
