"""The report of a load test or a bench: its rows, the table that users see, and the
JSON object that `docs/lab/runs` keeps."""

import functools
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from baton.cluster.gpus import nvidia_smi
from baton.steps.quantiles import percentile
from baton.system import usable_cpus

_PACKAGES = ("baton-llm", "torch", "triton", "numpy", "pyzmq", "grpcio", "xxhash", "transformers")


@dataclass(slots=True)
class Row:
    """One result.

    Attributes:
        name: stable and dotted.
        goal: bound of `ratio`, or of `value` if there is no ratio.
        other: the value of what `ratio_to` names.
        better: which side of the goal is good; None without a goal.
        low, high: 95 % confidence interval of `value`, if known.
    """

    name: str
    value: float
    unit: str
    p99: float | None = None
    ratio: float | None = None
    ratio_to: str | None = None
    other: float | None = None
    spread: float | None = None
    goal: float | None = None
    better: Literal["higher", "lower"] | None = "lower"
    meets_goal: bool | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.goal is None:
            self.better = None
        else:
            measured = self.value if self.ratio is None else self.ratio
            self.meets_goal = measured >= self.goal if self.better == "higher" else measured <= self.goal

    def as_dict(self) -> dict[str, Any]:
        """The fields that are not None. `asdict` would take most of the time of `Report.add`, which writes
        all rows."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in values if value is not None}


@dataclass(slots=True)
class Report:
    """The rows of one run, with what a reader needs to judge and repeat them. What is not known is None.

    Attributes:
        card: the GPU that was measured.
        command: how to repeat the run.
        note: circumstances, and what the rows cannot say.
        detail: further results. They become one more key of the JSON object.
    """

    bench: str
    parameters: dict[str, Any]
    json_path: Path | None = None
    card: str | None = None
    command: str | None = None
    note: str | None = None
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    rows: list[Row] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Also writes the file, so that a bench that is stopped keeps its results."""
        self.rows.append(row)
        self.write()

    def add_median(
        self, name: str, values: Sequence[float], unit: str, *, scale: float = 1.0, **more: Any
    ) -> None:
        """Adds the median of some values, with their p99. `scale`, `more`: as for `add_ratio`."""
        median, p99 = statistics.median(values), percentile(values, 0.99)
        self.add(Row(name, scale * median, unit, p99=scale * p99, **more))

    def add_ratio(
        self, name: str, values: Sequence[float], unit: str, base: Sequence[float], to: str, *,
        scale: float = 1.0, inverse: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        """Adds the median of `values`, and the ratio to `base`, pair by pair.

        Args:
            scale: of the value, such as 1e3 for seconds in ms.
            inverse: the ratio is that of speeds, from times.
            more: fields of the row.
        """
        ratio, spread = paired_ratio(base, values) if inverse else paired_ratio(values, base)
        value, other = (scale * statistics.median(series) for series in (values, base))
        self.add(Row(name, value, unit, ratio=ratio, ratio_to=to, other=other, spread=spread, **more))

    def as_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "bench": self.bench,
            "machine": machine(),
            "versions": versions(),
            "parameters": self.parameters,
            "started": self.started,
            "card": self.card,
            "commit": commit(),
            "command": self.command,
            "note": self.note,
            "results": [row.as_dict() for row in self.rows],
        }
        return fields | {"detail": self.detail} if self.detail else fields

    def write(self, indent: int | None = None) -> None:
        """Writes the JSON file, if there is a path. Indented for readers it takes twenty times as long."""
        if self.json_path is not None:
            self.json_path.write_text(json.dumps(self.as_dict(), indent=indent, default=str) + "\n")

    def finish(self) -> int:
        """Prints the table and writes the file. Returns the exit code."""
        table = Table(title=f"baton.bench.{self.bench}  {self.parameters}", title_justify="left")
        for column in ("name", "value", "95 %", "p99", "ratio", "to", "spread", "goal"):
            table.add_column(column, justify="left" if column in ("name", "to") else "right")
        for row in self.rows:
            goal = ""
            if row.goal is not None:
                sign = "≥" if row.better == "higher" else "≤"
                goal = f"{sign} {row.goal:g} {'met' if row.meets_goal else 'MISSED'}"
            table.add_row(
                row.name,
                f"{row.value:.4g} {row.unit}",
                "" if row.low is None else f"{row.low:.4g} – {_number(row.high)}",
                _number(row.p99),
                _number(row.ratio),
                row.ratio_to or "",
                _number(row.spread),
                goal,
            )
        # A pipe has no width. Wide enough not to wrap row names, which users grep for.
        Console(width=None if sys.stdout.isatty() else 160).print(table)
        self.write(indent=1)
        return 0


def paired_ratio(series_a: Sequence[float], series_b: Sequence[float]) -> tuple[float, float]:
    """The median of the ratios of all pairs, and their spread (max − min)."""
    ratios = [x / y for x, y in zip(series_a, series_b, strict=True)]
    return statistics.median(ratios), max(ratios) - min(ratios)


@functools.cache
def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": usable_cpus(),
        "python": platform.python_version(),
        "gpus": gpus(),
    }


@functools.cache
def commit() -> str | None:
    """Of the clone that this runs from, with `-dirty` if a file was changed. None: it is no clone."""
    describe = ("git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*")
    try:
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


@functools.cache
def versions() -> dict[str, str]:
    installed: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # optional, or the checkout is not installed
    return installed


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def gpus() -> list[str]:
    """Name and driver of each GPU."""
    return nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader") or []


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.4g}"
