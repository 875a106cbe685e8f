"""A hundred kills of each role, under load: `python -m bench.chaos` with all its rows met."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.__main__ import main


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_kills_of_each_role(tmp_path: Path, seed: int) -> None:
    flags = {
        "--kills": 50,
        "--stalls": 3,
        "--breaks": 20,
        "--routers": 50,
        "--seed": seed,
        "--logs": tmp_path,
    }
    report = main([str(word) for flag in flags.items() for word in flag])
    assert {row.name: row.value for row in report.rows if row.goal is not None} == {
        "chaos.failed": 0,
        "chaos.lost_or_repeated_tokens": 0,
        "chaos.different_tokens": 0,
        "chaos.leaked_blocks": 0,
    }
