"""`bench.disagg` sends the same load to all sides, and judges what it found. Real figures need GPUs."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.bench.disagg import results
from baton.bench.disagg.loads import LOADS, Load, Pace, command
from baton.bench.disagg.pairs import Request, ratio, started
from baton.bench.disagg.results import page
from baton.bench.disagg.sides import against, baton
from baton.bench.load.target.tokenization import WORDS
from baton.bench.shapes import SHAPES, write_shape
from tests.pages import ROOT

OPEN, CLOSED, SWING = LOADS[0], LOADS[-2], LOADS[-1]
PACE = Pace(requests=300, least=15.0, seconds=None, seed=0)


def flags(load: Load, level: float, directory: Path, pace: Pace = PACE) -> dict[str, str]:
    said = command(load, level, pace, directory)
    return dict(zip(said[-(len(said) // 2 * 2) :: 2], said[-(len(said) // 2 * 2) + 1 :: 2], strict=True))


def test_a_rate_has_its_own_requests_for_all_sides_alike(tmp_path: Path) -> None:
    slow, fast = (flags(OPEN, rate, tmp_path) for rate in (8, 22))
    assert slow == flags(OPEN, 8, tmp_path), "all sides get the same prompts at the same times"
    assert slow["--seed"] != fast["--seed"], "a prompt of another rate may be cached"
    assert slow["--warmup"] == "0", "otherwise each side excludes another warm-up"
    assert (slow["--requests"], fast["--requests"]) == ("300", "330")


def test_a_rate_takes_no_longer_than_the_seconds_given(tmp_path: Path) -> None:
    pace = replace(PACE, seconds=7.0)
    assert flags(OPEN, 8, tmp_path, pace)["--duration"] == "7"
    assert flags(CLOSED, 128, tmp_path, pace)["--duration"] == "7"
    _, trace, *_ = command(SWING, 50, pace, tmp_path)
    assert max(json.loads(line)["timestamp"] for line in Path(trace).read_text().splitlines()) < 7_000


def test_a_swinging_load_changes_its_lengths_twice_a_period(tmp_path: Path) -> None:
    _, trace, *_ = command(SWING, 50, PACE, tmp_path)
    lines = [json.loads(line) for line in Path(trace).read_text().splitlines()]
    assert 50_000 < lines[-1]["timestamp"] < 60_000
    for line in lines:
        lengths = SWING.lengths[int(line["timestamp"] // 10_000) % 2]
        assert (line["input_length"], line["output_length"]) == lengths


def test_an_endpoint_comes_with_its_flags() -> None:
    side = against("vllm_512=http://a:1,http://b:2 --max-num-seqs 256")
    assert (side.name, side.flags) == ("vllm_512", {"http://a:1,http://b:2": "--max-num-seqs 256"})
    with side.serve() as url:
        assert url == "http://a:1,http://b:2"
    for wrong in ("vllm=http://a:1", "http://a:1 --flag", "vllm=a:1 --flag"):
        with pytest.raises(ValueError, match="--against"):
            against(wrong)


def test_colocated_has_as_many_workers(tmp_path: Path) -> None:
    colocated, split, layout = baton("3p1d", "cpu", "--ttit-target 20", tmp_path)
    assert set(colocated.flags) == {"4 × baton decode", "1 × baton router"}
    assert set(layout.flags) == {"3 × baton prefill", "1 × baton decode", "1 × baton router"}
    assert layout.flags["3 × baton prefill"].endswith("--ttit-target 20")
    assert split.flags == {**layout.flags, "1 × baton router": "--no-overflow"}


def test_prompts_differ_for_the_tokenizer_of_a_shape(tmp_path: Path) -> None:
    where = write_shape("one-small-layer", tmp_path, tokenizer=True)
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    ids = tokenizer.encode(" ".join(WORDS)).ids
    assert len(set(ids)) == len(set(WORDS)), "equal prompts would come from the prefix cache"
    assert tokenizer.get_vocab_size() == SHAPES["one-small-layer"]["vocab_size"]


def found(level: float, **values: float) -> results.Point:
    point: dict[str, Any] = {"load": OPEN.name, "level": level, "slo": OPEN.slo, "valid": True, "notes": []}
    return point | {
        "errors": {},
        "results": {name.replace("_", ".", 1): {"value": v} for name, v in values.items()},
    }


def test_a_goal_bounds_the_ratio_to_the_other_side() -> None:
    point, other = (
        found(8, ttft_p99=120.0, ttit_p99=6.0, handover_p99=30.0),
        found(8, ttft_p99=100.0, ttit_p99=12.0),
    )
    rows = {r.name: r for r in results.rows("1p1d", OPEN, point, ("vllm", other["results"]), judged=True)}
    ttft, gap, first = (rows[f"disagg.1p1d.2000_150.r8.{name}.p99"] for name in ("ttft", "ttit", "handover"))
    assert (ttft.ratio, ttft.ratio_to, ttft.meets_goal) == (pytest.approx(1.2), "vllm", False)
    assert (gap.ratio, gap.meets_goal) == (pytest.approx(0.5), True)
    assert (first.ratio, first.meets_goal) == (None, False)
    rows = {
        r.name: r for r in results.rows("colocated", OPEN, point, ("vllm", other["results"]), judged=False)
    }
    assert rows["disagg.colocated.2000_150.r8.ttft.p99"].meets_goal is None


def test_a_run_without_an_answer_has_only_counts() -> None:
    point = found(8, goodput_share=0.0, requests_ok=0, requests_failed=9)
    assert len(list(results.rows("1p1d", OPEN, point, None, judged=True))) == 3
    assert "TTFT –/– " in results.line("1p1d", OPEN, point)
    assert "–" in page_of(point)


def test_the_page_states_flags_and_escapes_them() -> None:
    drawn = page_of(found(8, ttft_p50=50.0, ttft_p99=120.0, ttit_p50=5.0, throughput_output_tokens=9.0))
    assert "vllm serve &lt;model&gt;" in drawn
    assert drawn.count("plotly-graph-div") == 1


def page_of(point: results.Point) -> str:
    sides = {"vllm": {"flags": {"http://a": "vllm serve <model>"}, "points": [point]}}
    machine = {"gpus": ["H200"], "cpu": ""}
    return page({"started": "now", "machine": machine, "parameters": {}, "detail": {"sides": sides}})


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
