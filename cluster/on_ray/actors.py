"""Ray actors: one per role, and one for the supervisor.

Only control messages pass through Ray: states, addresses, stop. Tokens and KV never do.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from baton.cluster.autoscaling.autoscaler import Autoscaler
from baton.cluster.autoscaling.balancer import Balancer
from baton.cluster.on_ray import placement
from baton.cluster.options.pools import PoolOptions
from baton.cluster.supervision.blueprint import RoleSpec
from baton.cluster.supervision.role_process import RoleState
from baton.cluster.supervision.runner import RETRY_SECONDS, RoleRunner
from baton.cluster.supervision.supervisor import Supervisor

NAMESPACE = "baton"
SUPERVISOR = "supervisor"


class RoleActor(RoleRunner):
    """A `RoleRunner` as a Ray actor.

    Ray puts the class name into the title of the process, so it must not be the name of a role.
    """

    def __init__(self, spec: RoleSpec, logs: Path | None, peer: str) -> None:
        node = ray.get_runtime_context().get_node_id()
        try:
            super().__init__(spec, None, logs, peer, node=f"{socket.gethostname()} {node[:8]}")
        except (OSError, ValueError) as error:  # no room for its directories
            # For Ray an exception of a constructor is final. It restarts an actor whose process ends.
            logging.getLogger(__name__).error("%s cannot start here: %s", spec.name, error)
            time.sleep(RETRY_SECONDS)
            os._exit(1)


class RemoteRole:
    """A `supervisor.RoleHandle` for an actor on any machine."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def start(self) -> RoleState:
        return await _answer(self._actor.start.remote())

    async def changed(self, token: str) -> RoleState:
        return await _answer(self._actor.changed.remote(token))

    async def set_workers(self, addresses: Mapping[str, str | None], report: str) -> None:
        await _answer(self._actor.set_workers.remote(dict(addresses), report))

    async def tokens_held(self) -> int:
        return await _answer(self._actor.tokens_held.remote())

    async def restart(self, signum: int, grace: float) -> None:
        await _answer(self._actor.restart.remote(signum, grace))

    async def stop(self, signum: int, grace: float) -> None:
        await _answer(self._actor.stop.remote(signum, grace))

    def forget(self) -> None:
        """Kills the actor for good."""
        ray.kill(self._actor)


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except RayActorError as error:
        raise ConnectionError(f"its Ray actor was lost ({type(error).__name__})") from error


def actor_name(spec: RoleSpec) -> str:
    return f"{spec.role}-{spec.index}"


def _all_roles(roles: Sequence[RoleSpec], actors: Iterable[str]) -> list[RoleSpec]:
    """The roles of the start, and the roles that the autoscaler added: those have an actor, too."""
    templates = {spec.role: spec for spec in roles}
    specs = {actor_name(spec): spec for spec in roles}
    for name in sorted(actors):
        role, _, index = name.rpartition("-")
        if role in templates and name not in specs:
            specs[name] = replace(templates[role], index=int(index))
    return list(specs.values())


def _end_if_failed(following: asyncio.Task[None]) -> None:
    """Ends the actor's process if `following` failed. Ray then restarts the actor, which finds its roles."""
    if not following.cancelled() and (error := following.exception()) is not None:
        logging.getLogger(__name__).error("the supervisor failed", exc_info=error)
        os._exit(1)


@dataclass(frozen=True)
class Detached:
    """The description of a cluster that outlives the command that started it.

    Attributes:
        roles: the roles at the start.
        logs: the directory of logs on every machine; None is the run directory of each role.
        front_node: id of the Ray node on which the routers should run.
        drain_grace: seconds for a worker to drain.
    """

    roles: tuple[RoleSpec, ...]
    pools: PoolOptions
    ttft_target: float | None
    itl_target: float | None
    logs: Path | None
    front_node: str
    drain_grace: float


class ClusterActor:
    """The supervisor and the autoscaler of a detached cluster, as a Ray actor.

    If the actor is lost, Ray restarts it. It then finds the actors of its roles by name, including the roles
    that the autoscaler added.
    """

    def __init__(self, cluster: Detached) -> None:
        self._cluster = cluster
        self._peer = ray.get_runtime_context().gcs_address
        self._handles: list[RemoteRole] = []
        self._changes = 0
        self._changed = asyncio.Event()
        names = {
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == NAMESPACE
        }
        roles = _all_roles(cluster.roles, names)
        self._supervisor = Supervisor(roles, self._place, self._note, cluster.drain_grace)
        self._following = asyncio.create_task(self._supervisor.run())
        self._following.add_done_callback(_end_if_failed)
        first = cluster.roles[0]
        balancer = Balancer(cluster.pools, cluster.ttft_target, cluster.itl_target, first.workers)
        autoscaler = Autoscaler(self._supervisor, balancer, first.secret, first.tls)
        self._scaling = asyncio.create_task(autoscaler.run())
        self._scaling.add_done_callback(_end_if_failed)

    def _place(self, spec: RoleSpec) -> RemoteRole:
        options = placement.options(spec) | placement.strategy(
            spec, self._cluster.roles, self._cluster.front_node
        )
        options |= {
            "name": actor_name(spec),
            "namespace": NAMESPACE,
            "get_if_exists": True,  # an earlier supervisor may have started the actor
            "lifetime": "detached",  # the actor outlives its supervisor
        }
        actor = ray.remote(RoleActor).options(**options).remote(spec, self._cluster.logs, self._peer)
        handle = RemoteRole(actor)
        self._handles.append(handle)
        return handle

    async def cluster(self) -> Detached:
        return self._cluster

    async def changed(self, number: int) -> tuple[int, list[tuple[RoleSpec, RoleState]]]:
        """Waits for a change after `number`. Returns the last number and the states of all roles."""
        while self._changes == number:
            await self._changed.wait()
        return self._changes, self._supervisor.states()

    async def restart_workers(self) -> None:
        await self._supervisor.restart_workers()

    async def stop_routers(self) -> None:
        """Drains and stops the routers. The workers keep running for the routers of a later command."""
        await self._supervisor.stop_routers()

    async def stop(self, signum: int, grace: float) -> None:
        """Ends every role and its actor. The caller ends this actor."""
        self._scaling.cancel()
        await self._supervisor.stop(signum, grace)
        await self._following
        for role in self._handles:
            role.forget()
        placement.remove_pairs(self._cluster.roles)

    def _note(self, spec: RoleSpec, state: RoleState) -> None:
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()
