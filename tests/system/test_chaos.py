"""`python -m baton.bench.chaos` meets all its bounds.

The short form cuts lanes once and flips a worker of each role. The long ones kill a hundred workers, and the
router fifty times."""

import json
from pathlib import Path

import pytest

from baton.bench.lab.chaos import BENCH, torments

from .recovery import Broken

pytestmark = pytest.mark.all

RIGHT = {
    "chaos.failed": 0,
    "chaos.lost_or_repeated_tokens": 0,
    "chaos.different_tokens": 0,
    "chaos.leaked_blocks": 0,
}


LONG = "--kills 50 --stalls 3 --breaks 20 --flips 20 --routers 50 --clients 8"


@pytest.mark.parametrize(
    "flags",
    [
        "--short --kills 0 --breaks 1 --flips 1 --clients 2",
        pytest.param(f"{LONG} --seed 1", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
        pytest.param(f"{LONG} --seed 2", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
    ids=["once", "hundred kills", "hundred kills, another order"],
)
async def test_no_stream_notices(broken: Broken, tmp_path: Path, flags: str) -> None:
    out = tmp_path / "report.json"
    asked = BENCH.arguments(["--device", "cpu", *flags.split(), "--json", str(out)])
    run = BENCH.run(asked)
    await torments(run, broken.cluster)
    run.finish()
    rows = {row["name"]: row["value"] for row in json.loads(out.read_text())["results"]}
    assert rows | RIGHT == rows
    assert rows["chaos.decode.break.lanes"] == asked.breaks
    assert rows["chaos.decode.flip"] == rows["chaos.prefill.flip"] == asked.flips
