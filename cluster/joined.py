"""`baton serve --ray-address` and `baton stop`: a cluster on somebody else's Ray, which outlives the
command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cluster.display import Display
from cluster.plan import Plan, RoleSpec
from cluster.ports import check_ports
from cluster.role_process import RoleState
from cluster.signals import StopSignals

if TYPE_CHECKING:
    from cluster.actors import Detached

STOP_GRACE = 10.0  # seconds for a role to cancel its requests and end
ANSWERS_WITHIN = 30.0  # seconds for a supervisor that Ray may just be starting again
_POLL = 0.1


def import_ray() -> ModuleType:
    """Ray, imported only by what needs it. Raises ValueError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "--ray-address: Ray is not installed; in Baton's source directory `pip install -e '.[ray]'` "
            "installs it"
        ) from error
    return ray


def connect(address: str) -> None:
    """Joins the Ray cluster as a driver. Raises ValueError when there is none."""
    ray = import_ray()
    from cluster.actors import NAMESPACE

    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,  # actors are found by their names in it
            log_to_driver=False,  # actors print nothing; roles write logs of their own
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(f"--ray-address {address}: cannot join the Ray cluster: {error}") from error


def running() -> Any | None:
    """The cluster's supervisor, if there is a cluster."""
    import ray

    from cluster.actors import NAMESPACE, SUPERVISOR

    try:
        return ray.get_actor(SUPERVISOR, NAMESPACE)
    except ValueError:
        return None


def serve(plan: Plan, roles: list[RoleSpec], address: str) -> int:
    """Starts the cluster there, or goes on with the same one that runs there already; follows it until it is
    ready, and leaves it running."""
    connect(address)
    import ray

    from cluster.actors import SUPERVISOR, Detached, actor_name

    cluster = Detached(
        tuple(roles),
        plan.pool,
        plan.logs.log_dir.absolute() if plan.logs.log_dir else None,
        front_node=ray.get_runtime_context().get_node_id(),
        drain_grace=plan.drain.drain_timeout + STOP_GRACE,
    )
    supervisor = running()
    if supervisor is None:
        check_ports(plan.front)
    else:
        found = _ask(supervisor)
        _check(found, cluster, address)
        # Where the machine of its routers was lost, Ray has found them another one.
        moved = [] if found.front_node == cluster.front_node else cluster.roles
        _end_actors([SUPERVISOR, *(actor_name(spec) for spec in moved if spec.role == "router")])
    return asyncio.run(Start(plan, cluster, found=supervisor is not None).run())


def _check(found: Detached, wanted: Detached, address: str) -> None:
    """Raises ValueError unless the cluster that runs there is the one that is wanted, and may be had here."""
    import ray

    end_it = f"end it with `baton stop --ray-address {address}`"
    if found != replace(wanted, front_node=found.front_node):
        raise ValueError(
            f"--ray-address {address}: a cluster is running there already, with other flags or another "
            f"secret (without one that is given, each has its own); {end_it}"
        )
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if found.front_node in alive - {wanted.front_node}:
        raise ValueError(
            f"--ray-address {address}: a cluster is running there already, whose routers are on another "
            f"machine; {end_it}"
        )


def stop(address: str, *, routers_only: bool) -> int:
    """Ends the cluster there, or its routers. Ray itself goes on."""
    connect(address)
    supervisor = running()
    if supervisor is None:
        raise ValueError(f"--ray-address {address}: no cluster is running there")
    if routers_only:
        import ray

        ray.get(supervisor.stop_routers.remote())
    else:
        asyncio.run(_end(supervisor, signal.SIGTERM))
    return 0


def restart(address: str) -> int:
    """Restarts the workers of the cluster there, one after the other; returns when all are new."""
    connect(address)
    supervisor = running()
    if supervisor is None:
        raise ValueError(f"--ray-address {address}: no cluster is running there")
    import ray

    ray.get(supervisor.restart_workers.remote())
    return 0


def _ask(supervisor: Any) -> Detached:
    """What a supervisor was started with. Waits for one that Ray is starting again."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    deadline = time.monotonic() + ANSWERS_WITHIN
    while True:
        try:
            return ray.get(supervisor.cluster.remote(), timeout=ANSWERS_WITHIN)
        except (RayActorError, GetTimeoutError) as error:
            if time.monotonic() > deadline:
                raise ValueError("the supervisor of the cluster that runs there does not answer") from error
            time.sleep(_POLL)


def _end_actors(names: list[str]) -> None:
    """For good; returns when others may have their names. Those that are gone are left out."""
    import ray

    from cluster.actors import NAMESPACE

    for name in names:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, NAMESPACE))
    while not set(names).isdisjoint(ray.util.list_named_actors()):
        time.sleep(_POLL)


async def _end(supervisor: Any, signum: int) -> None:
    import ray

    await supervisor.stop.remote(signum, STOP_GRACE)
    ray.kill(supervisor)


class Start:
    """The start of a detached cluster, as seen by the command that asked for it.

    `found`: it runs already, without a supervisor. The new one finds its roles; it is not this command's to
    end.
    """

    def __init__(self, plan: Plan, cluster: Detached, *, found: bool) -> None:
        self._plan = plan
        self._cluster = cluster
        self._found = found
        self._display = Display()
        self._states: list[tuple[RoleSpec, RoleState]] = []

    async def run(self) -> int:
        import ray

        from cluster.actors import NAMESPACE, SUPERVISOR, ClusterActor

        signals = StopSignals()
        signals.install()  # after ray.init, which puts handlers of its own there
        options = {
            "name": SUPERVISOR,  # by which `baton stop` finds it
            "namespace": NAMESPACE,
            "lifetime": "detached",  # it outlives this command
            "max_restarts": -1,  # a new one finds the roles that the last one left
            "num_cpus": 0,  # it waits for news, and takes no place from a worker
        }
        supervisor = ray.remote(ClusterActor).options(**options).remote(self._cluster)
        with self._display:
            failure = await _unless(signals.stop, self._follow(supervisor))
        if failure is None and not signals.stop.is_set():
            logs = self._cluster.logs or Path("on each node, in its run directory")
            self._display.ready(self._plan, self._plan.admin_url(self._states), logs)
            if self._plan.start.timings:
                self._display.timings()
            return 0
        if failure is not None:
            self._display.error(failure)
        if not self._found:
            await _end(supervisor, signal.SIGINT)
        return 0 if failure is None else 1

    async def _follow(self, supervisor: Any) -> str | None:
        """Until every role is ready: None; or one failed: why."""
        seen = 0
        while True:
            seen, states = await supervisor.changed.remote(seen)
            self._states = states
            for role, state in states:
                self._display.stage(role.name, state.stage, state.fraction)
                # A worker of a cluster that runs has served before, and will again.
                if state.phase == "waiting" and not (self._found and role.role != "router"):
                    return f"{role.name}: {state.error}"
            if all(state.phase == "ready" for _, state in states):
                return None


async def _unless(stop: asyncio.Event, what: Coroutine[Any, Any, str | None]) -> str | None:
    """The result of `what`, or None when `stop` comes first."""
    task, stopped = asyncio.create_task(what), asyncio.create_task(stop.wait())
    done, pending = await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    for unfinished in pending:
        unfinished.cancel()
    return task.result() if task in done else None
