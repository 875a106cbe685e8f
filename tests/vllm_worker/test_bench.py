"""`baton.bench.vllm` with real engines on CPUs."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from .engines import PATHS, PYTHON


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_bench_of_vllm(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [
        PYTHON,
        "-m",
        "baton.bench.vllm",
        "--short",
        "--json",
        out,
        "--side",
        "alone",
        "proxied",
        "workers",
    ]
    environment = os.environ | {"PYTHONPATH": PATHS, "FRESH_VLLM": "1", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    rows = {row["name"]: row for row in report["results"]}
    assert rows["vllm.cpu.different"]["value"] == 0
    assert report["detail"]["different"].keys() == {"alone", "proxied", "workers"}
    assert rows["vllm.cpu.handover"]["value"] > 0 < rows["vllm.cpu.proxied.ttft"]["ratio"]
