"""A Ray of our own on this machine: everything it leaves lies in one directory, and it ends with us."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from cluster.runner import PACKAGES


def environment(token: Path) -> dict[str, str]:
    """Ray's settings that exist only as environment variables; its processes inherit them from here."""
    return {
        # GCS and raylet listen on every interface: without the token nobody may talk to them. By default it
        # would be shared between all clusters of the user, in ~/.ray.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Ray gives its workers niceness 15; roles inherit it and would compute only when nobody else does.
        "RAY_worker_niceness": "0",
        # Ray kills workers when the machine's memory is nearly full. Pools have fixed sizes here, and what is
        # killed should be chosen by the kernel, not lose a healthy worker to somebody else's leak.
        "RAY_memory_monitor_refresh_ms": "0",
        # Nobody reads Ray's own metrics; exporting them keeps its agents busy.
        "RAY_enable_metrics_collection": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Actors find our packages also in a clone, and whatever else lies in the working directory.
        "PYTHONPATH": os.pathsep.join(filter(None, (PACKAGES, os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",
    }


def import_ray() -> ModuleType:
    """Ray, imported only by what needs it. Raises ValueError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "Ray is not installed: `pip install 'baton[ray]'`, "
            "or start the roles one by one with `baton prefill`, `baton decode` and `baton router`"
        ) from error
    return ray


class LocalRay:
    """Starts and stops Ray. All calls into it that block run in one thread, which lives as long as we do.

    That thread matters: Ray's processes die with the thread that spawned them (PDEATHSIG), so they die with
    this process even when it is killed; and Ctrl-C stays with the caller's loop, not somewhere inside Ray.
    """

    def __init__(self, directory: Path, cpus: int, gpus: int) -> None:
        self._directory = directory
        self._cpus = cpus
        self._gpus = gpus
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")

    async def start(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._start)

    async def stop(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._stop)

    def _start(self) -> None:
        token = self._directory / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.update(environment(token))
        ray = import_ray()
        ray.init(
            address="local",  # never a cluster that happens to run here, whatever RAY_ADDRESS says
            num_cpus=self._cpus,  # what our actors ask for in all, not what the machine has: all of them fit
            num_gpus=self._gpus,
            include_dashboard=False,  # `baton status` is ours, and a port less
            # Nothing goes through the object store: about the least that Ray accepts, and on disk, where it
            # costs nothing until used (Docker's /dev/shm has 64 MiB).
            object_store_memory=80 * 1024 * 1024,
            _plasma_directory=str(self._directory),
            _temp_dir=str(self._directory),
            log_to_driver=False,  # actors print nothing; roles write logs of their own
            logging_level=logging.ERROR,
            namespace="baton",
        )

    def _stop(self) -> None:
        import ray

        ray.shutdown()
