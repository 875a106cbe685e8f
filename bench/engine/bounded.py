"""Rows of a time with two bounds."""

from __future__ import annotations

from baton.bench.contract import Report, Row


def add_bounded(report: Report, name: str, took: float, p99: float, bounds: tuple[float, float]) -> None:
    """Adds a row with the *must* as its goal, and `NAME.goal` with the time to aim at. All in ms."""
    must, goal = bounds
    report.add(Row(name, took, "ms", p99=p99, goal=must, better="lower"))
    report.add(
        Row(f"{name}.goal", goal, "ms", ratio=took / goal, ratio_to="the goal", goal=1.0, better="lower")
    )
