"""A trainer gives its weights to a cluster: `bench.weights --trainer`.

This process is the trainer. It has the weights of a shape as tensors, on its own GPU if there are two. A
prefill and a decode worker compute in the exact mode. Streams run while weights change:

    by shm             twice; requests are computed again
    by cuda, or memfd  twice; requests keep their KV. The tensors stay on the trainer's GPU

All prompts are sent again after each change. On GPUs all is done in bfloat16, and with `--quantization fp8`
(names with `.fp8`) once by each memory. `--kind` chooses one.

    different          tokens of these answers that differ from those of a cluster that starts with them
    MEMORY.gap         the longest gap of a stream that runs meanwhile. `.first`: of the first of two changes
    MEMORY.update      seconds of the trainer's call. Parts of it: `.write` by the trainer, `.read` by workers
                       beside their steps, and the `.pause`
    memory             of GPUs, taken at most during a change and not before the changes; ÷ weights. What the
                       first change takes stays for the next ones
"""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.bench.lab.driver import Run
from baton.bench.lab.harness.changes import beside, tell
from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle, served
from baton.bench.lab.harness.streams import Case, Stream, Verdict, answers, expected, judge, worded
from baton.bench.lab.shapes import DENSE, SHAPES
from baton.bench.load.target.tokenization import Segment
from baton.bench.report import Row
from baton.cluster.gpus import visible_gpus
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Checkpoint, DeclaredWeights, PlainFormat
from baton.engine.loader.families import model_class
from baton.engine.loader.hf import DummyCheckpoint
from baton.engine.loader.hf_config import read_config
from baton.weights import Memory, Spent, Weights

STREAMS, AT_ONCE = 8, 48
ANSWER = {"cpu": 32, "cuda": 250}
LONG_ANSWER = {"cpu": 6000, "cuda": 7000}
"""Tokens, at most, of the streams that run while weights change."""
MEMORY_LOOK_S = 0.005
KINDS = {"cpu": ("float32",), "cuda": ("bf16", "fp8")}
"""What workers compute with; the first one is that of the tensors."""
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
        self.sizes: dict[str, list[int]] = {}

    def _declare(self, name: str, parts: Sequence[Shard]) -> None:
        self.sizes[name] = [part.size for part in parts]
        super()._declare(name, parts)


