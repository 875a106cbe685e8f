"""`bench.disagg` sends the same load to both sides, and compares what it found. Real figures need GPUs."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from baton.bench.lab.disagg.__main__ import BENCH, figure, ratio, requests_of
from baton.bench.lab.disagg.loads import LOADS, Load, command
from baton.bench.lab.harness.sides import Side
from baton.bench.lab.shapes import SHAPES, write_shape
from baton.bench.load.target.tokenization import WORDS
from tests.forked import forking
from tests.pages import ROOT
from tests.within import WITHIN

pytestmark = pytest.mark.all

OPEN, CLOSED = LOADS[0], LOADS[-3]


def flags(load: Load, level: float, directory: Path, seed: int = 0) -> dict[str, str]:
    said = command(load, level, 300, seed, directory)
    return dict(zip(said[1::2], said[2::2], strict=True))


def test_each_rate_and_seed_has_its_own_requests_for_both_sides_alike(tmp_path: Path) -> None:
    slow, fast, again = flags(OPEN, 8, tmp_path), flags(OPEN, 22, tmp_path), flags(OPEN, 8, tmp_path, seed=1)
    assert slow == flags(OPEN, 8, tmp_path), "both sides get the same prompts at the same times"
    assert len({each["--seed"] for each in (slow, fast, again)}) == 3, "a prompt may be cached"
    assert slow["--warmup"] == "0", "otherwise each side excludes another warm-up"
    assert (slow["--requests"], flags(CLOSED, 128, tmp_path)["--requests"]) == ("300", "512")


def test_prompts_differ_for_the_tokenizer_of_a_shape(tmp_path: Path) -> None:
    where = write_shape("one-small-layer", tmp_path, tokenizer=True)
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    ids = tokenizer.encode(" ".join(WORDS)).ids
    assert len(set(ids)) == len(set(WORDS)), "equal prompts would come from the prefix cache"
    assert tokenizer.get_vocab_size() == SHAPES["one-small-layer"]["vocab_size"]


MOCK = f"{sys.executable} -m tests.bench.mock_server --port {{port}}"


def test_a_ratio_is_that_of_the_answers_of_both_sides(tmp_path: Path) -> None:
    sides = [f"fast 1 {MOCK} --ttft-ms 20 --gaps-ms 1", f"slow 2 {MOCK} --ttft-ms 40 --gaps-ms 1"]
    out, reports = tmp_path / "report.json", tmp_path / "reports"
    flags = ["--device", "cpu", "--seeds", "1", "--requests", "12", "--rates", "20", "--loads", "2000/150"]
    flags += ["--short", "--json", str(out), "--reports", str(reports), "--side", sides[0]]
    with forking():
        assert BENCH.main([*flags, "--side", sides[1]]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(out.read_text())["results"]}
    assert rows["disagg.2000_150.r20.fast.answered"] == rows["disagg.2000_150.r20.slow.answered"] == 12
    fast, slow = (requests_of(reports / f"2000_150.r20.{side}.0.jsonl") for side in ("fast", "slow"))
    assert min(request["ttft"][0] for request in slow) >= 40
    quick, late = (figure([side], "ttft.p50") for side in (fast, slow))
    assert quick is not None
    assert late is not None
    assert rows["disagg.2000_150.r20.ttft.p50"] == quick / late
    assert rows["disagg.2000_150.r20.throughput.output_tokens"] > 0
    assert "disagg.2000_150.r20.ttft.p99" not in rows, "12 requests are too few"


def test_tokens_that_are_read_together_have_a_ratio() -> None:
    requests = [{"gap": np.zeros(20)}] * 16
    assert ratio([requests], [requests], "gap.p99") == (1.0, 1.0, 1.0)
    assert ratio([requests[:4]], [requests], "gap.p99") is None, "80 gaps are too few for p99"


def test_the_interval_is_wide_for_few_requests_and_holds_the_ratio() -> None:
    rng = np.random.default_rng(1)

    def compared(count: int, seeds: int) -> tuple[float, float, float]:
        ours, theirs = (
            [[{"gap": rng.exponential(scale, 20)} for _ in range(count)] for _ in range(seeds)]
            for scale in (1.0, 2.0)
        )
        found = ratio(ours, theirs, "gap.p90")
        assert found is not None
        value, low, high = found
        assert low is not None
        assert high is not None
        assert low < value < high
        return value, low, high

    few, many, seeds = compared(20, 1), compared(400, 1), compared(400, 3)
    for _, low, high in (many, seeds):
        assert low < 0.5 < high
        assert high - low < (few[2] - few[1]) / 2


def test_a_figure_is_the_median_of_the_seeds() -> None:
    seeds = [[{"ttft": np.array([float(10**seed)])}] * 3 for seed in range(3)]
    assert figure(seeds, "ttft.p50") == 10
    assert figure(seeds, "ttft.p90") is None, "no sample is above it"


def test_a_bench_that_is_told_to_end_ends_its_servers() -> None:
    """Servers that stay keep their GPUs from all that comes later."""
    words = [sys.executable, "-m", "baton.bench.disagg", "--device", "cpu"]
    for name in ("a", "b"):
        words += ["--side", f"{name} 1 {MOCK}"]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        servers: list[psutil.Process] = []
        try:
            assert "http://" in bench.stderr.readline(), "what a mock server says when it listens"
            servers = psutil.Process(bench.pid).children()
            bench.terminate()
            assert bench.wait(WITHIN) == 128 + signal.SIGTERM
            assert servers
            assert not psutil.wait_procs(servers, timeout=WITHIN)[1]
        finally:
            for process in (bench, *servers):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.mark.parametrize(
    ("count", "gpus"), [("1", [None]), ("2", ["2", "3"]), ("1x2", ["2,3"]), ("2x2", ["2,3", "4,5"])]
)
def test_the_gpus_of_a_side(count: str, gpus: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side.parse(f"name {count} a command")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [side.gpus_of(number, 2) for number in range(side.count)] == gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5")
    assert [side.gpus_of(number, 0) for number in range(side.count)] == gpus
