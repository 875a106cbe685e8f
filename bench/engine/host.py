"""What a step that only decodes costs the host: schedule, batch, draws, outputs, for a device that takes no
time. A step is launched while the one before is under way, as on a GPU; launches themselves are not in it."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import bench.contract as contract
from bench.contract import Report, Row
from bench.engine.drive import greedy, prompt
from engine import Engine, EngineConfig

CONTEXT = 1000
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "eos_token_id": 0,
}


class _Moment:
    """Passed once somebody has waited for it."""

    def __init__(self) -> None:
        self._passed = False

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        self._passed = True

    def elapsed_time(self, later: object) -> float:
        return 1.0


def measure(report: Report, *, steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPE))
        for batch in (1, 64, 256):
            seconds = _steps(_engine(directory, batch), batch, steps)
            report.add(
                Row(
                    f"engine.cpu.host.b{batch}", 1e3 * contract.percentile(seconds, 0.5), "ms",
                    p99=1e3 * contract.percentile(seconds, 0.99),
                )
            )  # fmt: skip


def _engine(directory: str, batch: int) -> Any:
    engine: Any = Engine(
        EngineConfig(
            directory, load_format="dummy", dtype="float32", device="cpu", overlap=True, block_size=128,
            num_blocks=16 * batch + 4, max_num_seqs=batch, max_num_batched_tokens=8192,
        )
    )  # fmt: skip
    runner, tokens = engine._runner, torch.full((batch,), 7)

    def run(step: Any, layer_done: Any) -> Any:
        rows = len(step.sampled)
        draws_of(step.sampled, SHAPE["vocab_size"])
        return Sampling(tokens[:rows].clone() if rows else None)

    from engine.model_runner import Sampling
    from engine.sampler import draws_of

    runner.run, runner.table_width = run, 16
    engine._moment = _Moment
    engine._landings.expect = lambda flight: None
    return engine


def _steps(engine: Any, batch: int, steps: int) -> list[float]:
    """Of this thread, whoever else uses the machine."""
    for number in range(batch):
        engine.add(greedy(prompt(CONTEXT, number), 900))
    while engine.stats().tokens_waiting:
        engine.step()
    seconds: list[float] = []
    for _ in range(steps):
        began, outputs = time.thread_time(), 0
        while not outputs:  # a launch only
            outputs = len(engine.step().outputs)
        seconds.append(time.thread_time() - began)
        assert outputs == batch or len(seconds) < 3
    return seconds[steps // 10 :]
