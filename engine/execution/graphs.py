"""CUDA graphs of a step: hundreds of launches replayed as a few.

    capture, for each size ──▶ replay: inputs into static memory ─▶ forward ─▶ logits ─▶ choose ──▶ …

*forward*, from token ids to the hidden states of all rows: by the number of rows; in one kind of graph all
rows decode, in the other chunks of prompts follow those that do. *logits* of the rows that are sampled, and
*choose*, their tokens: by their number. A step is padded to the next size that was captured: rows that pad it
have slot −1, and no context or tile says anything of them, so they write nothing and attend to nothing.

Where KV is handed over layer by layer, *forward* is cut where that of a layer is written, and there is a call
between two graphs.
All graphs share one pool of memory: one runs at a time, and what it leaves (hidden states, logits, tokens) is
in memory of its own. Inputs are laid out so that those of a step are one copy.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.execution.upload import aligned
from engine.kernels.attention import AttentionMetadata
from engine.kernels.tiles import tile_work
from engine.step import Draws, Step, Variant

LARGEST = 1024
"""Rows of a step with prompts. The device computes so many for 25 ms, longer than launching takes."""
CHUNKS = 16
"""Chunks of a step: each may leave one tile of attention partly empty."""

LayerDone = Callable[[int], None]


class Network(Protocol):
    """What is captured."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, layer_done: LayerDone
    ) -> Tensor:
        """Hidden states [rows, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary], in the model's dtype."""
        ...

    def choose(self, logits: Tensor, variant: Variant, draws: Draws[Tensor]) -> Tensor:
        """Tokens [rows]."""
        ...


class Widths(NamedTuple):
    """Of what one row, or one request, has."""

    table: int  # blocks
    hidden: int
    vocabulary: int
    tile: int  # tokens of a tile of attention


class Size(NamedTuple):
    """What a forward graph is captured for."""

    rows: int
    chunks: bool  # False: each row is a request that decodes


