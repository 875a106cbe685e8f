"""`bench.disagg` sends the same load to all deployments. Real figures need GPUs."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import disagg


def test_all_deployments_get_the_same_requests_at_the_same_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        sent.append(command)
        out = Path(command[command.index("--json") + 1])
        out.write_text(json.dumps({"results": [{"name": "ttft.p50", "value": 1.0}]}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    for url in ("http://1p1d", "http://overflow"):
        load = disagg.Load(input_len=2000, output_len=150, duration=10.0, concurrency=128)
        assert disagg.run_load(url, load, tmp_path, "--rate", "22") == {"ttft.p50": 1.0}
    one, other = [dict(zip(command[5::2], command[6::2], strict=True)) for command in sent]
    assert {name for name in one if one[name] != other[name]} == {"--url"}
    assert int(one["--seed"]) == disagg.SEED, "otherwise each run has other prompts"
    assert float(one["--warmup"]) == 0, "otherwise each run excludes another warm-up"
