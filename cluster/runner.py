"""Keeps one role running on its machine, and tells a router there which workers there are.

A plain class: `local` and `actors` build on it, and tests run it directly.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cluster
from cluster.backoff import RestartPolicy
from cluster.health import until_silent
from cluster.held import tokens_held
from cluster.parameters import role_environment, to_argv
from cluster.plan import RoleSpec
from cluster.role_process import RoleProcess, RoleState
from cluster.rundir import RunDir

PACKAGES = str(Path(cluster.__file__).parents[1])


BATON = (
    sys.executable,
    "-m",
    "cluster.cli",
)  # the command that a user would type, by way of this interpreter


def own_address(peer: str) -> str:
    """The address of the interface that leads to `peer` ("host:port"). Sends nothing."""
    host, _, port = peer.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return probe.getsockname()[0]


def write_atomically(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


class RoleRunner:
    """Owns one role's process, its log, and for a router the files of workers and of the cluster's state.

    `directory` is private to the cluster, for sockets and the workers file; None makes one on this machine.
    `logs` is where logs go; None is `logs` in that directory. `peer` is an address ("host:port") that every
    machine of the cluster can reach: it decides on which interface a worker listens. None keeps the whole
    cluster on 127.0.0.1. `node` names this machine, for people.
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
        own: dict[str, object] = {"index": spec.index}
        if spec.role == "router":
            self._workers_file = directory / f"router-{spec.index}.workers"
            write_atomically(self._workers_file, "")
            self._cluster_file = directory / f"router-{spec.index}.cluster"
            own |= {"workers_file": self._workers_file, "cluster_file": self._cluster_file}
        else:
            own |= {"run_dir": directory, "host": own_address(peer) if peer else None}
        environment = role_environment(
            os.environ,
            # The same packages as here, whatever the working directory holds: a file rpc.py, for example.
            PYTHONPATH=PACKAGES,
            PYTHONSAFEPATH="1",
            # Ray limits OpenMP to one thread in its workers; the role decides for itself (--num-threads).
            OMP_NUM_THREADS=str(spec.cpus),
            **spec.environment,
        )
        self._process = RoleProcess(
            [*program, spec.role, *spec.args, *to_argv(**own)],
            environment,
            logs / f"{spec.role}-{spec.index}.log",
            policy or RestartPolicy(),
            self._until_silent,
            node or socket.gethostname(),
        )
        self._tls = spec.tls
        self._secret = spec.environment["BATON_CLUSTER_SECRET"].encode()

    async def _until_silent(self, ready: Mapping[str, Any]) -> str:
        return await until_silent(ready, self._secret, self._tls)

    async def start(self) -> RoleState:
        """Starts the role, unless it is started. A second supervisor finds it as the first one left it."""
        return self.launch()

    def launch(self, **environment: str) -> RoleState:
        """As `start`, with more variables for the role."""
        if not self._process.started:
            self._process.start(environment)
        return self._process.state

    async def changed(self, token: str) -> RoleState:
        """Waits until the role's state is another than the one with this token."""
        return await self._process.changed(token)

    async def set_workers(self, addresses: Sequence[str], report: str) -> None:
        """For a router: where the workers are, and what `baton status` shows beside."""
        write_atomically(self._workers_file, "".join(f"{address}\n" for address in addresses))
        write_atomically(self._cluster_file, report)

    async def tokens_held(self) -> int:
        """For a router: prompt tokens that wait there for their turn; none while it is not ready. Raises
        ConnectionError where it does not answer."""
        ready = self._process.state.ready
        return 0 if ready is None else await tokens_held(ready)

    async def restart(self, signum: int, grace: float) -> None:
        """Returns when the next one is ready."""
        await self._process.restart(signum, grace)

    async def stop(self, signum: int, grace: float) -> None:
        await self._process.stop(signum, grace)
        if self._run_dir is not None:
            self._run_dir.remove()

    def forget(self) -> None:
        """Nothing is left to end."""
