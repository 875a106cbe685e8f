"""Compares reports row by row, and decides for CI whether a change is too large.

Two runs of one server never measure the same. So a latency or a rate has changed only if the 95 % intervals
of both runs do not overlap; all else is shown as "≈".
"""

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.bench.load.measurement.slo import renamed
from baton.bench.load.report.table import Rows, rows_of

SYNTAX = "ROW>+5% (grew by more), ROW<-5% (shrank by more), ROW>+2 (by more units), ROW>250 (is more)"
_CONDITION = re.compile(r"^\s*([\w.=/-]+?)\s*([<>])\s*([+-]?)(\d+(?:\.\d+)?)\s*(%?)\s*$")
# If these parameters differ, the two runs are not the same experiment.
_SAME = ("model", "api", "load", "duration_s", "requests", "workload", "extra_body", "warm_up", "seed")
_OF_EACH_RUN = ("texts", "dialect")
_LATENCIES = ("ttft", "itl", "handover", "e2e")
_RATES = ("throughput", "goodput", "max_rate", "interactivity")
_FAILURES = ("errors", "requests.failed", "requests.refused")
Kind = str
"""Of a change: "" if unknown, "dim" if it may be chance, "good" or "bad". "warn": of a note."""
_STYLES = {"": "", "dim": "dim", "good": "green", "bad": "red", "warn": "yellow"}


@dataclass(frozen=True, slots=True)
class Condition:
    """`itl.p99>+5%`: if the condition holds, the comparison fails."""

    text: str
    row: str
    above: bool
    sign: str  # "" compares the value itself, otherwise its change
    number: float
    percent: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _CONDITION.match(renamed(text))
        if match is None:
            raise ValueError(f"--fail-if {text!r} is no condition. Write {SYNTAX}.")
        row, operator, sign, number, percent = match.groups()
        if percent and not sign:
            raise ValueError(
                f"--fail-if {text!r}: a change in percent has a sign, like {row}{operator}+{number}%."
            )
        return cls(text.strip(), row, operator == ">", sign, float(number), bool(percent))

    def holds(self, old: float, new: float) -> bool:
        """Whether the value or its change is strictly beyond the bound. Growth from 0 is infinite."""
        bound = -self.number if self.sign == "-" else self.number
        if not self.sign:
            measured = new
        elif not self.percent:
            measured = new - old
        else:
            measured = relative_change(old, new) * 100
        return measured > bound if self.above else measured < bound


@dataclass(frozen=True, slots=True)
class Verdict:
    """`failed`: the conditions that hold, with their values."""

    failed: tuple[str, ...]
    warnings: tuple[str, ...]


