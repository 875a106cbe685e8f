"""`baton serve`: runs a cluster on this machine, from the first check until every process has ended.

Life: check options, ports and model → start the roles → ready → serve until a signal → stop the roles →
wait for all descendants → remove the run directory.
"""

import asyncio
import contextlib
import logging
import os
import signal
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import setproctitle

from baton.cluster import model
from baton.cluster.autoscaling.autoscaler import Autoscaler
from baton.cluster.autoscaling.balancer import Balancer
from baton.cluster.check_model import check_files
from baton.cluster.gpu_pools import GpuPools, Needs, Ranks, choose_pools, free_gpus
from baton.cluster.gpus import gpus_with_memory
from baton.cluster.roles import router_config, worker_config
from baton.cluster.supervision import announcement
from baton.cluster.supervision.blueprint import POOLS, Blueprint, RoleSpec, check_ports
from baton.cluster.supervision.display import Display
from baton.cluster.supervision.role_log import end_of
from baton.cluster.supervision.role_process import RoleState
from baton.cluster.supervision.rundir import Janitor, RunDir
from baton.cluster.supervision.runner import Gpus, LocalRole
from baton.cluster.supervision.supervisor import Supervisor
from baton.processes.children import adopt_orphans
from baton.processes.tree import StopSignals, end_descendants, reap_orphans
from baton.system.directories import make_directory

CANCEL_GRACE = 10.0  # seconds for a role to cancel its requests and end
ORPHAN_GRACE = 10.0  # seconds for the child processes of a killed role to end


def run(blueprint: Blueprint) -> int:
    """Runs the cluster until a signal stops it. Returns the exit code.

    With `--ray-address` it returns when the cluster is ready. Raises ValueError for a user's mistake, before
    it starts any process.
    """
    setproctitle.setproctitle(f"{blueprint.title}: serve")
    if blueprint.ray.ray_address is not None:
        import baton.cluster.on_ray  # noqa: F401  says that Ray is not installed, before anything else
    roles = blueprint.roles()
    if blueprint.ray.ray_address is None:
        check_ports(blueprint.front)
    resolved = model.resolve(blueprint.model.model, blueprint.engine.engine)
    model.reach_hub(resolved.location)
    model.check_context(resolved.location, blueprint.model.revision, blueprint.engine.max_model_len)
    chosen = _choose_pools(blueprint, resolved) if blueprint.chooses_pools else None
    if chosen is not None:
        blueprint = blueprint.with_pools(chosen)
        roles = blueprint.roles()
    if blueprint.ray.ray_address is None:
        _check_roles(blueprint, resolved, roles[0].secret)
    # Each check starts a process that imports torch. It does not depend on the KV dtype.
    prefill, decode = (replace(blueprint.engine_of(pool), kv_cache_dtype="auto") for pool in POOLS)
    for engine in [prefill] if prefill == decode else [prefill, decode]:
        check_files(resolved, engine, blueprint.model)
    if blueprint.ray.ray_address is not None:
        from baton.cluster.on_ray.joined import serve  # imports ray

        return serve(blueprint, roles, blueprint.ray.ray_address)
    gpus = blueprint.gpus(roles) if chosen is None else list(chosen.gpus)
    lines = None if chosen is None else chosen.text, blueprint.host_cache_text
    messages = [line for line in lines if line is not None]
    return asyncio.run(LocalCluster(blueprint, roles, gpus, messages).run())


def _choose_pools(blueprint: Blueprint, resolved: model.ResolvedModel) -> GpuPools | None:
    """The pools for all free GPUs. None: no driver tells how many there are."""
    from baton.cluster.tools.sizing.worker_needs import needs_of

    engine, pool = blueprint.engine, blueprint.pool
    if not (gpus := gpus_with_memory()):
        return None
    free = free_gpus(gpus, engine.gpu_memory_utilization)
    shared = engine.tensor_parallel_size if engine.tensor_parallel_size > 1 else None
    ranks = (pool.prefill_tensor_parallel_size or shared, pool.decode_tensor_parallel_size or shared)
    needs = Needs(Ranks(ranks[0] or 1, ranks[1] or 1))
    if memory := min((gpu.total_gib for gpu in free), default=0.0):
        needs = needs_of(resolved, engine, ranks, len(free), memory)
    return choose_pools(gpus, needs, engine.gpu_memory_utilization)