def batch_sizes(most: int) -> list[int]:
    """Rows of graphs that only decode, and of those that sample: a padded row costs little, but a tile of a
    matrix product is 8 rows."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


def chunk_sizes(most: int) -> list[int]:
    """Rows of graphs with chunks: at most a fifth of them pads."""
    sizes = [16]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(16, 1 << sizes[-1].bit_length() - 3))
    return [*sizes[:-1], most] if most > 16 else [most]


class _Inputs:
    """All that a step is told, in one piece of memory: by row, by tile, by request (sampled rows are no
    more). The block tables come last, so that only those in use are copied."""

    def __init__(self, memory: Callable[[int], Tensor], rows: int, requests: int, widths: Widths) -> None:
        by_row, by_request, tiles = (rows,), (requests,), (rows // widths.tile + CHUNKS, 4)
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "token_ids": (by_row, torch.int64),
            "positions": (by_row, torch.int64),
            "slots": (by_row, torch.int64),
            "tiles": (tiles, torch.int32),
            "contexts": (by_request, torch.int32),
            "sampled_rows": (by_request, torch.int64),
            "temperature": (by_request, torch.float32),
            "keys": (by_request, torch.int32),
            "top_k": (by_request, torch.int32),
            "top_p": (by_request, torch.float32),
            "min_p": (by_request, torch.float32),
            "tables": ((requests, widths.table), torch.int32),
        }
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in layout.values()]
        ends = np.cumsum([0, *map(aligned, sizes)]).tolist()
        self.memory = memory(ends[-1])
        self.before_tables = ends[-2]
        self._fields = {
            name: self.memory[at : at + size].view(dtype).view(shape)
            for (name, (shape, dtype)), at, size in zip(layout.items(), ends, sizes, strict=False)
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._fields[name]

    def put(self, name: str, values: np.ndarray, padding: int = 0) -> None:
        field = self._fields[name].numpy()
        field[: len(values)] = values
        field[len(values) :] = padding


class StepGraphs:
    """Owns static memory on the device and the graphs. `tokens` [requests] int64, on the device, is where
    every step leaves what it sampled, so that the next one can begin with it; steps without a graph, too."""

    def __init__(
        self,
        network: Network,
        tokens: Tensor,
        widths: Widths,
        *,
        dtype: torch.dtype,
        block_size: int,
        max_num_batched_tokens: int,
        by_layer: bool,
        progress: Callable[[float], None],
    ) -> None:
        """Captures steps of up to len(tokens) requests. `by_layer`: those of prompts alone, in graphs that
        end where `layer_done` is called; else also those that only decode, and there are no such calls."""
        device, requests = tokens.device, len(tokens)
        self._network = network
        self._tokens = tokens
        self._widths = widths
        self._block_size = block_size
        self._by_layer = by_layer
        with_chunks = chunk_sizes(min(LARGEST, max_num_batched_tokens))
        self._batch_sizes = batch_sizes(requests)
        self._sizes = [Size(rows, True) for rows in with_chunks]
        if not by_layer:
            self._sizes += [Size(rows, False) for rows in self._batch_sizes]
        rows = max(size.rows for size in self._sizes)
        self._hidden = torch.zeros((rows, widths.hidden), dtype=dtype, device=device)
        self._logits = torch.empty((requests, widths.vocabulary), dtype=torch.float32, device=device)
        octets = partial(torch.zeros, dtype=torch.uint8)
        self._static = _Inputs(partial(octets, device=device), rows, requests, widths)
        # One is read by a copy that may not have run yet while the other is written.
        self._staging = [_Inputs(partial(octets, pin_memory=True), rows, requests, widths) for _ in range(2)]
        self._forward: dict[Size, list[torch.cuda.CUDAGraph]] = {}
        self._of_logits: dict[int, torch.cuda.CUDAGraph] = {}
        self._choose: dict[tuple[int, Variant], torch.cuda.CUDAGraph] = {}
        self._static["slots"].fill_(-1)
        with _no_garbage_collection():
            self._capture(progress)

    def _capture(self, progress: Callable[[float], None]) -> None:
        """The largest first: the others find room in what it took."""
        capture = _Capture()
        steps = len(self._sizes) + len(self._batch_sizes)
        for done, size in enumerate(sorted(self._sizes, reverse=True)):
            progress(done / steps)
            self._forward[size] = capture(partial(self._run_forward, size))
        for done, rows in enumerate(reversed(self._batch_sizes), len(self._sizes)):
            progress(done / steps)
            (self._of_logits[rows],) = capture(partial(self._run_logits, rows))
            for variant in Variant:
                (self._choose[rows, variant],) = capture(partial(self._run_choose, rows, variant))
        torch.cuda.synchronize()
        self._drop_slow()

    def _drop_slow(self) -> None:
        """With chunks: for some numbers of rows cuBLAS chooses worse kernels than for a few more."""
        best = math.inf
        for size in sorted((size for size in self._sizes if size.chunks), reverse=True):
            took = _milliseconds(self._forward[size])
            if took > best:
                self._sizes.remove(size)
                del self._forward[size]
            best = min(best, took)

    def size(self, step: Step) -> Size | None:
        """The graphs that this step is padded to; None: there are none for it."""
        if (self._by_layer and step.num_decodes) or len(step.prefills) > CHUNKS:
            return None
        rows, chunks = len(step.token_ids), bool(step.prefills)
        return min((s for s in self._sizes if s.chunks == chunks and s.rows >= rows), default=None)

    def forward(self, size: Size, step: Step, layer_done: LayerDone) -> None:
        """Launches the forward pass of a step that `size` was found for."""
        inputs = self._staging[0]
        self._staging.reverse()
        inputs.put("token_ids", step.token_ids)
        inputs.put("positions", step.positions)
        inputs.put("slots", step.slots, padding=-1)
        inputs.put("tiles", tile_work(step.prefills, step.num_decodes, self._widths.tile))
        inputs.put("contexts", step.contexts[: step.num_decodes])
        inputs.put("sampled_rows", step.sampled_rows)
        for name in Draws._fields:
            inputs.put(name, getattr(step.draws, name))
        inputs["tables"][: len(step.block_tables)].numpy()[:] = step.block_tables
        used = inputs.before_tables + step.block_tables.nbytes
        self._static.memory[:used].copy_(inputs.memory[:used], non_blocking=True)
        *layers, last = self._forward[size]
        for i, layer in enumerate(layers):
            layer.replay()
            layer_done(i)
        last.replay()

    def logits(self, rows: int) -> Tensor:
        """Launches the last product for the `rows` sampled rows of that step. Returns [rows, vocabulary],
        float32: until the next step they are there."""
        self._of_logits[self._padded(rows)].replay()
        return self._logits[:rows]

    def choose(self, rows: int, variant: Variant) -> Tensor:
        """Launches the sampling of what `logits` left. Returns [rows] int64, part of `tokens`."""
        self._choose[self._padded(rows), variant].replay()
        return self._tokens[:rows]

    def draws(self, rows: int) -> Draws[Tensor]:
        """Those given to `forward`, on the device."""
        return Draws(*(self._static[name][:rows] for name in Draws._fields))

    def _padded(self, rows: int) -> int:
        return next(size for size in self._batch_sizes if size >= rows)

    def _run_forward(self, size: Size, layer_done: LayerDone) -> None:
        static, rows = self._static, size.rows
        decodes = 0 if self._by_layer else min(rows, len(self._tokens))
        attention = AttentionMetadata(
            block_size=self._block_size,
            slots=static["slots"][:rows],
            block_tables=static["tables"],
            contexts=static["contexts"],
            num_decodes=decodes,
            prefills=[],
            tiles=static["tiles"][: rows // self._widths.tile + CHUNKS] if size.chunks else None,
        )
        cut = layer_done if self._by_layer else lambda _: None
        hidden = self._network.forward(static["token_ids"][:rows], static["positions"][:rows], attention, cut)
        self._hidden[:rows].copy_(hidden)

    def _run_logits(self, rows: int, _: LayerDone) -> None:
        sampled = self._hidden[self._static["sampled_rows"][:rows]]
        self._logits[:rows].copy_(self._network.logits(sampled))

    def _run_choose(self, rows: int, variant: Variant, _: LayerDone) -> None:
        self._tokens[:rows].copy_(self._network.choose(self._logits[:rows], variant, self.draws(rows)))


class _Capture:
    """Makes graphs that share memory."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[LayerDone], None]) -> list[torch.cuda.CUDAGraph]:
        """What `work` launches; a graph ends, and another begins, where it calls what it is given. It runs
        once before: what is compiled or chosen at its first run is no part of a graph."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # Other threads of the process may use CUDA meanwhile.
            graphs[-1].capture_begin(self._pool, capture_error_mode="thread_local")

        def cut(_: int) -> None:
            graphs[-1].capture_end()
            begin()

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work(lambda _: None)
            self._stream.synchronize()
            begin()
            work(cut)
            graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graphs


def _milliseconds(graphs: list[torch.cuda.CUDAGraph]) -> float:
    """That the device takes for them, the second time."""
    for _ in range(2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for graph in graphs:
            graph.replay()
        ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


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