def state_of(model: Path, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of workers with `--load-format dummy` and this seed, on the same kind of device."""
    config = read_config(model)
    dummy = DummyCheckpoint(config, str(model), seed, device)
    shapes = _Shapes(dummy)
    model_class(config, str(model))(replace(config, max_model_len=1), shapes)
    return {
        name: dummy.read(name, [unsharded(size) for size in shape]).to(dtype)
        for name, shape in shapes.sizes.items()
    }


def cases_for(tokens: int, device: str) -> list[Case]:
    answer, step = ANSWER[device], 7 if device == "cuda" else 1
    return worded(([Segment((0, i), 60 + step * (i % 200))] for i in range(-(-tokens // answer))), answer)


class _DeviceMemory:
    """Looks at how much memory the GPUs have left. CPUs have none."""

    def __init__(self, device: str) -> None:
        self._gpus = range(torch.cuda.device_count()) if device == "cuda" else range(0)
        self._before: list[int] | None = None
        self._lowest = list[int]()
        self._end = threading.Event()

    @property
    def beyond(self) -> int:
        """Bytes of all GPUs, taken at most beyond those that were when it was first looked at."""
        return sum(before - lowest for before, lowest in zip(self._before or (), self._lowest, strict=True))

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        if self._before is None:
            self._before = self._lowest = self._free()
        self._end.clear()
        thread = threading.Thread(target=self._look, name="device memory", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _free(self) -> list[int]:
        return [torch.cuda.mem_get_info(gpu)[0] for gpu in self._gpus]

    def _look(self) -> None:
        while not self._end.wait(MEMORY_LOOK_S):
            self._lowest = [min(pair) for pair in zip(self._lowest, self._free(), strict=True)]


@dataclass(slots=True)
class Change:
    streams: list[Stream]
    """They ran meanwhile."""
    gap: float
    """Seconds, the longest of them."""
    seconds: float
    """Of the trainer's call."""
    spent: Spent


async def change(
    cluster: LocalCluster,
    cases: Sequence[Case],
    weights: Weights,
    state: dict[str, Tensor],
    memory: _DeviceMemory,
    *,
    keep_kv: bool,
) -> Change:
    async def update() -> float:
        with memory.looked_at():
            began = time.monotonic()
            await asyncio.to_thread(weights.update, state, keep_kv=keep_kv)
            return time.monotonic() - began

    longest = LONG_ANSWER["cuda" if next(iter(state.values())).is_cuda else "cpu"]
    seconds, streams, gap = await beside(cluster.url, cases[:STREAMS], longest, update)
    return Change(streams, gap, seconds, weights.spent)


def measure(run: Run) -> None:
    for kind in [run.args.kind] if run.args.kind else KINDS[run.device]:
        _measure(kind, run)


def _measure(kind: str, run: Run) -> None:
    gpus, shape = len(visible_gpus()) if run.on_gpus else 0, DENSE if run.on_gpus else SMALL
    target = torch.device("cuda", gpus - 1) if run.on_gpus else torch.device("cpu")
    dtype = torch.bfloat16 if run.on_gpus else torch.float32
    direct: Memory = "cuda" if run.on_gpus else "memfd"
    plain = kind == KINDS[run.device][0]
    label = f"weights.{run.device}.trainer" + ("" if plain else f".{kind}")
    flags = ("--batch-invariant", "--max-model-len", "8192")
    flags += () if kind != "fp8" else ("--quantization", "fp8")
    share = "0.3" if gpus == 1 else "0.55"
    serving = partial(
        served, run, *flags, shape=shape, router_flags=("--advanced.admin-key", ADMIN_KEY),
        on_cpu=("--dtype", "float32", "--advanced.num-blocks", "3000"),
        on_gpus=("--dtype", "bfloat16", "--gpu-memory-utilization", share),
    )  # fmt: skip
    # Of two by the same memory the second one has what the first one took, and CUDA IPC.
    changes: list[tuple[int, Memory]] = [(2, "shm"), (1, "shm"), (2, direct), (1, direct)]
    changes = changes if plain else [changes[0], changes[-1]]
    requests, right = cases_for(run.args.tokens, run.device), dict[int, dict[Case, list[int]]]()
    verdicts, results, memories = list[Verdict](), list[Change](), _DeviceMemory(run.device)
    with serving("--advanced.seed", "2", "--no-enable-prefix-caching", name=f"{kind}-fresh") as fresh:
        right[2] = asyncio.run(expected(fresh.url, requests, AT_ONCE))
    model = run.directory / shape
    with serving("--advanced.seed", "1", name=f"{kind}-changes") as cluster:
        right[1] = asyncio.run(expected(cluster.url, requests, AT_ONCE))
        assert right[1] != right[2], "the weights differ"
        for number, (seed, memory) in enumerate(changes):
            state = state_of(model, seed, target, dtype)
            with Weights(cluster.url, ADMIN_KEY, model, memory=memory, later=None) as weights:
                keep_kv = memory == direct
                done = asyncio.run(change(cluster, requests, weights, state, memories, keep_kv=keep_kv))
            results.append(done)
            del state
            gc.collect()
            if run.on_gpus:
                torch.cuda.empty_cache()
            first = plain and number % 2 == 0
            _tell(run, f"{label}.{memory}" + (".first" if first else ""), done, memory)
            verdicts.append(judge(asyncio.run(answers(cluster.url, requests, AT_ONCE)), right[seed]))
            run.detail[f"{label}.{number}.different"] = verdicts[-1].different
        leaks = leaks_when_idle(cluster.url)
    run.detail |= {f"{label}.leaks": leaks, "tokens": len(requests) * ANSWER[run.device]}
    ran = [stream for each in results for stream in each.streams]
    if run.on_gpus:
        nbytes = 2 * max(each.spent.nbytes for each in results)
        to = {"ratio": memories.beyond / nbytes, "ratio_to": "weights", "goal": 0.1}
        run.add(Row(f"{label}.memory", memories.beyond / 1e9, "GB", **to))
    tell(run, label, ran, verdicts, leaks)


def _tell(run: Run, label: str, done: Change, memory: Memory) -> None:
    goal = GOALS.get(memory) if run.on_gpus and not label.endswith(".first") else None
    run.add(Row(f"{label}.gap", done.gap, "s", goal=goal))
    run.add(Row(f"{label}.update", done.seconds, "s"))
    for part in ("write", "read", "pause"):
        run.add(Row(f"{label}.update.{part}", getattr(done.spent, part), "s"))
