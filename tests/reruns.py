"""The tests that may run again when they fail. A run in which another test needed it fails.

A test that passes sometimes hides a defect of itself or of what it tests. So the list is to be empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

RERUNS: dict[str, str] = {}
"""By id, why a test may fail though nothing is wrong, and since when: "2026-11-26: the reason"."""
MOST = 5
AGAIN = 2
"""How often a listed test runs again."""


def missing(names: Iterable[str], root: Path) -> list[str]:
    """Returns the ids of modules and tests that do not exist below `root`."""
    found = []
    for name in names:
        path, _, test = name.partition("::")
        function = test.partition("[")[0].rpartition("::")[2]
        if not (root / path).exists() or (test and f"def {function}(" not in (root / path).read_text()):
            found.append(name)
    return found


def pytest_configure(config: pytest.Config) -> None:
    if len(RERUNS) > MOST:
        raise pytest.UsageError(f"tests/reruns.py names {len(RERUNS)} tests, and may name {MOST}: mend some")
    if lost := missing(RERUNS, config.rootpath):
        raise pytest.UsageError(f"tests/reruns.py names tests that do not exist: {', '.join(lost)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in RERUNS:
            item.add_marker(pytest.mark.flaky(reruns=AGAIN))


def _reran(config: pytest.Config) -> dict[str, list[str]]:
    """By id, the traceback of each failure after which a test ran again."""
    found: dict[str, list[str]] = {}
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # processes of pytest-xdist have none
    for report in reporter.stats.get("rerun", []) if reporter else []:
        found.setdefault(report.nodeid, []).append(report.longreprtext)
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _reran(session.config).keys() - RERUNS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not (reran := _reran(config)):
        return
    terminalreporter.section("tests that ran again")
    for name, failures in reran.items():
        why = RERUNS.get(name, "tests/reruns.py does not name it, so the run fails")
        terminalreporter.write_line(f"{name}: {why}", bold=True)
        for failure in failures:
            terminalreporter.write_line(failure)
