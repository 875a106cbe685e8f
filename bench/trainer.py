"""A trainer gives its weights to a cluster: `bench.weights --trainer`.

This process is the trainer. It has the weights of a shape as tensors, on its own GPU if there are two. A
prefill and a decode worker compute in the exact mode. Streams run while weights change:

    by shm             requests are computed again
    by cuda, or memfd  twice; requests keep their KV. The tensors stay on the trainer's GPU

All prompts are sent again after each change.

    different          tokens of these answers that differ from those of a cluster that starts with them
    MEMORY.gap         the longest gap of a stream that runs meanwhile
    MEMORY.update      seconds of the trainer's call
"""

import argparse
import asyncio
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from baton.bench.contract import Report, Row
from baton.bench.harness.cluster import LocalCluster, leaks_when_idle
from baton.bench.harness.streams import Case, Stream, Verdict, expected, judge, new_session, read, until
from baton.bench.load.target.tokenization import WORDS, Composer, Segment, Tokenization
from baton.bench.shapes import DENSE, SHAPES, write_shape
from baton.cluster.gpus import visible_gpus
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Checkpoint, DeclaredWeights, PlainFormat
from baton.engine.loader.families import model_class
from baton.engine.loader.hf import DummyCheckpoint
from baton.engine.loader.hf_config import read_config
from baton.weights import Memory, Weights

STREAMS, AT_ONCE = 8, 48
ANSWER = {"cpu": 32, "cuda": 250}
LONG_ANSWER = {"cpu": 600, "cuda": 6000}
"""Of the streams that run while weights change."""
BEGUN = 4
"""Tokens that each of them has then."""
SMALL = "llama-small"
SHAPES[SMALL] = SHAPES[DENSE] | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048,
}  # fmt: skip
ADMIN_KEY = "trainer"
GOALS = {"shm": 3.0, "cuda": 0.5}
"""Seconds of the longest gap, on an H200."""


class _Shapes(DeclaredWeights):
    """The names and shapes that a model asks for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, PlainFormat())
        self.found: dict[str, list[int]] = {}

    def _declare(self, name: str, parts: Sequence[Shard]) -> None:
        self.found[name] = [part.size for part in parts]
        super()._declare(name, parts)


def state_of(model: Path, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of workers with `--load-format dummy` and this seed, on the same kind of device."""
    config = read_config(model)
    dummy = DummyCheckpoint(config, str(model), seed, device)
    shapes = _Shapes(dummy)
    model_class(config, str(model))(replace(config, max_model_len=1), shapes)
    return {
        name: dummy.read(name, [unsharded(size) for size in shape]).to(dtype)
        for name, shape in shapes.found.items()
    }


