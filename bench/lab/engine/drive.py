"""Work for an engine that the bench steps by itself, without a worker or a socket."""

import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from baton.bench.report import Report
from baton.cluster.tools.sizing import ENCODE_TOKEN_SECONDS, STEP_MODEL
from baton.engine import EngineRequest, SamplingParams


def greedy(prompt_ids: Sequence[int], max_tokens: int, **sampling: Any) -> EngineRequest:
    """A greedy request that ignores the end-of-sequence token. Its prompt is late from the start, so only the
    gap target bounds its chunks beside decodes."""
    return EngineRequest(
        os.urandom(16),
        list(prompt_ids),
        [],
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling),
        first_token_within=0.0,
    )


def prompt(length: int, seed: int) -> list[int]:
    """Token ids without special tokens. Two seeds share no prefix."""
    return random.Random(seed).choices(range(100, 40_000), k=length)


def drain(engine: Any) -> int:
    """Steps until the engine has no work. Returns the number of output tokens."""
    tokens = 0
    while engine.loop.has_work:
        tokens += len(engine.loop.step().outputs)
    return tokens


def answers(engine: Any, requests: Sequence[EngineRequest]) -> list[list[int]]:
    """The output tokens of each request."""
    tokens: dict[bytes, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.loop.has_work:
        for output in engine.loop.step().outputs:
            tokens[output.id].append(output.token)
    return list(tokens.values())


def prefill_seconds(engine: Any, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds from the arrival of the requests to the last first token."""
    began = time.perf_counter()
    for ids in prompts:
        engine.add(greedy(ids, 1))
    drain(engine)
    return time.perf_counter() - began


def fill(engine: Any, batch: int, prompt_tokens: int, output_tokens: int, **sampling: Any) -> None:
    """Steps until `batch` new requests decode."""
    for number in range(batch):
        engine.add(greedy(prompt(prompt_tokens, 1000 * batch + number), output_tokens, **sampling))
    while engine.stats().tokens_waiting:
        engine.loop.step()


def predicted_steps(engine: Any, requests: int, longest: int, output_tokens: int) -> list[float]:
    """Expected seconds ÷ seconds of each step while requests come one after another, with prompts of 1 to
    `longest` tokens, and decode beside each other. The model of steps is that before the step."""
    meters, rng, ratios = engine.meters, random.Random(requests), list[float]()
    record = meters.record

    def compare(decodes: int, prompt_tokens: int, seconds: float, position: float, context: float) -> None:
        if (model := meters.model) is not None:
            first = position - prompt_tokens / 2
            ratios.append(model.step(decodes, context, prompt_tokens, first) / seconds)
        record(decodes, prompt_tokens, seconds, position, context)

    meters.record = compare
    for number in range(requests):
        engine.add(greedy(prompt(rng.randint(1, longest), -1 - number), rng.randint(1, output_tokens)))
        for _ in range(rng.randint(0, 4)):
            engine.loop.step()
    drain(engine)
    del meters.record
    return ratios


def add_predicted(report: Report, name: str, ratios: Sequence[float]) -> None:
    """The median of expected ÷ measured seconds, and how far a step is off, as a share."""
    report.add_median(f"{name}.predicted", ratios, "expected ÷ measured")
    report.add_median(f"{name}.predicted.error", [abs(ratio - 1) for ratio in ratios], "of a step")


def add_step_model(report: Report, engine: Any) -> None:
    """What the engine measured when it started, for `baton plan --measured`."""
    if (measured := engine.meters.steps.measured) is not None:
        report.detail[STEP_MODEL] = asdict(measured)
        if engine.encoder is not None:
            report.detail[ENCODE_TOKEN_SECONDS] = engine.encoder.turns.token_seconds
        report.write()


def decode_step_seconds(engine: Any, batch: int, context: int, steps: int, **sampling: Any) -> list[float]:
    """Seconds of each of `steps` steps in which `batch` requests decode with about `context` tokens each.

    Measured from step to step, as a client sees it. Steps while the batch fills or empties do not count.
    """
    margin = 8
    fill(engine, batch, context - steps // 2, steps + 2 * margin, **sampling)
    gaps = step_gaps(engine, batch, steps, margin)
    drain(engine)
    assert len(gaps) > steps // 2, f"only {len(gaps)} of {steps} steps were full"
    return gaps


def steady(engine: Any, batch: int, context: int, steps: int, answer: int) -> tuple[float, float]:
    """Tokens/s while `batch` requests with prompts of `context` tokens decode, and the mean seconds from step
    to step. `answer`: their output tokens, more than so many steps give. They are cancelled at the end."""
    fill(engine, batch, context, answer)
    for _ in range(12):
        engine.loop.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    tokens, count, began = 0, 0, time.perf_counter()
    while count < steps:
        done = engine.loop.step()
        count += done.seconds > 0
        tokens += len(done.outputs)
    seconds = time.perf_counter() - began
    for live in list(engine.lives):
        engine.cancel(live)
    drain(engine)
    return tokens / seconds, seconds / steps


def step_gaps(engine: Any, batch: int, steps: int, margin: int) -> list[float]:
    """Seconds from step to step, of `steps` after `margin` others, in which all requests decode."""
    gaps: list[float] = []
    last = time.perf_counter()
    for number in range(margin + steps):
        done = engine.loop.step()
        while not done.seconds:  # the step was only launched
            done = engine.loop.step()
        now = time.perf_counter()
        if len(done.outputs) == batch and number >= margin:
            gaps.append(now - last)
        last = now
    return gaps
