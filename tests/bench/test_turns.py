"""Seconds of a turn by cause, from the trace of its worker (long: `test_smoke` runs the bench)."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.bench.lab.turns import CAUSES, read, rows, turns_of
from baton.kv_transfer import TraceWriter
from baton.steps.step_model import StepModel

MODEL = StepModel((1,), (0.01,), 0.0, (1, 100), (0.001, 0.1), 0.0, 1.0)
"""A prompt token takes 1 ms."""
Steps = list[tuple[float, float, list[str]]]


def write_trace(path: Path, instants: Mapping[str, float], steps: Steps) -> None:
    """Of one prompt, "ab", and of steps: times and prompts, of which each computes 10 tokens."""
    trace = TraceWriter(path, "prefill 0")
    for start, end, prompts in steps:
        trace.span("step", start, end, decodes=1, prompts=[(name, 50, 60) for name in prompts])
    trace.span("queued", instants["accepted"], instants["added"], request="ab")
    for name in ("taken", "added"):
        trace.span(name, instants[name], instants[name], attempt="ab")
    trace.span("first token", instants["token"], instants["token"], prefill="ab", request="run-0-1")
    trace.close()


def test_each_second_of_a_turn_has_one_cause(tmp_path: Path) -> None:
    instants = {"accepted": 10.01, "taken": 10.04, "added": 10.06, "token": 10.20}
    steps = [
        (9.90, 10.03, []),  # under way
        (10.05, 10.07, []),
        (10.07, 10.10, ["cd"]),
        (10.10, 10.13, []),
        (10.13, 10.15, ["ab", "cd"]),
        (10.15, 10.17, []),
        (10.17, 10.20, ["ab"]),
    ]
    write_trace(tmp_path / "prefill-0-engine.trace", instants, steps)
    record = {"turn": 1, "name": "run-0-1", "sent": 3.0, "arrivals": [3.205, 3.3]}
    counts = {"prompt_tokens": 70, "cached_tokens": 50}
    of_others = {"turn": 0, "name": "run-0-0", "sent": 1.0, "arrivals": []}, record | {"name": "lost"}
    [turn] = turns_of(
        [read(tmp_path / "prefill-0-engine.trace")], {"prefill-0": MODEL}, {"run-0-1": (0.002, 0.2)},
        [record | counts, *of_others], began=7.0,
    )  # fmt: skip
    expected = {
        "router": 0.01 - 0.002 + 0.01,  # to the worker, and from the end of the step to the next message
        "admission": 0.002,
        "prefix": 0.02,
        "steps": 0.02 + 0.01 + 0.03,
        "queue": 0.03,
        "computing": 0.02,
        "beside": 0.07 - 0.02,
        "answer": 0.005,
    }
    assert {cause: turn[cause] for cause in CAUSES} == pytest.approx(expected)
    assert sum(expected.values()) == pytest.approx(turn["ttft"])
    assert turn["client"] == pytest.approx(0.005)
    assert (turn["worker"], turn["tokens"]) == ("prefill-0", 20)
    shares = {row.name: row.value for row in rows("turns", [turn])}
    assert sum(shares[f"turns.{cause}.share"] for cause in CAUSES) == pytest.approx(1.0)
    assert shares["turns.on.prefill-0"] == 1.0


def test_without_a_model_of_steps_all_is_computing(tmp_path: Path) -> None:
    instants = {"accepted": 10.0, "taken": 10.0, "added": 10.0, "token": 10.1}
    write_trace(tmp_path / "decode-1-engine.trace", instants, [(10.0, 10.1, ["ab"])])
    record = {"turn": 2, "name": "run-0-1", "sent": 0.0, "arrivals": [0.1]}
    counts = {"prompt_tokens": 9, "cached_tokens": 0}
    worker = read(tmp_path / "decode-1-engine.trace")
    [turn] = turns_of([worker], {"decode-1": None}, {"run-0-1": (0.0, 0.1)}, [record | counts], began=10.0)
    assert turn["computing"] == pytest.approx(0.1)
