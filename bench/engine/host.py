"""What a decode step costs the host, with a device that takes no time: schedule, batch, sampling, outputs.

The engine launches a step while the one before runs, as on a GPU. The launches themselves are not included.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import baton.bench.contract as contract
from baton.bench.contract import Report, Row
from baton.bench.engine.drive import greedy, prompt
from baton.bench.shapes import write_shape
from baton.engine import EngineConfig, build_engine
from baton.engine.execution.runner import Launched

CONTEXT = 1000
MODEL = "one-small-layer"


class _Event:
    """A fake CUDA event. It has happened once the engine has waited for it."""

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
        model = write_shape(MODEL, Path(directory))
        for batch in (1, 64, 256):
            seconds = _steps(_engine(model, batch), batch, steps)
            report.add(
                Row(
                    f"engine.cpu.host.b{batch}", 1e3 * contract.percentile(seconds, 0.5), "ms",
                    p99=1e3 * contract.percentile(seconds, 0.99),
                )
            )  # fmt: skip


def _engine(model: Path, batch: int) -> Any:
    engine: Any = build_engine(
        EngineConfig(
            str(model), load_format="dummy", dtype="float32", device="cpu", overlap=True, block_size=128,
            num_blocks=16 * batch + 4, max_num_seqs=batch, max_num_batched_tokens=8192,
            ttit_target=60.0,  # no limit on the chunks of prompts beside decodes
        )
    )  # fmt: skip
    runner, tokens = engine._runner, torch.full((batch,), 7)

    def run(step: Any, layer_done: Any) -> Launched:
        return Launched(len(step.sampled_rows), step.variant, None, None, None, _Event())

    def sample(launched: Launched, adjustments: Any) -> _Event:
        launched.tokens, ended = tokens[: launched.rows], _Event()
        launched.ended = ended
        return ended

    runner.run, runner.sample, runner.table_width = run, sample, 16
    engine._steps._landings.expect = lambda event: None
    return engine


def _steps(engine: Any, batch: int, steps: int) -> list[float]:
    """CPU seconds of this thread for each step, so that other processes matter less."""
    for number in range(batch):
        engine.add(greedy(prompt(CONTEXT, number), 900))
    while engine.stats().tokens_waiting:
        engine.step()
    seconds: list[float] = []
    for _ in range(steps):
        began, outputs = time.thread_time(), 0
        while not outputs:  # the step was only launched
            outputs = len(engine.step().outputs)
        seconds.append(time.thread_time() - began)
        assert outputs == batch or len(seconds) < 3
    return seconds[steps // 10 :]
