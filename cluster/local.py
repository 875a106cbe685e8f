"""The roles of a `baton serve` on one machine: children of its own process.

No other process stands between `baton serve` and a role, so none can take a role along when it dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from cluster.plan import RoleSpec
from cluster.role_process import RoleState
from cluster.runner import BATON, RoleRunner


class Gpus:
    """The GPUs of this machine. Each belongs to at most one role at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        self._free = list(names)
        self._taken: dict[str, list[str]] = {}  # by the role's name
        self._changed = asyncio.Condition()

    async def take(self, role: str, count: int) -> list[str]:
        """Waits until `count` GPUs are free, and returns their names for CUDA_VISIBLE_DEVICES."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._free) >= count)
            self._taken[role], self._free = self._free[:count], self._free[count:]
            return self._taken[role]

    async def give_back(self, role: str) -> None:
        """May be repeated."""
        async with self._changed:
            self._free += self._taken.pop(role, [])
            self._changed.notify_all()


class LocalRole(RoleRunner):
    """A `supervisor.RoleHandle`: the runner of one role, which first waits for the role's GPUs.

    Only a worker of a growing pool waits, and only for a worker that still drains: `Plan.gpus` refuses pools
    that could need more GPUs than the machine has.
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
        # A role that was stopped while it waited starts no process, whatever its variables are.
        own = [] if self._taking.cancelled() else self._taking.result()
        return self.launch(CUDA_VISIBLE_DEVICES=",".join(own))

    async def stop(self, signum: int, grace: float) -> None:
        self._taking.cancel()
        await super().stop(signum, grace)
        await self._gpus.give_back(self._name)
