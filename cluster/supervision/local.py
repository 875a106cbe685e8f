"""The roles of `baton serve` on one machine.

Each role is a child of the `baton serve` process itself. With no process between them, a role can die only by
itself or with `baton serve`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from baton.cluster.supervision.plan import RoleSpec
from baton.cluster.supervision.role_process import RoleState
from baton.cluster.supervision.runner import BATON, RoleRunner


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

    Only a worker of a growing pool waits, until a draining worker returns its GPUs. `Plan.gpus` refuses pools
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
        # `stop` cancels the wait. The role then starts no process, so it needs no GPUs.
        gpus = [] if self._taking.cancelled() else self._taking.result()
        return self.launch(CUDA_VISIBLE_DEVICES=",".join(gpus))

    async def stop(self, signum: int, grace: float) -> None:
        self._taking.cancel()
        await super().stop(signum, grace)
        await self._gpus.give_back(self._name)