def _check_roles(blueprint: Blueprint, resolved: model.ResolvedModel, secret: bytes) -> None:
    """Raises ValueError for what a role would refuse when it has started."""
    from baton.router.api.jobs import sampling_defaults

    if blueprint.files.trace_dir is not None:
        make_directory("--advanced.trace-dir", blueprint.files.trace_dir)
    for pool in POOLS:
        worker_config(pool, blueprint.worker(pool), resolved, secret)
    if blueprint.pool.encode:
        worker_config("encode", blueprint.encoder(), resolved, secret)
    config = router_config(blueprint.router(), resolved, secret)
    if Path(resolved.location).exists():  # else it is on the hub
        sampling_defaults(config.generation_config, Path(resolved.location))


log = logging.getLogger(__name__)


class CannotStart(Exception):
    """A role failed before the cluster was ready. The message is for the user."""


class LocalCluster:
    """One run of a cluster. Owns the run directory and, through the supervisor, every role."""

    def __init__(
        self, blueprint: Blueprint, roles: list[RoleSpec], gpus: list[str], messages: Sequence[str] = ()
    ) -> None:
        """`messages`: lines for the user, before anything starts."""
        self._messages = messages
        self._blueprint = blueprint
        self._roles = roles
        self._gpus = gpus
        self._display = Display()
        self._signals = StopSignals()
        self._changed = asyncio.Event()
        self._failure: CannotStart | None = None
        self._up = False

    async def run(self) -> int:
        self._signals.install()
        for line in self._messages:
            self._display.line(line)
        adopt_orphans()
        reap_orphans()
        run_dir = RunDir.create(self._blueprint.files.run_dir)
        janitor = Janitor(run_dir.path, f"{self._blueprint.title}: janitor")
        keeping = asyncio.create_task(janitor.keep())
        self._logs = (self._blueprint.logs.log_dir or run_dir.path / "logs").absolute()
        try:
            make_directory("--log-dir", self._logs)
            async with contextlib.AsyncExitStack() as to_stop:
                await self._serve(run_dir, to_stop)
                self._display.line("Stopping …")
        except CannotStart as failure:
            self._display.error(str(failure))
            return 1
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
            await asyncio.to_thread(janitor.dismiss)
            killed = await asyncio.to_thread(end_descendants, ORPHAN_GRACE, self._signals.hurry_threads)
            if killed and not self._signals.hurry.is_set():
                self._display.line(f"Killed processes that did not end in time: {', '.join(killed)}")
            run_dir.remove()
        self._display.line("Stopped.")
        return 0

    async def _serve(self, run_dir: RunDir, to_stop: contextlib.AsyncExitStack) -> None:
        """Starts the roles and serves until a stop signal. `to_stop` receives the callbacks that end them."""
        with self._display:
            gpus = Gpus(self._gpus)
            grace = self._blueprint.drain.drain_timeout + CANCEL_GRACE
            supervisor = Supervisor(
                self._roles,
                lambda role: LocalRole(role, run_dir.path, self._logs, gpus),
                self._observe,
                grace,
            )
            following = asyncio.create_task(supervisor.run())
            to_stop.push_async_callback(self._stop_roles, supervisor, following)
            starting = asyncio.create_task(self._ready(supervisor))
            to_stop.callback(starting.cancel)
            await self._signals.unless_stopped(starting, following)
        if self._signals.stop.is_set():
            return
        if self._failure is not None:
            raise self._failure
        self._up = True
        admin = self._blueprint.admin_url(supervisor.states())
        self._announce(run_dir, admin)
        self._display.ready(self._blueprint, admin, self._logs)
        options, first = self._blueprint, self._roles[0]
        targets = options.front.ttft_target, options.engine.itl_target
        balancer = Balancer(options.pool, *targets, first.workers)
        scaling = asyncio.create_task(Autoscaler(supervisor, balancer, first.secret, first.tls).run())
        to_stop.callback(scaling.cancel)
        restarting = asyncio.create_task(self._restart_when_told(supervisor))
        to_stop.callback(restarting.cancel)
        await self._signals.unless_stopped(following, scaling, restarting)

    def _announce(self, run_dir: RunDir, admin_url: str) -> None:
        ports = {self._blueprint.front.port, urlsplit(admin_url).port or 0}
        secret = self._roles[0].secret.decode()
        try:
            announcement.Announcement(os.getpid(), tuple(sorted(ports)), secret).announce(run_dir.path)
        except OSError as error:
            self._display.line(
                f"`baton flip` and `baton restart` will not find this cluster: {error.strerror} "
                f"({run_dir.path / announcement.NAME})"
            )

    async def _restart_when_told(self, supervisor: Supervisor) -> None:
        while True:
            await self._signals.restart.wait()
            self._signals.restart.clear()
            self._display.line("Restarting the workers, one after the other …")
            try:
                await supervisor.restart_workers()
            except Exception as error:  # the workers serve on
                log.exception("the restart of the workers failed")
                self._display.line(f"The restart failed: {type(error).__name__}: {error}")
            else:
                self._display.line("All workers have restarted.")

    async def _ready(self, supervisor: Supervisor) -> None:
        while not all(state.phase == "ready" for _, state in supervisor.states()):
            await self._changed.wait()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
        # The router now connects to the workers. It sends no event when it is done, so /ready is polled.
        self._display.stage("cluster", "router connects to workers", 0.9)
        url = self._blueprint.admin_url(supervisor.states())
        while not await asyncio.to_thread(_answers, f"{url}/ready"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self._display.stage("cluster", "ready", 1.0)

    async def _stop_roles(self, supervisor: Supervisor, following: asyncio.Task[None]) -> None:
        """Ctrl-C cancels running requests. SIGTERM lets them finish. A second signal kills every role."""
        drain = self._signals.first == signal.SIGTERM and self._signals.stop.is_set()
        grace = self._blueprint.drain.drain_timeout + CANCEL_GRACE if drain else CANCEL_GRACE
        signum = signal.SIGTERM if drain else signal.SIGINT
        stopping = asyncio.create_task(supervisor.stop(signum, grace))
        hurry = asyncio.create_task(self._signals.hurry.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            await supervisor.stop(signal.SIGKILL, 0)
        await stopping
        await following

    def _observe(self, role: RoleSpec, state: RoleState) -> None:
        """Shows the state of a role. A role that ends before the cluster is ready fails the start."""
        self._changed.set()
        if self._signals.stop.is_set():
            if state.phase == "stopped" and state.error and not self._signals.hurry.is_set():
                self._display.line(f"{role.name}: {state.error} instead of stopping cleanly; see its log")
            return
        if not self._up:
            self._display.stage(role.name, state.stage, state.fraction)
            if state.phase == "waiting":
                log = self._logs / f"{role.role}-{role.index}.log"
                self._failure = CannotStart(f"{role.name}: {state.error}\n{end_of(log)}")
        elif state.phase == "waiting":
            loop = " It keeps crashing; see its log." if state.crash_loop else ""
            self._display.line(f"{role.name}: {state.error}; restarting.{loop}")
        elif state.phase == "ready":
            self._display.line(f"{role.name}: ready after {state.seconds_to_ready:.1f} s")
        elif state.phase == "stopped":
            self._display.line(f"{role.name}: drained and removed from its pool")


def _answers(url: str) -> bool:
    """Whether a GET of `url` succeeds now."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
