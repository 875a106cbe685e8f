"""`bench.disagg.pairs` starts two sides in turns, and finds the ratio of their latencies."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from baton.bench.disagg.pairs import Request, ratio, started
from tests.pages import ROOT

MOCK = f"{sys.executable} -m tests.bench.mock_server --port {{port}}"


def test_a_side_that_is_twice_as_slow_has_half_the_ratio(tmp_path: Path) -> None:
    sides = [f"fast 1 {MOCK} --ttft-ms 60 --gaps-ms 10", f"slow 2 {MOCK} --ttft-ms 120 --gaps-ms 20"]
    flags = ["--device", "cpu", "--seeds", "1", "--requests", "12", "--rates", "20"]
    flags += ["--json", str(tmp_path / "report.json"), *(word for side in sides for word in ("--side", side))]
    done = subprocess.run(
        [sys.executable, "-m", "baton.bench.disagg.pairs", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"2000_150\.r20: 12 requests of fast, 12 of slow", done.stdout)
    rows = {
        row["name"]: row["value"] for row in json.loads((tmp_path / "report.json").read_text())["results"]
    }
    assert 0.3 < rows["2000_150.r20.ttft.p50"] < 0.8


def test_the_interval_is_wide_for_few_requests_and_holds_the_ratio() -> None:
    rng = np.random.default_rng(1)

    def side(count: int, scale: float) -> list[Request]:
        return [{"ttft": rng.exponential(scale, 1), "gap": rng.exponential(scale, 20)} for _ in range(count)]

    few, many = (ratio(side(n, 1.0), side(n, 2.0), "gap.p99") for n in (20, 400))
    for value, low, high in (few, many):
        assert low < value < high
    assert many[1] < 0.5 < many[2]
    assert many[2] - many[1] < (few[2] - few[1]) / 2


@pytest.mark.timeout(60)
def test_a_side_whose_process_ends_is_not_waited_for() -> None:
    side = f"broken 1 {sys.executable} -c raise(SystemExit(3))"
    with pytest.raises(RuntimeError, match=r"broken 1 .* ended before it answered"), started(side):
        pass
