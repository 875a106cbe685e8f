"""The parts of a set of tests are the set, once, and take about as long as each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.reruns import missing
from tests.shards import CLUSTERS, MINUTES, shard, shards, unit

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]
MODULES = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/**/test_*.py"))]
IDS = [*MINUTES, *(f"{module}::test_{number}" for module in MODULES for number in range(3))]
BODY = """
import pytest

@pytest.mark.long
@pytest.mark.parametrize("i", range(4))
def test_a(i):
    pass

def test_b():
    pass
"""


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 40, len(IDS) + 1])
def test_every_test_is_in_one_shard_of_any_number(count: int) -> None:
    parts = shards(IDS, count)
    assert len(parts) == count
    assert sorted(name for part in parts for name in part) == sorted(set(map(unit, IDS)))
    assert parts == shards(reversed(IDS), count), "each run divides them in the same way"


def test_two_processes_run_each_of_six_shards_of_the_long_tests_in_25_minutes() -> None:
    for part in shards(MINUTES, 6):
        clusters = sum(MINUTES[name] for name in part if name.startswith(CLUSTERS))  # one after the other
        assert max(clusters, sum(map(MINUTES.__getitem__, part)) / 2) <= 23, "and the tests of no named unit"


def test_units_are_there() -> None:
    assert missing(MINUTES, ROOT) == []


def test_shards_run_what_the_other_options_choose(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers = long")
    pytester.makepyfile(**dict.fromkeys(("test_w", "test_x", "test_y", "test_z"), BODY))
    ran = []
    for number in (1, 2, 3):
        done = pytester.runpytest_inprocess("-m", "long", "-v", "-p", "tests.shards", f"--shard={number}/3")
        before = len(ran)
        ran += [line.split()[0] for line in done.outlines if " PASSED" in line]
        (run,) = (json.loads(line) for line in done.outlines if line.startswith("{"))
        assert run["command"] == f"make test-long SHARD={number}/3"
        assert run["results"][:2] == [
            {"name": "passed", "value": len(ran) - before, "unit": "tests"},
            {"name": "failed", "value": 0, "unit": "tests"},
        ]
    assert sorted(ran) == sorted(f"test_{name}.py::test_a[{i}]" for name in "wxyz" for i in range(4))


@pytest.mark.parametrize("bad", ["7/6", "0/6", "x", "1", "1/", "/6", "-1/6", "1/0", "1/6/2", "1.5/6", "²/6"])
def test_what_is_no_shard_is_refused(bad: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no shard: give one of several, as 1/6"):
        shard(bad)
