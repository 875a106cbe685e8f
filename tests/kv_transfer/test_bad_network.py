"""Transfers over bad networks, in namespaces that have no other traffic, and where a link may go down."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = str(Path(__file__).with_name("bad_network_cases.py"))


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("which", "cases"),
    [
        ("not long", "test_"),
        pytest.param("long", "test_every_request_ends_right", marks=pytest.mark.long),
        pytest.param("long", "test_what_decode_says_is_lost_or_wrong", marks=pytest.mark.long),
    ],
)
def test_every_fault_of_lanes(which: str, cases: str) -> None:
    asked = ("-m", which, "-k", cases, "-rA", CASES)
    child = ["unshare", "-rn", sys.executable, "-m", "tests.kv_transfer.own_network", *asked]
    done = subprocess.run(child, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"::{cases}" in done.stdout
    assert "skipped" not in done.stdout
