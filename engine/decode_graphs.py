"""CUDA graphs of steps that only decode: hundreds of launches replayed as one.

    capture, for each batch size ──▶ replay: inputs into static memory, forward graph, sampling graph ──▶ …

A batch is padded to the next size that was captured; rows that pad it have slot −1 and context 0: they write
nothing and attend to nothing. All graphs share one pool of memory: one runs at a time, and what it leaves
(logits, tokens) is in memory of its own. Inputs are laid out so that those of a batch are one copy.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.batch import StepBatch, aligned
from engine.sampler import Draws, Variant

Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]
"""(token ids, positions, attention) → logits of all rows, in the model's dtype."""
Choose = Callable[[Tensor, Variant, Draws[Tensor]], Tensor]
"""(logits, variant, draws) → tokens."""

FIELDS = {
    "token_ids": np.int64, "positions": np.int64, "slots": np.int64, "contexts": np.int32,
    "temperature": np.float32, "keys": np.int32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32,
}  # fmt: skip
"""Of one number a row. Behind them come the block tables, int32."""


def batch_sizes(most: int) -> list[int]:
    """That are captured: a padded row costs little, but a tile of a matrix product is 8 rows."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


class _Inputs:
    """Fields and block tables of up to `rows` requests in one piece of memory."""

    def __init__(self, memory: Tensor, rows: int, width: int) -> None:
        self.memory = memory
        self.fields: dict[str, Tensor] = {}
        at = 0
        for name, dtype in FIELDS.items():
            size = rows * np.dtype(dtype).itemsize
            self.fields[name] = memory[at : at + size].view(getattr(torch, np.dtype(dtype).name))
            at += aligned(size)
        self.tables = memory[at:].view(torch.int32).view(rows, width)
        self.before_tables = at

    @staticmethod
    def bytes(rows: int, width: int) -> int:
        fields = sum(aligned(rows * np.dtype(dtype).itemsize) for dtype in FIELDS.values())
        return fields + 4 * rows * width


class DecodeGraphs:
    """Owns static memory on the device and the graphs. `tokens` [rows] int64, on the device, is where every
    step leaves what it sampled, so that the next one can begin with it; steps without a graph, too."""

    def __init__(
        self,
        forward: Forward,
        choose: Choose,
        tokens: Tensor,
        *,
        vocabulary: int,
        block_size: int,
        table_width: int,
        progress: Callable[[float], None],
    ) -> None:
        """Captures graphs for batches of up to len(tokens) requests, with block tables of `table_width`."""
        device, most = tokens.device, len(tokens)
        self._tokens = tokens
        self._logits = torch.empty((most, vocabulary), dtype=torch.float32, device=device)
        self._block_size = block_size
        size = _Inputs.bytes(most, table_width)
        self._static = _Inputs(torch.zeros(size, dtype=torch.uint8, device=device), most, table_width)
        # One is read by a copy that may not have run yet while the other is written.
        self._staging = [
            _Inputs(torch.zeros(size, dtype=torch.uint8, pin_memory=True), most, table_width)
            for _ in range(2)
        ]
        self._sizes = batch_sizes(most)
        self._forward: dict[int, torch.cuda.CUDAGraph] = {}
        self._choose: dict[tuple[int, Variant], torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        self._static.fields["slots"].fill_(-1)
        with _no_garbage_collection():
            self._capture(forward, choose, pool, progress)

    def _capture(
        self, forward: Forward, choose: Choose, pool: Any, progress: Callable[[float], None]
    ) -> None:
        for done, rows in enumerate(reversed(self._sizes)):
            progress(done / len(self._sizes))
            self._forward[rows] = _captured(partial(self._run_forward, rows, forward), pool)
            for variant in Variant:
                self._choose[rows, variant] = _captured(
                    partial(self._run_choose, rows, variant, choose), pool
                )
        torch.cuda.synchronize()

    def forward(self, batch: StepBatch, draws: Draws[np.ndarray]) -> Tensor:
        """Launches the forward pass of a batch that only decodes. Returns the logits of its rows
        [rows, vocabulary], float32: until the next step they are there."""
        rows = len(batch.contexts)
        size = self.size(rows)
        staging = self._staging[0]
        self._staging.reverse()
        values = {
            "token_ids": batch.token_ids, "positions": batch.positions,
            "slots": batch.slots, "contexts": batch.contexts,
        } | {name: getattr(draws, name) for name in Draws._fields}  # fmt: skip
        for name, array in values.items():
            field = staging.fields[name].numpy()
            field[:rows] = array
            field[rows:size] = -1 if name == "slots" else 0
        staging.tables[:rows].numpy()[:] = batch.block_tables
        used = staging.before_tables + 4 * rows * staging.tables.shape[1]
        self._static.memory[:used].copy_(staging.memory[:used], non_blocking=True)
        self._forward[size].replay()
        return self._logits[:rows]

    def choose(self, rows: int, variant: Variant) -> Tensor:
        """Launches the sampling of what `forward` left. Returns [rows] int64, part of `tokens`."""
        self._choose[self.size(rows), variant].replay()
        return self._tokens[:rows]

    def draws(self, rows: int) -> Draws[Tensor]:
        """Those given to `forward`, on the device."""
        return Draws(*(self._static.fields[name][:rows] for name in Draws._fields))

    def size(self, rows: int) -> int:
        """Of the batch that so many are padded to."""
        return next(size for size in self._sizes if size >= rows)

    def _run_forward(self, rows: int, forward: Forward) -> None:
        fields = {name: field[:rows] for name, field in self._static.fields.items()}
        attention = AttentionMetadata(
            self._block_size, fields["slots"], self._static.tables[:rows], fields["contexts"], rows, []
        )
        logits = forward(fields["token_ids"], fields["positions"], attention)
        self._logits[:rows].copy_(logits)

    def _run_choose(self, rows: int, variant: Variant, choose: Choose) -> None:
        self._tokens[:rows].copy_(choose(self._logits[:rows], variant, self.draws(rows)))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What is freed during a capture may be memory of the device, which ends the process."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _captured(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """`work` runs once before: what is compiled or chosen at its first run is no part of a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may use CUDA meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph
