"""The workflow of GitHub runs targets of the Makefile, on the tested Pythons, and all shards."""

import re
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pages import ROOT

from .test_makefile import steps_of

pytestmark = pytest.mark.all

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
PYTEST = re.compile(r"python -m pytest (.*)")


def commands(job: dict[str, Any]) -> list[str]:
    """Those of `make`, for each entry of the matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    made = []
    for values in product(*matrix.values()):
        for step in job["steps"]:
            text = step.get("run", "")
            for name, value in zip(matrix, values, strict=True):
                text = text.replace(f"${{{{ matrix.{name} }}}}", value)
            made += [line for line in text.splitlines() if line.startswith("make ")]
    return made


def test_each_job_is_bounded_and_pinned_and_may_only_read() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for job in JOBS.values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 90
        for used in (step["uses"] for step in job["steps"] if "uses" in step):
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", used)


def test_lint_and_tests_are_those_that_ci_runs() -> None:
    ran = [line.split() for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    checks = [f"make {target}" for _, *targets in ran for target in targets if target in ("lint", "test-all")]
    assert commands(JOBS["lint"]) == checks[:1]
    assert [line.partition(" PYTHON=")[0] for line in {*commands(JOBS["test"])}] == checks[1:] * 3


def test_each_python_that_is_tested_is_named_to_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = JOBS["test"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: "
    assert [x.removeprefix(prefix) for x in project["classifiers"] if x.startswith(f"{prefix}3.")] == tested
    assert project["requires-python"].startswith(f">={tested[0]}")


def test_the_long_tests_run_whole(tmp_path: Path) -> None:
    shards = []
    for command in commands(JOBS["long"]):
        [options] = [found[1] for step in steps_of(command, tmp_path) if (found := PYTEST.search(step))]
        shards += re.findall(r"-m 'long and not gpu'.* --shard '(\d+)/(\d+)'", options)
    assert shards == [(str(number), str(len(shards))) for number in range(1, len(shards) + 1)] != []
