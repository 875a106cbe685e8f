"""Which tests may run again when they fail."""

from __future__ import annotations

import re

import pytest

from tests import reruns

pytest_plugins = ["pytester"]
MODULE = """
tries = []

def test_sometimes():
    tries.append(None)
    assert len(tries) == 2

def test_never():
    assert False

def test_good():
    pass
"""
SOMETIMES, NEVER = "test_it.py::test_sometimes", "test_it.py::test_never"


@pytest.mark.parametrize(
    ("listed", "options", "status", "said"),
    [
        ([SOMETIMES], [SOMETIMES], 0, [f"{SOMETIMES}: a reason", "*assert 1 == 2*"]),
        ([SOMETIMES], ["--deselect", SOMETIMES, "--deselect", NEVER], 0, ["*1 passed, 2 deselected*"]),
        ([SOMETIMES], [], 1, [f"FAILED {NEVER}*", "*1 failed, 2 passed, 1 rerun*"]),
        ([NEVER], [NEVER], 1, ["*1 failed, 2 rerun*"]),
        ([], [SOMETIMES], 1, ["*1 failed*"]),
        (
            [],
            [SOMETIMES, "--reruns", "1"],
            1,
            [f"{SOMETIMES}: tests/reruns.py does not name it*", "*1 passed, 1 rerun*"],
        ),
        (["test_it.py::test_gone"], [], 4, ["ERROR: *names tests that do not exist: test_it.py::test_gone"]),
        (["gone.py::test_good"], [], 4, ["ERROR: *names tests that do not exist: gone.py::test_good"]),
        (
            [f"test_it.py::test_good[{i}]" for i in range(6)],
            [],
            4,
            ["ERROR: *names 6 tests, and may name 5*"],
        ),
    ],
    ids=[
        "listed",
        "not needed",
        "another fails",
        "listed, and fails",
        "not listed",
        "by an option",
        "gone",
        "of no module",
        "six",
    ],
)
def test_only_listed_tests_run_again(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    listed: list[str],
    options: list[str],
    status: int,
    said: list[str],
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(reruns, "RERUNS", dict.fromkeys(listed, "a reason"))
    pytester.makepyfile(test_it=MODULE)
    done = pytester.runpytest_inprocess("-p", "pytest_rerunfailures", "-p", "tests.reruns", *options)
    assert done.ret == status
    (done.stderr if status == 4 else done.stdout).fnmatch_lines(said)


def test_each_listed_test_has_a_date_and_a_reason() -> None:
    for said in reruns.RERUNS.values():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d: .{10,}", said)
