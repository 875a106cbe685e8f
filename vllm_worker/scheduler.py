"""Lets the connector of a worker bound each step before vLLM schedules it.

vLLM's scheduler reads the most tokens of a step, and the most of each prompt, before it calls a connector.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

_schedule = Scheduler.schedule


def bound_steps() -> None:
    """All schedulers of this process ask their connectors, which have `bound_step`. May be repeated."""
    Scheduler.schedule = _bounded


def _bounded(self: Scheduler, *args: Any, **options: Any) -> SchedulerOutput:
    connector: Any = self.connector
    connector.bound_step(self)
    return _schedule(self, *args, **options)
