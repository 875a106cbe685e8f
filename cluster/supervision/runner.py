"""Keeps one role running on its machine, and gives a router its list of workers.

On one machine (`LocalRole`) roles are children of the `baton serve` process: a role can die only by itself or
with `baton serve`. On Ray each runner is an actor (`on_ray.actors`).
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from baton.cluster.options.parameters import role_environment, to_argv
from baton.cluster.options.roles import FileOptions, MembershipOptions, RoleOptions, WorkerOptions
from baton.cluster.supervision.blueprint import RoleSpec
from baton.cluster.supervision.calls import tokens_held, until_silent
from baton.cluster.supervision.role_process import RoleProcess, RoleState
from baton.cluster.supervision.rundir import RunDir
from baton.processes.liveness import waited_for_cpu
from baton.processes.restarts import RestartPolicy
from baton.rpc.auth import SECRET_VARIABLE
from baton.system.addresses import family, numeric_address, split_address
from baton.system.python_path import python_path

BATON = (sys.executable, "-m", "baton.cluster.cli")
"""The command `baton`, with the interpreter of this process."""

RETRY_SECONDS = 1.0  # between attempts to write a router's files
REPORT_SECONDS = 0.1  # reports of roles that come within this time are written once

log = logging.getLogger(__name__)


def own_address(peer: str) -> str:
    """The address of the local interface that leads to `peer` ("host:port"). Sends no packet."""
    host, port = split_address(peer)
    address = numeric_address(host)
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return probe.getsockname()[0]


def write_atomically(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


class RoleRunner(RoleProcess):
    """The process of one role in its directories. For a router it writes the files of workers and report.

    Args:
        directory: the run directory of the cluster; None makes one on this machine.
        logs: the directory of logs; None is `logs` in the run directory.
        peer: an address ("host:port") that every machine of the cluster can reach. A worker listens on the
            interface that leads to it. None keeps the whole cluster on 127.0.0.1.
        node: the name of this machine, for people.
    """

    def __init__(
        self,
        spec: RoleSpec,
        directory: Path | None = None,
        logs: Path | None = None,
        peer: str | None = None,
        node: str = "",
        policy: RestartPolicy | None = None,
        program: Sequence[str] = BATON,
    ) -> None:
        self._run_dir: RunDir | None = None
        if directory is None:
            self._run_dir = RunDir.create(None)
            directory = self._run_dir.path
        logs = logs or directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        options: list[object] = [RoleOptions(index=spec.index)]
        if spec.role == "router":
            self._workers_file = directory / f"router-{spec.index}.workers"
            with contextlib.suppress(OSError):  # on a full disk the router waits for its first list
                write_atomically(self._workers_file, "")
            self._cluster_file = directory / f"router-{spec.index}.cluster"
            admin_socket = directory / f"router-{spec.index}.admin"
            options.append(
                MembershipOptions(
                    workers_file=self._workers_file,
                    cluster_file=self._cluster_file,
                    admin_socket=admin_socket,
                )
            )
        elif spec.role != "store":
            options.append(FileOptions(run_dir=directory))
            if peer:
                options.append(WorkerOptions(host=own_address(peer)))
        environment = role_environment(
            os.environ,
            **python_path(),
            # Ray sets this to 1 in its actors. The role needs the threads that its `RoleSpec` gives it.
            OMP_NUM_THREADS=str(spec.cpus),
        )
        self._spec = spec
        super().__init__(
            [*program, spec.role, *spec.args, *to_argv(*options)],
            environment,
            logs / f"{spec.role}-{spec.index}.log",
            policy or RestartPolicy(),
            lambda ready: until_silent(
                ready,
                spec.secret,
                spec.tls,
                patience=spec.patience,
                waited=partial(waited_for_cpu, ready.get("pid", 0)),  # a store names no process
            ),
            node or socket.gethostname(),
        )
        self._unwritten: dict[Path, str] = {}  # a router's files with news that they do not have yet
        self._failed: set[Path] = set()  # of these, what could not be written
        self._addresses: dict[str, str] = {}  # of workers by name, for a router
        self._workers: str | None = None  # the list that the router has or will have
        self._writing: asyncio.Task[None] | None = None

    def _secrets(self) -> Mapping[str, str]:
        return {SECRET_VARIABLE: self._spec.secret.decode(), **self._spec.environment}

    async def start(self) -> RoleState:
        """Starts the role unless it runs already, as after the loss of an earlier supervisor."""
        return self.launch()

    async def set_workers(self, addresses: Mapping[str, str | None], report: str) -> None:
        """Routers only: sets the gRPC addresses of all ready workers, by their names, and the JSON report.

        None: the worker keeps the address that it has here, because its supervisor does not know it yet.
        The report may be written a moment later. On a full disk the router keeps what it has until there is
        room.
        """
        self._unwritten[self._cluster_file] = report
        addresses_now = {name: address or self._addresses.get(name) for name, address in addresses.items()}
        self._addresses = {name: address for name, address in addresses_now.items() if address is not None}
        workers = "".join(f"{address}\n" for address in self._addresses.values())
        if workers != self._workers:
            self._workers = self._unwritten[self._workers_file] = workers
            self._write(self._workers_file)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        await asyncio.sleep(REPORT_SECONDS)
        while self._unwritten:
            for path in list(self._unwritten):
                self._write(path)
            await asyncio.sleep(RETRY_SECONDS if self._unwritten else 0)
        self._writing = None

    def _write(self, path: Path) -> None:
        try:
            write_atomically(path, self._unwritten[path])
            del self._unwritten[path]
            self._failed.discard(path)
        except OSError as error:
            if path not in self._failed:
                self._failed.add(path)
                log.warning("%s: %s; the router keeps the one before", path, error.strerror)

    async def tokens_held(self) -> int:
        """Routers only: prompt tokens that the router holds back; 0 while the router is not ready.

        Raises ConnectionError if it does not answer.
        """
        ready = self.state.ready
        return 0 if ready is None else await tokens_held(ready)

    async def stop(self, signum: int, grace: float) -> None:
        await super().stop(signum, grace)
        if self._writing is not None:
            self._writing.cancel()
        if self._run_dir is not None:
            self._run_dir.remove()

    def forget(self) -> None:
        """Does nothing: after `stop`, a runner owns nothing that must end."""


class Gpus:
    """The GPUs of this machine. Each belongs to at most one role at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        self._free = list(names)
        self._taken: dict[str, list[str]] = {}  # role name -> GPUs
        self._changed = asyncio.Condition()

    async def take(self, role: str, count: int) -> list[str]:
        """Waits until `count` GPUs are free, and returns their names for CUDA_VISIBLE_DEVICES."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._free) >= count)
            self._taken[role], self._free = self._free[:count], self._free[count:]
            return self._taken[role]

    async def give_back(self, role: str) -> None:
        """Returns the GPUs of a role. May be repeated."""
        async with self._changed:
            self._free += self._taken.pop(role, [])
            self._changed.notify_all()


class LocalRole(RoleRunner):
    """A `supervisor.RoleHandle`: the runner of one role. It waits for the role's GPUs before it starts.

    Only a worker of a growing pool waits, until a draining worker returns its GPUs. `Blueprint.gpus` refuses
    pools that could need more GPUs than the machine has.
    """

    def __init__(
        self, spec: RoleSpec, directory: Path, logs: Path, gpus: Gpus, program: Sequence[str] = BATON
    ) -> None:
        super().__init__(spec, directory, logs, program=program)
        self._name = spec.name
        self._gpus = gpus
        self._taking = asyncio.create_task(gpus.take(spec.name, spec.gpus))

    async def start(self) -> RoleState:
        await asyncio.wait({self._taking})
        # `stop` cancels the wait. The role then starts no process, so it needs no GPUs.
        gpus = [] if self._taking.cancelled() else self._taking.result()
        return self.launch(CUDA_VISIBLE_DEVICES=",".join(gpus))

    async def stop(self, signum: int, grace: float) -> None:
        self._taking.cancel()
        await super().stop(signum, grace)
        await self._gpus.give_back(self._name)
