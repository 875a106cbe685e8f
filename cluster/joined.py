"""`baton serve --ray-address` and `baton stop`: a cluster on somebody else's Ray, which outlives the
command."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from cluster.display import Display
from cluster.local_ray import import_ray
from cluster.plan import Plan, RoleSpec
from cluster.role_process import RoleState
from cluster.signals import StopSignals

STOP_GRACE = 10.0  # seconds for a role to cancel its requests and end


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
    """Starts the cluster there, follows it until it is ready, and leaves it running."""
    connect(address)
    if running() is not None:
        raise ValueError(
            f"--ray-address {address}: a cluster is running there already; "
            f"end it with `baton stop --ray-address {address}`"
        )
    return asyncio.run(Start(plan, roles).run())


def stop(address: str) -> int:
    """Ends the cluster there. Ray itself goes on."""
    connect(address)
    supervisor = running()
    if supervisor is None:
        raise ValueError(f"--ray-address {address}: no cluster is running there")
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


async def _end(supervisor: Any, signum: int) -> None:
    import ray

    await supervisor.stop.remote(signum, STOP_GRACE)
    ray.kill(supervisor)


class Start:
    """The start of a detached cluster, as seen by the command that asked for it."""

    def __init__(self, plan: Plan, roles: list[RoleSpec]) -> None:
        self._plan = plan
        self._roles = roles
        self._display = Display()
        self._states: list[tuple[RoleSpec, RoleState]] = []

    async def run(self) -> int:
        import ray

        from cluster.actors import NAMESPACE, SUPERVISOR, ClusterActor, Detached

        signals = StopSignals()
        signals.install()  # after ray.init, which puts handlers of its own there
        log_dir = self._plan.logs.log_dir.absolute() if self._plan.logs.log_dir else None
        cluster = Detached(
            tuple(self._roles),
            self._plan.pool,
            log_dir,
            front_node=ray.get_runtime_context().get_node_id(),
            drain_grace=self._plan.drain.drain_timeout + STOP_GRACE,
        )
        options = {
            "name": SUPERVISOR,  # by which `baton stop` finds it
            "namespace": NAMESPACE,
            "lifetime": "detached",  # it outlives this command
            "max_restarts": -1,  # a new one finds the roles that the last one left
            "num_cpus": 0,  # it waits for news, and takes no place from a worker
        }
        supervisor = ray.remote(ClusterActor).options(**options).remote(cluster)
        with self._display:
            failure = await _unless(signals.stop, self._follow(supervisor))
        if failure is None and not signals.stop.is_set():
            logs = log_dir or Path("on each node, in its run directory")
            self._display.ready(self._plan, self._plan.admin_url(self._states), logs)
            if self._plan.start.timings:
                self._display.timings()
            return 0
        if failure is not None:
            self._display.error(failure)
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
                if state.phase == "waiting":
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
