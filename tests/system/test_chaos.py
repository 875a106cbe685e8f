"""A hundred kills of each role under load: `python -m bench.chaos` meets all its bounds. Its short form cuts
lanes once and flips a worker of each role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.chaos.__main__ import arguments, main, measure

from .recovery import Broken

RIGHT = {
    "chaos.failed": 0,
    "chaos.lost_or_repeated_tokens": 0,
    "chaos.different_tokens": 0,
    "chaos.leaked_blocks": 0,
}


async def test_lanes_are_cut_and_workers_flipped_once(broken: Broken, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    flags = ("--short", "--kills", "0", "--breaks", "1", "--flips", "1", "--clients", "4", "--json", str(out))
    report = await measure(arguments([*flags]), broken.cluster)
    report.finish()
    rows = {row["name"]: row["value"] for row in json.loads(out.read_text())["results"]}
    assert rows | RIGHT == rows
    happened = ("decode.break.lanes", "decode.flip", "prefill.flip")
    assert [rows[f"chaos.{name}"] for name in happened] == [1, 1, 1]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_kills_of_each_role(tmp_path: Path, seed: int) -> None:
    flags = {
        "--kills": 50,
        "--stalls": 3,
        "--breaks": 20,
        "--flips": 20,
        "--routers": 50,
        "--seed": seed,
        "--logs": tmp_path,
    }
    report = main([str(word) for flag in flags.items() for word in flag])
    assert {row.name: row.value for row in report.rows if row.goal is not None} == RIGHT
