"""vLLM's coordinator of a group (`--data-parallel-size`) ends with the engine process that has started it.

That of rank 0 starts it as a process. By itself it would outlive a killed one."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc

from baton.processes.children import die_with_parent

_run_coordinator = DPCoordinatorProc.run_coordinator


def tie_coordinators() -> None:
    """Those that this process starts from now on. Its thread that starts them must live on."""
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)


def run_coordinator(*args: Any, **fields: Any) -> None:
    die_with_parent(os.getppid())
    _run_coordinator(*args, **fields)
