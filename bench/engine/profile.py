"""Where the device's time goes, by kernel."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from baton.bench.contract import Report, Row
from baton.bench.engine.drive import drain, fill, run_steps

STEPS = 64
"""Decode steps of a profile."""
MOST_KERNELS = 14
"""Kernels of a profile that get a row."""


class Profile(NamedTuple):
    microseconds: float
    """From the start of the first kernel to the end of the last."""
    idle: float
    """Microseconds in which no kernel ran."""
    kernels: dict[str, float]
    """Microseconds of each kernel, by name. Kernels may overlap."""


def profiled(work: Callable[[], None]) -> Profile:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    events = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    busy, until = 0.0, spans[0][0]
    of_kernel: Counter[str] = Counter()
    for start, end, name in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        of_kernel[name] += end - start
    whole = until - spans[0][0]
    return Profile(whole, whole - busy, dict(of_kernel.most_common()))


def profiled_decodes(engine: Any, batch: int, context: int) -> Profile:
    """Profiles `STEPS` steps in which `batch` requests decode."""
    fill(engine, batch, context, 200)
    for _ in range(16):
        engine.step()

    found = profiled(lambda: run_steps(engine, STEPS))
    drain(engine)
    return found


def add_profile(report: Report, name: str, found: Profile, steps: int) -> None:
    """Adds rows of the time of a step by kernel, the longest first."""
    report.add(Row(f"{name}.idle", found.idle / steps, "µs"))
    for kernel, took in itertools.islice(found.kernels.items(), MOST_KERNELS):
        report.add(Row(f"{name}.kernel.{kernel[:48]}", took / steps, "µs", ratio=took / found.microseconds,
                       ratio_to="all"))  # fmt: skip
