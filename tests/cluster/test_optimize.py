"""What `--optimize` and the memory of the GPU choose, how it reaches the engine, and what the worker logs."""

import logging
from typing import Any

import pytest
from typer.testing import CliRunner

import baton.cluster.serve
import baton.worker.service_process.service
from baton.cluster.cli import app
from baton.cluster.gpus import gpu_gib
from baton.cluster.options.engine import EngineOptions, Optimize
from baton.cluster.options.optimize import choose, host_cache
from baton.cluster.supervision.blueprint import Blueprint
from baton.engine import EngineConfig
from baton.worker import WorkerConfig


@pytest.mark.parametrize(
    ("optimize", "device", "gib", "expected"),
    [
        ("latency", "cpu", None, (32, 2048, 1.75)),
        ("balanced", "cpu", None, (64, 2048, 3.5)),
        ("throughput", "cpu", None, (64, 2048, 6.0)),
        ("balanced", "cpu", 141.0, (64, 2048, 3.5)),
        ("balanced", "cuda", 24.0, (64, 2048, 3.5)),
        ("balanced", "cuda", None, (64, 2048, 3.5)),
        ("latency", "cuda:1", 79.6, (128, 8192, 1.75)),
        ("balanced", "cuda", 70.0, (256, 8192, 3.5)),
        ("throughput", "cuda", 79.6, (256, 8192, 6.0)),
        ("latency", "cuda", 140.4, (128, 8192, 1.75)),
        ("balanced", "cuda", 140.4, (256, 8192, 3.5)),
        ("throughput", "cuda", 140.4, (512, 8192, 6.0)),
    ],
)
def test_defaults_follow_the_profile_and_the_memory(
    optimize: Optimize, device: str, gib: float | None, expected: tuple[int, int, float]
) -> None:
    assert choose(EngineOptions(optimize=optimize), device, gib)[:3] == expected


def test_an_engine_alone_is_balanced() -> None:
    chosen = choose(EngineOptions(), "cpu", None)
    config = EngineConfig("model")
    assert chosen[:3] == (config.max_num_seqs, config.max_num_batched_tokens, config.itl_target_steps)


@pytest.mark.parametrize(
    ("given", "device", "gib", "summary"),
    [
        (
            EngineOptions(),
            "cuda",
            140.4,
            "optimize balanced, GPU of 140 GiB: --max-num-seqs 256, --max-num-batched-tokens 8192, "
            "gap target 3.5 times the fastest step",
        ),
        (
            EngineOptions(
                optimize="throughput", max_num_seqs=100, max_num_batched_tokens=512, itl_target=20.0
            ),
            "cuda",
            None,
            "optimize throughput, GPU of unknown memory: --max-num-seqs 100 (given), "
            "--max-num-batched-tokens 512 (given), gap target 20 ms (given)",
        ),
        (
            EngineOptions(optimize="latency", max_num_batched_tokens=512),
            "cpu",
            None,
            "optimize latency, CPU: --max-num-seqs 32, --max-num-batched-tokens 512 (given), "
            "gap target 1.75 times the fastest step",
        ),
    ],
)
def test_the_summary_says_what_was_chosen_and_what_was_given(
    given: EngineOptions, device: str, gib: float | None, summary: str
) -> None:
    chosen = choose(given, device, gib)
    assert chosen.summary == summary
    assert chosen.max_num_seqs == given.max_num_seqs or given.max_num_seqs is None
    assert chosen.max_num_batched_tokens == given.max_num_batched_tokens or not given.max_num_batched_tokens


@pytest.mark.parametrize(
    ("lines", "expected"),
    [(["143771"], 140.4), (["81559", " 24564"], 24.0), (["[N/A]"], None), ([], None), (None, None)],
)
def test_the_smallest_gpu_counts(
    lines: list[str] | None,
    expected: float | None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr("baton.cluster.gpus.nvidia_smi", lambda *_: lines)
    gpu_gib.cache_clear()
    request.addfinalizer(gpu_gib.cache_clear)
    assert gpu_gib() == (expected and pytest.approx(expected, abs=0.05))


def run_baton(*args: str) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_choice_reaches_the_engine_and_the_log(
    role: str, started: list[WorkerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the worker is told directly or by `baton serve`."""
    blueprints: list[Blueprint] = []
    monkeypatch.setattr(baton.cluster.serve, "run", lambda blueprint: blueprints.append(blueprint) or 0)
    flags = ("--device", "cpu", "--optimize", "latency", "--max-num-batched-tokens", "512")
    run_baton("serve", *flags)
    run_baton(role, *flags)
    run_baton(role, *blueprints[0].roles()[0].args)
    for config in started:
        engine = config.engine
        assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (32, 512)
        assert engine.itl_target_steps == 1.75
        assert engine.itl_target is None
        assert config.settings is not None
        assert config.settings.startswith("optimize latency, CPU: --max-num-seqs 32, ")
    run_baton(role, *flags, "--itl-target", "20")
    assert started[-1].engine.itl_target == 0.02
    assert len(started) == 3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--host", "0.0.0.0"), ("127.0.0.1",)),
        (("--host", "10.0.0.7"), ()),
        (("--host", "0.0.0.0", "--advanced.kv-host", "10.0.0.7, 10.1.0.7"), ("10.0.0.7", "10.1.0.7")),
    ],
)
def test_the_card_near_the_gpu_has_kv_of_a_worker_on_all_addresses(
    flags: tuple[str, ...], expected: tuple[str, ...], started: list[WorkerConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("baton.cluster.kv_card.card_near", lambda _: "lo")
    run_baton("prefill", "--device", "cpu", *flags)
    assert started[0].kv_addresses() == expected
    assert started[0].settings is not None
    assert ("kv-host lo" in started[0].settings) == (expected == ("127.0.0.1",))


def test_a_worker_logs_its_settings_at_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("stop here")

    monkeypatch.setattr(baton.worker.service_process.service, "Service", refuse)
    monkeypatch.setattr("setproctitle.setproctitle", lambda title: None)
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    config = WorkerConfig(
        role="decode", engine_module="engine", engine=EngineConfig("model"), secret=b"s" * 32,
        settings="optimize balanced, CPU: …",
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "baton.worker.service_process.service"):
        assert baton.worker.service_process.service.run(config) == 1
    assert caplog.messages == ["optimize balanced, CPU: …", "stop here"]


@pytest.mark.parametrize(
    ("given", "device", "gpus", "gib"),
    [
        (EngineOptions(), "cuda", 4, 16.0),
        (EngineOptions(tensor_parallel_size=2), "cuda", 4, 32.0),
        (EngineOptions(tensor_parallel_size=2), "cuda", 0, 64.0),
        (EngineOptions(), "cuda", 65, 0.0),  # too little
        (EngineOptions(host_cache_size="3GiB"), "cuda", 4, 3.0),
        (EngineOptions(host_cache_size="3GiB"), "cpu", 0, 3.0),
        (EngineOptions(host_cache_size="0"), "cuda", 4, 0.0),
        (EngineOptions(), "cpu", 0, 0.0),
        (EngineOptions(enable_prefix_caching=False), "cuda", 4, 0.0),
        (EngineOptions(engine="vllm"), "cuda", 4, 0.0),
    ],
)
def test_the_workers_of_a_host_share_a_quarter_of_the_memory_that_it_has_left(
    given: EngineOptions, device: str, gpus: int, gib: float
) -> None:
    assert host_cache(given, device, gpus, available=256 << 30) == gib * (1 << 30)
