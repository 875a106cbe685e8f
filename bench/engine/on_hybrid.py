"""A model with state layers and random weights on a GPU: the shape of Bamba-9B or Granite-4.0-H-Tiny, in
bfloat16.

A decode step is bound by the bytes that it reads and writes: weights, KV, and the states of each request,
both ways. `.floor` is their time at the bandwidth of the datasheet. Of experts it counts as many as random
routes are expected to choose. A prefill row is the time from arrival to the first token, in chunks of 16,384
tokens, compared with the 8B Llama shape in the same run. A profile says how long each kernel takes in a step.

A prefix cache costs copies of states, for which it cuts a prompt into shorter chunks. `.cache.cold` is a
prompt that finds nothing, and `.cache.hit` one that goes on behind a cached prompt of this length. Both are
compared with the same prompt without a cache.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

import baton.bench.contract as contract
from baton.bench.contract import Report, Row
from baton.bench.engine.drive import decode_step_seconds, median_ms, prefill_seconds, prompt
from baton.bench.engine.on_cuda import CONTEXT, HBM_BYTES_PER_S, dummy_engine
from baton.bench.engine.profile import STEPS, add_profile, profiled_decodes
from baton.bench.shapes import DENSE
from baton.engine.models import cache_bytes_per_token, state_bytes_per_request

BATCHES = (1, 8, 32, 64, 128, 256)
PROFILED_BATCHES = (1, 32, 256)
PREFILLS = {2000: 5, 8000: 5, 32000: 3, 128000: 2}
"""How often each length is measured."""
CACHED, TURN = (2000, 8000), 100
"""Lengths of prompts with a prefix cache, and the tokens that the next prompt adds."""
OVER_FLOOR = 1.15
"""Goal of a decode step, in times of its floor."""
BUDGET, LONGEST = 16384, 131072


def measure(args: argparse.Namespace, report: Report) -> None:
    rounds = dict.fromkeys(CACHED, 3) if args.short else PREFILLS
    with tempfile.TemporaryDirectory() as directory:
        engine = dummy_engine(DENSE, Path(directory), 8, BUDGET, max_model_len=LONGEST)
        dense = {length: _prefill(engine, length, count) for length, count in rounds.items()}
        engine.close()
        del engine
        engine = _engine(args, directory, BATCHES[-1])
        took = {length: _prefill(engine, length, count) for length, count in rounds.items()}
        for length, alone in took.items():
            name = f"engine.hybrid.prefill.1x{length}"
            report.add(Row(name, alone, "ms", ratio=alone / dense[length], ratio_to=f"{DENSE}, same run"))
            report.add(Row(f"{name}.dense", dense[length], "ms"))
        for batch in BATCHES:
            _decode(engine, report, batch, 32 if args.short else 128)
        for batch in PROFILED_BATCHES:
            found = profiled_decodes(engine, batch, CONTEXT)
            add_profile(report, f"engine.hybrid.decode.b{batch}", found, STEPS)
        engine.close()
        del engine
        engine = _engine(args, directory, 8, prefix_caching=True)
        for length in CACHED:
            for name, ms in _cached(engine, length, rounds[length]).items():
                row = f"engine.hybrid.prefill.1x{length}.cache.{name}"
                report.add(Row(row, ms, "ms", ratio=ms / took[length], ratio_to="no cache, same run"))


def _engine(args: argparse.Namespace, directory: str, running: int, *, prefix_caching: bool = False) -> Any:
    gc.collect()
    torch.cuda.empty_cache()
    return dummy_engine(
        args.model_shape, Path(directory), running, BUDGET, max_model_len=LONGEST,
        prefix_caching=prefix_caching,
    )  # fmt: skip


def _prefill(engine: Any, tokens: int, rounds: int) -> float:
    """The median time of a prompt, in ms."""
    return median_ms([prefill_seconds(engine, [prompt(tokens, tokens + r)]) for r in range(rounds + 1)][1:])


def _cached(engine: Any, tokens: int, rounds: int) -> dict[str, float]:
    """The median times of a prompt that finds nothing in the prefix cache, and of one that continues it, in
    ms."""
    seconds: dict[str, list[float]] = {"cold": [], "hit": []}
    for number in range(rounds + 1):
        ids = prompt(tokens + TURN, tokens + number)
        seconds["cold"].append(prefill_seconds(engine, [ids[:tokens]]))
        seconds["hit"].append(prefill_seconds(engine, [ids]))
    return {name: median_ms(series[1:]) for name, series in seconds.items()}


def _decode(engine: Any, report: Report, batch: int, steps: int) -> None:
    times = decode_step_seconds(engine, batch, CONTEXT, steps)
    took, name = median_ms(times), f"engine.hybrid.decode.b{batch}"
    moved = bytes_moved(engine, batch, CONTEXT)
    floor = moved / HBM_BYTES_PER_S * 1e3
    p99 = contract.percentile(times, 0.99) * 1e3
    report.add(Row(name, took, "ms", p99=p99, goal=OVER_FLOOR * floor, better="lower"))
    report.add(Row(f"{name}.floor", floor, "ms", ratio=took / floor, ratio_to="4.8 TB/s"))
    rate = moved / (took / 1e3)
    report.add(Row(f"{name}.bytes", rate / 1e9, "GB/s", ratio=rate / HBM_BYTES_PER_S, ratio_to="4.8 TB/s"))


def bytes_moved(engine: Any, batch: int, context: int) -> float:
    """Bytes that a decode step reads and writes."""
    config, cache = engine.model_config, engine.cache_spec
    input_embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    of_request = context * cache_bytes_per_token(cache) + 2 * state_bytes_per_request(cache)
    return 2 * (config.parameters_read(batch) - input_embedding) + batch * of_request