def cases_for(tokens: int, device: str) -> list[Case]:
    compose = Composer(Tokenization(WORDS, 1.0, 0, "one token a word")).compose
    answer, step = ANSWER[device], 7 if device == "cuda" else 1
    count = -(-tokens // answer)
    prompts = [compose([Segment((0, i), 60 + step * (i % 200))]) for i in range(count)]
    return [Case(prompt, answer, 0.8 * (i % 2), seed=i + 1) for i, prompt in enumerate(prompts)]


@contextmanager
def started(directory: Path, model: Path, device: str, *flags: str) -> Iterator[LocalCluster]:
    directory.mkdir()
    name, gpus = ("--model", str(model)), len(visible_gpus()) if device == "cuda" else 0
    common = [*name, "--load-format", "dummy", "--batch-invariant", "--max-model-len", "8192", *flags]
    if device == "cuda":
        share = "0.3" if gpus == 1 else "0.55"
        common += ["--dtype", "bfloat16", "--gpu-memory-utilization", share]
    else:
        common += ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--num-blocks", "3000"]
    devices = [f"cuda:{i % gpus}" for i in range(2)] if gpus else []
    router = (*name, "--admin-key", ADMIN_KEY)
    with LocalCluster(
        directory, prefill=1, decode=1, worker_flags=common, router_flags=router, devices=devices
    ) as cluster:
        yield cluster


async def change(
    cluster: LocalCluster, asked: Sequence[Case], weights: Weights, state: dict[str, Tensor], *, keep_kv: bool
) -> tuple[list[Stream], float, float]:
    """Returns the streams that ran meanwhile, their longest gap, and the seconds of the call."""
    device = "cuda" if next(iter(state.values())).is_cuda else "cpu"
    streams = [Stream(replace(case, max_tokens=LONG_ANSWER[device])) for case in asked[:STREAMS]]
    async with new_session() as http:
        reading = [asyncio.create_task(read(http, cluster.url, s.case, into=s)) for s in streams]
        await until(lambda: all(len(stream.token_ids) >= BEGUN for stream in streams), reading)
        began = time.monotonic()
        await asyncio.to_thread(weights.update, state, keep_kv=keep_kv)
        seconds = time.monotonic() - began
        await asyncio.gather(*reading)
    ran_on = [stream for stream in streams if stream.arrivals and stream.arrivals[-1] > began + seconds]
    assert ran_on, "all streams have ended before the weights changed: make answers longer"
    gaps = (b - a for stream in streams for a, b in pairwise(stream.arrivals) if b > began)
    return streams, max(gaps, default=0.0), seconds


async def answers(cluster: LocalCluster, asked: Sequence[Case]) -> list[Stream]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with new_session() as http:

        async def one(case: Case) -> Stream:
            async with gate:
                return await read(http, cluster.url, case)

        return await asyncio.gather(*map(one, asked))


def measure(args: argparse.Namespace, report: Report) -> None:
    device, tokens = args.device, args.tokens
    own = torch.device("cuda", len(visible_gpus()) - 1) if device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    direct: Memory = "cuda" if device == "cuda" else "memfd"
    asked, verdicts, running = cases_for(tokens, device), list[Verdict](), list[Stream]()
    with tempfile.TemporaryDirectory(prefix="baton-trainer-") as name:
        directory = Path(name)
        model = write_shape(DENSE if device == "cuda" else SMALL, directory, tokenizer=True)
        with started(
            directory / "fresh", model, device, "--seed", "2", "--no-enable-prefix-caching"
        ) as fresh:
            second = asyncio.run(expected(fresh.url, asked, AT_ONCE))
        with started(directory / "changes", model, device, "--seed", "1") as cluster:
            first = asyncio.run(expected(cluster.url, asked, AT_ONCE))
            assert first != second, "the weights differ"
            for seed, memory, right in ((2, "shm", second), (1, direct, first), (2, direct, second)):
                state = state_of(model, seed, own, dtype)
                with Weights(cluster.url, ADMIN_KEY, model, memory=memory, later=None) as weights:
                    streams, gap, seconds = asyncio.run(
                        change(cluster, asked, weights, state, keep_kv=memory == direct)
                    )
                    verdicts.append(judge(asyncio.run(answers(cluster, asked)), right))
                running += streams
                label = f"weights.{device}.trainer.{memory}"
                last = seed == 2  # of two by the same memory, the second one: the first one starts CUDA IPC
                if memory == "shm" or last:
                    report.add(
                        Row(f"{label}.gap", gap, "s", goal=GOALS.get(memory) if device == "cuda" else None)
                    )
                    report.add(Row(f"{label}.update", seconds, "s"))
                del state
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
            leaks = leaks_when_idle(cluster.url)
    report.detail = {"leaks": leaks, "tokens": len(asked) * ANSWER[device]}
    failed = sum(stream.failed for stream in running) + sum(each.failed for each in verdicts)
    different = sum(each.different + each.lost_or_repeated for each in verdicts)
    report.add(Row(f"weights.{device}.trainer.different", different, "tokens", goal=0))
    report.add(Row(f"weights.{device}.trainer.failed", failed, "answers", goal=0))
    report.add(
        Row(f"weights.{device}.trainer.leaked", sum(leaks.values()), "blocks, slots, attempts", goal=0)
    )