def load(path: Path) -> dict[str, Any]:
    """Reads a report that --json wrote. Raises ValueError for another file."""
    try:
        report = json.loads(renamed(path.read_text()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path}: no report ({e}). Give a file that --json wrote.") from e
    rows = report.get("results") if isinstance(report, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(r, dict) and {"name", "value", "unit"} <= set(r) for r in rows
    ):
        raise ValueError(f"{path}: no report, it has no results. Give a file that --json wrote.")
    return report


def judge(reports: Sequence[Mapping[str, Any]], conditions: Sequence[Condition]) -> Verdict:
    """Compares each later report with the first one. Raises ValueError if a report lacks the row of a
    condition, or if a run is invalid."""
    old, failed, warnings = reports[0], [], []
    before = rows_of(old)
    for new in reports[1:]:
        after = rows_of(new)
        for condition in conditions:
            name = condition.row
            rows = _row(before, name, "first"), _row(after, name, "second")
            values = rows[0]["value"], rows[1]["value"]
            if condition.holds(*values):
                change = f"{_number(values[0])} → {_number(values[1])} ({change_text(*values)})"
                if condition.sign and _overlap(*rows):
                    warnings.append(
                        f"{condition.text}: {change} may be chance, the intervals overlap: measure longer"
                    )
                else:
                    failed.append(f"{condition.text}: {change}")
        for place, report in (("first", old), ("second", new)):
            if conditions and not report.get("detail", {}).get("valid", True):
                raise ValueError(
                    f"the {place} run is invalid, its client could not keep up: measure it again."
                )
        warnings += _warnings(old, new)
    return Verdict(tuple(failed), tuple(dict.fromkeys(warnings)))


def render(reports: Sequence[Mapping[str, Any]], names: Sequence[str], verdict: Verdict) -> RenderableType:
    base = rows_of(reports[0])
    table = Table(title="Comparison", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column(names[0], justify="right")
    for name in names[1:]:
        table.add_column(name, justify="right")
        table.add_column("change", justify="right")
    every = [name for report in reports for name in rows_of(report)]
    for name in dict.fromkeys(every):
        cells: list[RenderableType] = [_cell(base.get(name))]
        for report in reports[1:]:
            row = rows_of(report).get(name)
            text, kind = change(base.get(name), row)
            cells += [_cell(row), Text(text, _STYLES[kind])]
        table.add_row(name, *cells)
    return Group(table, *(Text(text, _STYLES[kind]) for text, kind in notes(reports, names, verdict)))


def notes(
    reports: Sequence[Mapping[str, Any]], names: Sequence[str], verdict: Verdict
) -> list[tuple[str, Kind]]:
    """Lines below the comparison: what differs between the runs, what makes it doubtful, and what failed."""
    lines: list[tuple[str, Kind]] = [
        (f"{name}: {key}: {old} → {new}", "")
        for report, name in zip(reports[1:], names[1:], strict=True)
        for key, (old, new) in _setup_changes(reports[0], report).items()
    ]
    lines += [(f"Note: {warning}", "warn") for warning in verdict.warnings]
    lines += [(f"FAILED {failed}", "bad") for failed in verdict.failed]
    return lines


def _setup_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Parameters, versions and machine that differ, but those in which every run differs, and those that
    a warning names."""
    before, after = (
        {**report["parameters"], **report.get("versions", {}), **report.get("machine", {})}
        for report in (old, new)
    )
    return {
        key: (before.get(key, "–"), after.get(key, "–"))
        for key in dict.fromkeys((*before, *after))
        if key not in (*_OF_EACH_RUN, *_SAME) and before.get(key) != after.get(key)
    }


def relative_change(old: float, new: float) -> float:
    if old == new:
        return 0.0
    return (new - old) / abs(old) if old else math.copysign(math.inf, new)


def change_text(old: float, new: float) -> str:
    change = relative_change(old, new)
    return "from 0" if math.isinf(change) else f"{change:+.1%}"


def _row(rows: Rows, name: str, place: str) -> Mapping[str, Any]:
    if name not in rows:
        close = difflib.get_close_matches(name, list(rows), 3)
        hint = f"Did you mean {', '.join(close)}?" if close else f"It has {', '.join(list(rows)[:8])}, …"
        raise ValueError(f"--fail-if: the {place} report has no row {name!r}. {hint}")
    return rows[name]


def _warnings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    warnings = []
    for key in _SAME:
        a, b = old["parameters"].get(key), new["parameters"].get(key)
        if a != b:
            warnings.append(f"not the same experiment: {key} is {a!r} in the first and {b!r} in the other")
    for place, report in (("first", old), ("other", new)):
        detail = report.get("detail", {})
        if not detail.get("valid", True):
            warnings.append(f"the {place} run is INVALID: its client could not keep up")
        if detail.get("incomplete"):
            warnings.append(f"the {place} run is incomplete")
    return warnings


def _cell(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else f"{_number(row['value'])} {row['unit']}"


def _number(value: float) -> str:
    """At least four digits, and never an exponent for a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def change(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> tuple[str, Kind]:
    """The change of a row, and what it means."""
    if old is None or new is None:
        return "–", ""
    name = re.sub(r"^\w+=.*?\.(?=[a-z])", "", old["name"])  # without the load of a sweep, such as rate=0.5.
    text = change_text(old["value"], new["value"])
    if old["value"] == new["value"]:
        return text, ""
    if name.startswith(_LATENCIES + _RATES) and ("low" not in old or "low" not in new or _overlap(old, new)):
        return f"{text} ≈", "dim"
    if not name.startswith(_LATENCIES + _RATES + _FAILURES):
        return text, ""
    better = (new["value"] > old["value"]) == name.startswith(_RATES)
    return text, "good" if better else "bad"


def _overlap(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if "low" not in a or "low" not in b:
        return False
    return a["low"] <= b.get("high", math.inf) and b["low"] <= a.get("high", math.inf)
