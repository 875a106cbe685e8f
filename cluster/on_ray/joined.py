"""`baton serve --ray-address`, `baton stop` and `baton restart`: a cluster on an existing Ray cluster.

The cluster outlives the command that started it. A detached actor supervises it (`actors.ClusterActor`).
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from dataclasses import replace
from typing import Any

import grpc
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from baton.cluster.on_ray.actors import NAMESPACE, SUPERVISOR, ClusterActor, Detached, actor_name
from baton.cluster.supervision.blueprint import Blueprint, RoleSpec, check_ports
from baton.cluster.supervision.display import Display
from baton.cluster.supervision.role_process import RoleState
from baton.processes.tree import StopSignals

STOP_GRACE = 10.0  # seconds for a role to cancel its requests and end
REACHED_WITHIN = 5.0  # seconds for the address of Ray to accept a connection
ANSWERS_WITHIN = 30.0  # seconds for a supervisor to answer; Ray may be restarting it
_POLL = 0.1


class OtherCluster(ValueError):
    """A cluster with other settings runs on this Ray. Its exit code is its own, since a script may then stop
    that cluster."""

    exit_code = 3


def connect(address: str) -> None:
    """Joins the Ray cluster as a driver. Raises ValueError if that fails."""
    if re.fullmatch(r"[^/]+:\d+", address) and os.environ.get("RAY_USE_TLS", "0") == "0":
        # Ray itself would try for minutes.
        with grpc.insecure_channel(address, (("grpc.enable_http_proxy", 0),)) as channel:
            try:
                grpc.channel_ready_future(channel).result(REACHED_WITHIN)
            except grpc.FutureTimeoutError as error:
                raise ValueError(
                    f"--ray-address {address}: no Ray cluster answers there; start one with "
                    "`ray start --head`, or correct the address"
                ) from error
    try:
        with contextlib.chdir("/"):  # actors may import modules from the directory in which this runs
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,  # roles write their own log files
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"--ray-address {address}: cannot join the Ray cluster: {error}") from error


def running() -> Any | None:
    """The supervisor actor of the cluster on this Ray; None if no cluster runs."""
    try:
        return ray.get_actor(SUPERVISOR, NAMESPACE)
    except ValueError:
        return None


def serve(blueprint: Blueprint, roles: list[RoleSpec], address: str) -> int:
    """Starts the cluster on Ray, waits until it is ready, and leaves it running. Returns the exit code.

    If a cluster with the same options runs there, replaces its supervisor and keeps its roles. Its routers
    move to this machine if their own machine was lost. Raises OtherCluster if another cluster runs there.
    """
    connect(address)
    cluster = Detached(
        tuple(roles),
        blueprint.pool,
        blueprint.front.ttft_target,
        blueprint.engine.itl_target,
        blueprint.logs.log_dir.absolute() if blueprint.logs.log_dir else None,
        front_node=ray.get_runtime_context().get_node_id(),
        drain_grace=blueprint.drain.drain_timeout + STOP_GRACE,
    )
    supervisor = running()
    if supervisor is None:
        check_ports(blueprint.front)
    else:
        existing = _ask(supervisor)
        _check(existing, cluster, address)
        # If the machine of the routers was lost, Ray has restarted them elsewhere: replace them here.
        moved = [] if existing.front_node == cluster.front_node else cluster.roles
        _end_actors([SUPERVISOR, *(actor_name(spec) for spec in moved if spec.role == "router")])
    return asyncio.run(_start(blueprint, cluster, joins=supervisor is not None))


def _check(running: Detached, new: Detached, address: str) -> None:
    """Raises OtherCluster unless the running cluster equals the new one, and ValueError unless its routers
    may run here."""
    end_it = f"end it with `baton stop --ray-address {address}`"
    if running != replace(new, front_node=running.front_node):
        raise OtherCluster(
            f"--ray-address {address}: a cluster with other flags or another secret is running there "
            f"already; {end_it}"
        )
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if running.front_node in alive - {new.front_node}:
        raise ValueError(
            f"--ray-address {address}: a cluster with its routers on another machine is running there "
            f"already; {end_it}"
        )


def stop(address: str, *, routers_only: bool) -> int:
    """Ends the cluster on Ray, or only its routers. Ray itself keeps running. Returns the exit code."""
    supervisor = _joined(address)
    if routers_only:
        ray.get(supervisor.stop_routers.remote())
    else:
        asyncio.run(_end(supervisor, signal.SIGTERM))
    return 0


def restart(address: str) -> int:
    """Restarts the workers of the cluster on Ray, one after the other. Returns the exit code."""
    ray.get(_joined(address).restart_workers.remote())
    return 0


def _joined(address: str) -> Any:
    """The supervisor of the cluster that runs on this Ray. Raises ValueError if there is none."""
    connect(address)
    supervisor = running()
    if supervisor is None:
        raise ValueError(f"--ray-address {address}: no cluster is running there")
    return supervisor


def _ask(supervisor: Any) -> Detached:
    """The description of the cluster that a supervisor follows. Waits while Ray restarts the supervisor.

    Raises ValueError if it does not answer.
    """
    deadline = time.monotonic() + ANSWERS_WITHIN
    while True:
        try:
            return ray.get(supervisor.cluster.remote(), timeout=ANSWERS_WITHIN)
        except (RayActorError, GetTimeoutError) as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    "--ray-address: the supervisor of the running cluster does not answer; look at the state "
                    "of Ray with `ray status`"
                ) from error
            time.sleep(_POLL)


def _end_actors(names: list[str]) -> None:
    """Kills the named actors for good, and waits until their names are free. Ignores missing actors."""
    for name in names:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, NAMESPACE))
    while not set(names).isdisjoint(ray.util.list_named_actors()):
        time.sleep(_POLL)


async def _end(supervisor: Any, signum: int) -> None:
    await supervisor.stop.remote(signum, STOP_GRACE)
    ray.kill(supervisor)


async def _start(blueprint: Blueprint, cluster: Detached, *, joins: bool) -> int:
    """Starts a detached cluster and shows its progress. Returns the exit code.

    `joins`: the roles of the cluster run already, and its old supervisor was ended. The new supervisor finds
    the roles. If the start fails, this command does not end the cluster.
    """
    signals, display = StopSignals(), Display()
    signals.install()  # after ray.init, which installs handlers of its own
    options = {
        "name": SUPERVISOR,
        "namespace": NAMESPACE,
        "lifetime": "detached",  # it outlives this command
        "max_restarts": -1,  # a restarted supervisor finds the running roles
        "num_cpus": 0,  # it mostly waits, so it must not reserve a core that a worker could use
    }
    supervisor = ray.remote(ClusterActor).options(**options).remote(cluster)
    with display:
        following = asyncio.create_task(_follow(supervisor, display, joins=joins))
        await signals.unless_stopped(following)
        failure, states = following.result() if following.done() else (None, [])
        following.cancel()
    if failure is None and not signals.stop.is_set():
        logs = cluster.logs or "on each node, in its run directory"
        stop = f"baton stop --ray-address {blueprint.ray.ray_address}"
        display.ready(blueprint, blueprint.admin_url(states), logs, stop)
        return 0
    if failure is not None:
        display.error(failure)
    if not joins:
        await _end(supervisor, signal.SIGINT)
    return 0 if failure is None else 1


async def _follow(
    supervisor: Any, display: Display, *, joins: bool
) -> tuple[str | None, list[tuple[RoleSpec, RoleState]]]:
    """Returns when every role is ready, or a role fails: the reason, if there is one, and all states."""
    number = 0
    while True:
        try:
            number, states = await supervisor.changed.remote(number)
        except ActorDiedError as error:  # its constructor failed, for example without the secret there
            return f"the supervisor: {str(error).strip().splitlines()[-1]}", []
        for role, state in states:
            display.stage(role.name, state.stage, state.fraction)
            # A worker of a running cluster has served before, so its restart will succeed.
            if state.phase == "waiting" and not (joins and role.role != "router"):
                return f"{role.name}: {state.error}", states
        if all(state.phase == "ready" for _, state in states):
            return None, states
