"""One Ray actor per role. Only control goes through Ray: states, addresses, stop. Never tokens, never KV."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.plan import RoleSpec
from cluster.role_process import RoleState
from cluster.runner import RoleRunner
from cluster.supervisor import Supervisor

NAMESPACE = "baton"
SUPERVISOR = "supervisor"


class RoleActor(RoleRunner):
    """The runner as an actor. Named so that no process of Ray is called after a role."""


class RemoteRole:
    """A `supervisor.RoleHandle` to an actor, here or on another machine."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def start(self) -> RoleState:
        return await _answer(self._actor.start.remote())

    async def changed(self, token: str) -> RoleState:
        return await _answer(self._actor.changed.remote(token))

    async def set_workers(self, addresses: Sequence[str]) -> None:
        await _answer(self._actor.set_workers.remote(tuple(addresses)))

    async def stop(self, signum: int, grace: float) -> None:
        await _answer(self._actor.stop.remote(signum, grace))

    def forget(self) -> None:
        """Ends the actor itself, for good."""
        ray.kill(self._actor)


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except RayActorError as error:
        raise ConnectionError(f"lost its actor ({type(error).__name__})") from error


def _options(spec: RoleSpec) -> dict[str, Any]:
    return {
        "num_cpus": spec.cpus,
        "num_gpus": spec.gpus,
        "max_restarts": -1,  # an actor only holds a role; a lost one is always worth replacing
        "max_task_retries": 0,  # the supervisor asks again itself: it must see that the role was lost
    }


def place(spec: RoleSpec, directory: Path, logs: Path) -> RemoteRole:
    """Starts the actor of one role in a Ray of our own, which ends with us."""
    return RemoteRole(ray.remote(RoleActor).options(**_options(spec)).remote(spec, directory, logs))


def _end_if_failed(following: asyncio.Task[None]) -> None:
    """A supervisor with a bug must not look alive: Ray starts a new one, which finds the roles again."""
    if not following.cancelled() and (error := following.exception()) is not None:
        logging.getLogger(__name__).error("the supervisor failed", exc_info=error)
        os._exit(1)


class ClusterActor:
    """The supervisor of a cluster that outlives the command that started it.

    When it is lost, Ray starts it again; it then finds the actors of its roles by name.
    """

    def __init__(self, roles: Sequence[RoleSpec], logs: Path | None, front_node: str) -> None:
        peer = ray.get_runtime_context().gcs_address
        self._roles: list[tuple[RoleSpec, RemoteRole]] = []
        for spec in roles:
            options = _options(spec) | {
                "name": spec.name.replace(" ", "-"),
                "namespace": NAMESPACE,
                "get_if_exists": True,
                "lifetime": "detached",
            }
            if spec.role == "router":  # where it was asked for, so that the URL it prints works there
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(front_node, soft=True)
            actor = ray.remote(RoleActor).options(**options).remote(spec, None, logs, peer)
            self._roles.append((spec, RemoteRole(actor)))
        self._changes = 0
        self._changed = asyncio.Event()
        self._supervisor = Supervisor(self._roles, self._note)
        self._following = asyncio.create_task(self._supervisor.run())
        self._following.add_done_callback(_end_if_failed)

    async def changed(self, seen: int) -> tuple[int, list[tuple[RoleSpec, RoleState]]]:
        """Waits for a change after number `seen`; returns the last one's number, and every role's state."""
        while self._changes == seen:
            await self._changed.wait()
        return self._changes, self._supervisor.states()

    async def stop(self, signum: int, grace: float) -> None:
        """Ends every role and its actor. This actor is left for the caller to end."""
        await self._supervisor.stop(signum, grace)
        await self._following
        for _, role in self._roles:
            role.forget()

    def _note(self, spec: RoleSpec, state: RoleState) -> None:
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()
