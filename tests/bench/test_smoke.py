"""The benches of Baton itself: what they compute, their options, and (long) their short forms."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.bench.lab import driver, images
from baton.bench.lab.driver import Bench
from baton.bench.lab.harness.workers import Driver, Workers
from baton.bench.lab.overlap.streams import Background
from baton.bench.lab.shapes import SHAPES, write_shape
from tests.engine.conftest import TINY_SPARSE
from tests.mooncake import libraries
from tests.stand_in import stand_in

pytestmark = pytest.mark.all

ROOT = Path(__file__).parents[2]
LAB = ROOT / "bench" / "lab"
TINY = "one-small-layer"
SHORT = (
    "children",
    "choices",
    "disagg",
    "elastic",
    "encoder --pixels 64x32",
    "engine",
    "flip",
    "host",
    "images --pixels 64x64",
    "kv --only tcp",
    "overlap",
    "quality --only killed",
    "reuse",
    "router",
    "router.scale streams --workers 8",
    "split",
    "store",
    "survive",
    "turns",
    "weights",
    "weights --trainer",
    "worker",
)


def benches() -> set[str]:
    commands = [path.parent for path in LAB.glob("*/__main__.py")]
    commands += [path for path in LAB.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    return {path.stem for path in commands}


def bench_of(name: str) -> Bench:
    found = f"baton.bench.lab.{name}.__main__" if (LAB / name).is_dir() else f"baton.bench.lab.{name}"
    return import_module(found).BENCH


def test_the_readme_names_every_bench() -> None:
    index = (ROOT / "bench" / "README.md").read_text()
    assert not {name for name in benches() if f"`python -m baton.bench.{name}" not in index}


@pytest.mark.parametrize("name", sorted(benches()))
def test_a_bench_refuses_a_gpu_that_is_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "gpus", list)
    with pytest.raises(SystemExit) as ended:
        bench_of(name).main(["--device", "cuda"])
    assert ended.value.code == driver.EXIT_CANNOT_MEASURE
    wrong = "needs a GPU" if "cuda" in bench_of(name).devices else "measures on cpu only"
    assert wrong in capsys.readouterr().err


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a bench as `python -m baton.bench.NAME FLAGS` does. Returns value by row of its JSON report."""

    def run(name: str, *flags: str) -> dict[str, Any]:
        out = tmp_path / "report.json"
        assert bench_of(name).main(["--json", str(out), *flags]) == 0
        report = json.loads(out.read_text())
        assert report["bench"] == name
        return {row["name"]: row["value"] for row in report["results"]}

    return run


def test_the_bench_of_a_mixture_counts_the_experts_that_a_step_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.bench.lab.engine import on_gpu
    from baton.engine import EngineConfig, build_engine

    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 8}
    shape = SHAPES[TINY] | experts | {"architectures": ["Qwen3MoeForCausalLM"]}
    monkeypatch.setitem(SHAPES, "tiny-moe", shape)

    monkeypatch.setattr(on_gpu, "COUNTED", 4)
    model = str(write_shape("tiny-moe", tmp_path))
    engine = build_engine(EngineConfig(model, dtype="float32", load_format="dummy", num_blocks=64))
    assert on_gpu.experts_read(engine, 1, 20) == 4
    assert 4 < on_gpu.experts_read(engine, 4, 20) <= 16
    attention, router, expert, head = 2 * 16 * 8 * 3, 16 * 16, 3 * 16 * 8, 16 * 50_000
    kv_bytes = 20 * 2 * 8 * 4
    case = on_gpu.MOE_CASES[None]
    assert on_gpu.bytes_moved(engine, case, 2, 20, 5.5) == pytest.approx(
        2 * (attention + router + 5.5 * expert + head) + 2 * kv_bytes
    )


