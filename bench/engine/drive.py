"""Work for an engine that a bench drives by itself: no worker around it, no socket."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from engine import EngineRequest, SamplingParams


def greedy(prompt_ids: Sequence[int], max_tokens: int, **sampling: Any) -> EngineRequest:
    """A request that runs to its full length."""
    return EngineRequest(
        os.urandom(16),
        list(prompt_ids),
        [],
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling),
    )


def prompt(length: int, seed: int) -> list[int]:
    """Ordinary token ids; two seeds share no prefix."""
    return random.Random(seed).choices(range(100, 40_000), k=length)


def drain(engine: Any) -> int:
    """Steps until nothing is left to compute. Returns the tokens that came out."""
    tokens = 0
    while engine.has_work:
        tokens += len(engine.step().outputs)
    return tokens


def prefill_seconds(engine: Any, prompts: Sequence[Sequence[int]]) -> float:
    """From the requests' arrival to the last of their first tokens."""
    began = time.perf_counter()
    for ids in prompts:
        engine.add(greedy(ids, 1))
    drain(engine)
    return time.perf_counter() - began


def decode_step_seconds(engine: Any, batch: int, context: int, steps: int, **sampling: Any) -> list[float]:
    """Time of each of `steps` steps in which `batch` requests decode around `context` tokens.

    Measured from step to step, as a client sees it. The first and last steps, when the batch fills and
    empties, do not count.
    """
    margin = 8
    for number in range(batch):
        ids = prompt(context - steps // 2, 1000 * batch + number)
        engine.add(greedy(ids, steps + 2 * margin, **sampling))
    while engine.stats().tokens_waiting:
        engine.step()
    gaps: list[float] = []
    last = time.perf_counter()
    for number in range(margin + steps):
        done = engine.step()
        while not done.seconds:  # a launch only
            done = engine.step()
        now = time.perf_counter()
        if len(done.outputs) == batch and number >= margin:
            gaps.append(now - last)
        last = now
    drain(engine)
    assert len(gaps) > steps // 2, f"only {len(gaps)} of {steps} steps were full"
    return gaps


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3