def test_runs_routing_sim(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.bench.lab.routing_sim import __main__ as sim
    from baton.bench.lab.routing_sim import agents

    smallest = {
        "MAIN": 8, "SCALES": {4: (4, 10, 3), 8: (4, 5, 3), 16: (1, 2, 3)}, "SHORT": {4: 1, 8: 1, 16: 1},
        "LOADS": {load: rates[:1] for load, rates in sim.LOADS.items()},
        "PLACED_SHORT": (2,), "PLACED_SECONDS": 0.0, "PLACED_REQUESTS_SHORT": 10, "SPLIT_SHORT": 4,
    }  # fmt: skip
    for name, value in smallest.items():
        monkeypatch.setattr(sim, name, value)
    few = agents.Case(4, 2)
    for name, value in {"MAIN": "agents4", "CASES": {"agents4": few}, "TRACE_SECONDS": 6.0}.items():
        monkeypatch.setattr(agents, name, value)
    rows = run("routing_sim", "--short")
    assert "routing_sim.agents4.tokens.vs_colocated" in rows
    assert "routing_sim.trace.latency_p90.vs_colocated" in rows
    assert "routing_sim.multi_turn.w8.changes.sticky.hits" in rows
    assert rows["routing_sim.placement.500_500.6.w2.ttft_p99"] > 0


def test_overlap_gives_each_rank_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overlap = import_module("baton.bench.lab.overlap.__main__")

    def devices(prefill: int, decode: int, present: int) -> list[str]:
        monkeypatch.setattr(driver, "visible_gpus", lambda: range(present))
        first_gpus, _ = overlap.devices(argparse.Namespace(prefill_ranks=prefill, decode_ranks=decode))
        return [name.removeprefix("cuda:") for name in first_gpus]

    assert (devices(2, 1, 4), devices(2, 2, 4)) == (["0", "3"], ["0", "2"])
    assert (devices(2, 1, 2), devices(2, 2, 2), devices(1, 1, 1)) == (["0", "1"], ["0", "0"], ["0", "0"])
    with pytest.raises(SystemExit):
        devices(1, 2, 1)
    assert "--prefill-ranks 1 --decode-ranks 2: needs 2 GPUs, and there are 1" in capsys.readouterr().err


def test_gaps_are_not_measured_beside_a_stream_that_has_ended() -> None:
    times = {b"one": [0.0, 1.0, 2.0], b"other": [0.5, 1.5]}
    workers = stand_in(Workers, decode=stand_in(Driver, times=times.__getitem__))
    assert Background(workers, list(times), length=4).gaps(0.5, 2.0) == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="ended after its 3 tokens"):
        Background(workers, list(times), length=3).gaps(0.5, 2.0)


@pytest.mark.parametrize(
    ("limit", "least", "tried"),
    [(5.3, 5.0, 9), (0.3, 0.28, 9), (0.01, 0.0, 5), (99, 10.0, 6)],
)
async def test_the_highest_rate_is_found(limit: float, least: float, tried: int) -> None:
    rates = list[float]()

    async def holds(rate: float) -> bool:
        rates.append(rate)
        return rate <= limit

    assert least <= await images.highest(holds, 1.0, 10.0, 4) <= limit
    assert len(rates) <= tried
    assert max(rates) <= 10.0


@pytest.mark.long
@pytest.mark.parametrize("bench", SHORT)
def test_the_short_form_runs_with_real_processes(
    bench: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries(tmp_path / "lib"))
    out = tmp_path / "report.json"
    name, *flags = bench.split()
    command = [sys.executable, "-m", f"baton.bench.{name}", *flags, "--short", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["results"]


def test_decodes_at_many_positions_need_no_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.bench.lab.engine import on_gpu, positions
    from baton.engine import EngineConfig, build_engine

    sparse = TINY_SPARSE | {"architectures": ["GlmMoeDsaForCausalLM"], "hidden_act": "silu"}
    monkeypatch.setitem(SHAPES, "tiny-sparse", SHAPES[TINY] | sparse)
    model = str(write_shape("tiny-sparse", tmp_path))
    engine = build_engine(EngineConfig(model, dtype="float32", load_format="dummy", num_blocks=32))
    positions.clear(engine)
    gaps = positions.decode_gaps(engine, 2, 100, 6)
    assert gaps is not None
    assert len(gaps) == 6
    assert positions.decode_gaps(engine, 8, 200, 6) is None, "no room"
    engine.assert_whole()
    of_layers = engine.model_config.num_layers * 4
    assert on_gpu.cache_bytes_moved(engine, 100) == of_layers * (100 * 32 + 12 * 48)


OF_KV = 2 * 2
"""K and V, in bfloat16."""
# of a layer whose positions are all read, and of one with a window
OSS_LAYER = 12 * 8 * 64 * OF_KV, 12 * 8 * 64 * OF_KV
GEMMA_LAYER = 7 * 2 * 512 * OF_KV, 35 * 2 * 256 * OF_KV


@pytest.mark.parametrize(
    ("name", "window", "per_position", "active"),
    [("gpt-oss-20b", 128, OSS_LAYER, 3.61e9), ("gemma-4-e4b", 512, GEMMA_LAYER, 4.64e9)],
)
def test_a_step_of_a_model_with_windows_has_the_floor_of_what_it_reads(
    name: str, window: int, per_position: tuple[int, int], active: float
) -> None:
    """The 18 last layers of Gemma 4 E4B keep no KV. They read that of others. The floor has neither the table
    of its layers nor the input embedding of gpt-oss, of which a step reads some rows."""
    from baton.bench.lab.engine import on_gpu
    from baton.engine import Engine
    from baton.engine.loader.families import cache_spec
    from baton.engine.loader.hf_config import model_config_from_hf

    config = model_config_from_hf(SHAPES[name], {}, name)
    engine = stand_in(Engine, model_config=config, cache_spec=cache_spec(config, torch.bfloat16))
    case = on_gpu.WINDOWED_CASE
    all_read, windowed = per_position
    for positions in (100, 1064, 128_000):
        of_request = positions * all_read + min(positions, window) * windowed
        assert on_gpu.cache_bytes_moved(engine, positions) == of_request
        weights = on_gpu.weight_bytes(engine, case, 1, None)
        assert weights == pytest.approx(2 * active, rel=0.002)
        assert on_gpu.bytes_moved(engine, case, 1, positions, None) == weights + of_request
