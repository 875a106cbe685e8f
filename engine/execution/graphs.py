"""CUDA graphs of a step: a few replays instead of hundreds of launches.

    capture, for each size ──▶ replay: inputs into static memory ─▶ forward ─▶ logits ─▶ choose

*forward* goes from token ids to the hidden states of all rows. There are three kinds of graph:
for steps that only decode, for chunks of prompts alone, and for chunks after decodes. Each kind has
graphs for several numbers of rows. *logits* computes the logits of the sampled rows, and *choose* samples
their tokens. Both have graphs for several numbers of sampled rows.

A step is padded to the next captured size. Padding rows have slot −1 and are in no context and no tile, so
they write nothing and attend to nothing.

A forward pass with chunks is cut in each layer, at the point where the KV of the layer is written: it is one
graph more than there are layers. `layer_done` is called between two graphs, so that KV can be handed over.
Chunks of latents attend there, too, launched anew for each step (`Apart`).

With several ranks, all of them capture and replay the same graphs in the same order, but only rank 0 has
*choose*. The sums over ranks are part of the graphs.

All graphs share one memory pool, since only one graph runs at a time. Their results (hidden states, logits,
tokens) are in other memory. The inputs of a step are contiguous, so one copy moves them all.
"""

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.execution.inputs import Inputs, attention_metadata, read_by_device
from baton.engine.kernels.attention.paged import Apart, AttentionMetadata
from baton.engine.kernels.attention.tiles import SHORT, TILE_FIELDS, Shape, most_pieces, tile_work
from baton.engine.kernels.state.mamba2 import scan_work
from baton.engine.kernels.upload import upload
from baton.engine.layers.ranks import Ranks
from baton.engine.step import Draws, Layout, Step, Variant

LARGEST, LARGEST_ALONE = 2048, 8192
"""Most rows of a graph with chunks beside decodes, and of one with chunks alone (`largest_graph`)."""
LONGER = 6
"""If a step takes the device this many times as long as its launches take the host, it needs no graph. Beside
threads that move KV and hold Python's lock, launches take 2 to 7 times as long as alone."""
CHUNKS = 16
"""Most chunks of a graph. Each chunk may leave one tile of attention partly empty."""

LayerDone = Callable[[int], Any]


Forward = Callable[[Mapping[str, Tensor], AttentionMetadata, LayerDone], Tensor]
"""From the arrays of a step and its attention to hidden states [rows, hidden_size]."""
Logits = Callable[[Tensor], Tensor]
"""From hidden states to [rows, vocabulary], in the model's dtype."""
Choose = Callable[[Tensor, Variant, Mapping[str, Tensor]], None]
"""From logits and the arrays of a step to the tokens of the runner."""
Attends = Callable[[AttentionMetadata], LayerDone]
"""From the chunks of a step to what lets them attend in a layer."""


class TileShape(NamedTuple):
    """How the chunks of a step are cut for attention."""

    tokens: int  # of a tile; 0: there are none
    programs: int  # pieces that are computed at once
    shape: Shape = SHORT

    def pieces(self, rows: int) -> int:
        """The most pieces of tiles in a step of so many rows."""
        return most_pieces(rows // self.tokens + CHUNKS, self.programs) if self.tokens else 0

    def work(self, prefills: Sequence[tuple[int, int]], num_decodes: int) -> np.ndarray:
        """As `tile_work`."""
        return tile_work(prefills, num_decodes, self.tokens, self.programs, self.shape.piece_keys)


NO_TILES = TileShape(0, 0)
"""Also of a model whose chunks attend between graphs."""


class Widths(NamedTuple):
    """Sizes of the arrays for one row or one request."""

    table: int  # of the block tables
    hidden: int
    vocabulary: int
    tiles: TileShape
    scan: int  # tokens of a chunk of state layers; 0: no layer has states
    ahead: int = 1  # as in `arrange`
    head: bool = False  # whether there is a draft head
    windows: bool = False  # whether layers with windows have blocks of their own
    window_tiles: TileShape = NO_TILES  # of layers with windows, if they are others
    shifted: bool = False  # whether positions for rotation may differ from positions
    chunks: bool = True  # whether graphs can compute prompts
    image: int = 0  # bytes of the embeddings of a token of an image; 0: the model takes none

    def scans(self, rows: int) -> int:
        """The most chunks of state layers in a step of so many rows."""
        return rows // self.scan + CHUNKS if self.scan else 0

    def image_rows(self, rows: int) -> int:
        """The most tokens of images in a step of so many rows."""
        return min(rows, LARGEST) if self.image else 0

    def sizes(self, rows: int, requests: int) -> dict[str, int]:
        """The dimensions of the largest step that graphs replay, with so many sampled rows."""
        return {
            "tokens": rows,
            "ahead": self.ahead,
            "decode rows": requests if self.ahead > 1 else 0,
            "drafted": requests if self.ahead > 1 else 0,
            "requests": requests,
            "width": self.table,
            "sampled": requests,
            "followed": rows if self.head else 0,
            "drafting": requests if self.head else 0,
            "pictured": rows if self.image else 0,
            "image rows": self.image_rows(rows),
            "image bytes": 0,  # they come to the device without a copy on the host
            "shifted": rows if self.shifted else 0,
            "states": requests if self.scan else 0,
            "state rows": rows if self.scan else 0,
            "pieces": self.tiles.pieces(rows),
            "window pieces": self.window_tiles.pieces(rows),
            "scans": self.scans(rows),
            "window rows": rows if self.windows else 0,
        }


WORK = {
    "tiles": Layout(np.int32, ("pieces", TILE_FIELDS)),
    "window_tiles": Layout(np.int32, ("window pieces", TILE_FIELDS)),
    "scans": Layout(np.int32, ("scans", 6)),
}
"""What graphs read in place of `Step.prefills`."""


class Size(NamedTuple):
    """The steps that a forward graph can replay."""

    rows: int  # at most
    decodes: bool  # False: no attention of decodes, which takes time also if there are none
    chunks: bool  # False: one graph that does not call `layer_done`


def batch_sizes(most: int) -> list[int]:
    """Numbers of rows of graphs that only decode, and of graphs that sample. Padding costs little within a
    tile of a matrix product, which has 8 rows."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


def chunk_sizes(most: int) -> list[int]:
    """Numbers of rows of graphs with chunks. Above 64 rows, at most a fifth of them is padding."""
    # 432 and 480, because cuBLAS is slow with 448 rows, measured on an H200.
    steps = (*range(16, 128, 16), *range(128, 256, 32), 256, 320, 384, 432, 480, *range(512, LARGEST, 128))
    steps += (*range(LARGEST, LARGEST_ALONE, 512),)
    return [*(rows for rows in steps if rows < most), most]


def largest_graph(full_step: int, max_num_batched_tokens: int) -> int:
    """Most rows of a graph. `full_step`: as in `ModelConfig`. Prompts share a step up to it."""
    return min(max(LARGEST, min(full_step, LARGEST_ALONE)), max_num_batched_tokens)


def size_for(step: Step, sizes: Iterable[Size]) -> Size | None:
    """The smallest of these sizes that can replay the step. None: no graph can.

    Graphs with chunks call `layer_done`. Only KV of chunks is handed over."""
    if step.num_prefills > CHUNKS:
        return None
    needed = Size(len(step.token_ids), step.num_decodes > 0, step.num_prefills > 0)
    kind = (size for size in sizes if size[1:] == needed[1:])
    return min((size for size in kind if size.rows >= needed.rows), default=None)


class StepGraphs:
    """Captures graphs and replays steps with them. Owns the graphs and their static memory on the device."""

    def __init__(
        self,
        stages: tuple[Forward, Logits, Choose, Callable[[int], tuple[Apart, Attends] | None]],
        sampled: Tensor,
        widths: Widths,
        *,
        dtype: torch.dtype,
        block_size: int,
        largest: int,
        ranks: Ranks,
        progress: Callable[[float], None],
    ) -> None:
        """Captures the stages of steps of up to len(sampled) sampled rows. The last one gives what chunks
        need that attend between graphs, for so many rows. None: they attend in graphs.

        `sampled` is the runner's: each step writes there what it samples, and the next step reads it."""
        device, requests = sampled.device, len(sampled)
        self._forward_of, self._logits_of, self._choose_of, apart_of = stages
        self._ranks = ranks
        self._sampled = sampled
        self._widths = widths
        self._block_size = block_size
        self.batch_sizes = batch_sizes(requests)
        with_chunks = chunk_sizes(largest) if widths.chunks else []
        rows = max([requests, *with_chunks])
        self._apart, self._attends = apart_of(rows) or (None, None)
        self.hidden = torch.zeros((rows, widths.hidden), dtype=dtype, device=device)
        """Of the rows of the last step, valid until the next one."""
        self._logits = torch.empty((requests, widths.vocabulary), dtype=torch.float32, device=device)
        memory = partial(torch.zeros, dtype=torch.uint8)
        inputs = partial(Inputs, sizes=widths.sizes(rows, requests), work=WORK)
        self.static = inputs(partial(memory, device=device))
        self._embeddings = torch.zeros(
            (widths.image_rows(rows), widths.image), dtype=torch.uint8, device=device
        )
        # Two, because a queued copy may still read one while the next step is written to the other.
        self._staging = [inputs(partial(memory, pin_memory=True)) for _ in range(2)]
        self._forward: dict[Size, list[torch.cuda.CUDAGraph]] = {}
        self._logits_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._choose: dict[tuple[int, Variant], torch.cuda.CUDAGraph] = {}
        self._share: torch.cuda.CUDAGraph | None = None
        self.capture = Capture()
        """For graphs that share the memory pool of these."""
        self._lengths: dict[str, int] = {}  # of the arrays of the last step
        for name in ("slots", "window_slots"):
            self.static.tensors[name].fill_(-1)
        del with_chunks[bisect_left(with_chunks, True, key=self._outlasts_launches) :]
        self._sizes = [Size(rows, False, True) for rows in with_chunks]
        self._sizes += [Size(rows, True, True) for rows in with_chunks if rows <= LARGEST]
        self._sizes += [Size(rows, True, False) for rows in self.batch_sizes]
        with no_garbage_collection():
            self._capture(progress)

    def _capture(self, progress: Callable[[float], None]) -> None:
        """Captures the largest sizes first, so that the others fit into the memory that these took."""
        capture = self.capture
        steps = len(self._sizes) + len(self.batch_sizes)
        for done, size in enumerate(sorted(self._sizes, reverse=True)):
            progress(done / steps)
            self._forward[size] = capture(partial(self._run_forward, size))
        for done, rows in enumerate(reversed(self.batch_sizes), len(self._sizes)):
            progress(done / steps)
            (self._logits_graphs[rows],) = capture(partial(self._run_logits, rows))
            for variant in Variant if self._ranks.rank == 0 else ():
                (self._choose[rows, variant],) = capture(partial(self._run_choose, rows, variant))
        if self._ranks.size > 1:
            (self._share,) = capture(lambda _: self._ranks.broadcast(self._sampled))
        torch.cuda.synchronize()
        self._drop_slow()

    def _outlasts_launches(self, rows: int) -> bool:
        """Whether launches of so many rows hide behind the device, also beside busy threads. Then a graph
        would save no time, and its padding would cost some. Rank 0 measures for all ranks."""
        run = partial(self._run_forward, Size(rows, decodes=True, chunks=True), lambda _: None)
        run()  # compiles and chooses kernels
        torch.cuda.synchronize()
        began = time.monotonic()
        run()
        launched = time.monotonic()
        torch.cuda.synchronize()
        (excess,) = self._ranks.agreed([time.monotonic() - began - LONGER * (launched - began)])
        return excess > 0

    def _drop_slow(self) -> None:
        """Replays no graph with chunks that takes longer than a larger one: for some numbers of rows, cuBLAS
        chooses worse kernels than for a few rows more. Rank 0 measures for all ranks."""
        # Smaller graphs first, because a GPU that grows warm slows down: a size in doubt is kept.
        sizes = sorted(size for size in self._sizes if size.chunks)
        measured = self._ranks.agreed([_milliseconds(self._forward[size]) for size in sizes])
        took = dict(zip(sizes, measured, strict=True))
        for size in sizes:
            larger = (other for other in sizes if other.rows > size.rows and other.decodes == size.decodes)
            if any(took[other] < took[size] for other in larger):
                # Its graphs stay. From 2.13 on, torch frees the cuBLAS workspace of their stream with any of
                # them, and the others still write there (pytorch/pytorch#193402).
                self._sizes.remove(size)

    def rows_with_chunks(self, *, decodes: bool) -> list[int]:
        """Rows of the graphs for steps with chunks, with or without decodes, in ascending order."""
        return sorted(size.rows for size in self._sizes if size.chunks and size.decodes == decodes)

    def size(self, step: Step) -> Size | None:
        """The size that this step is padded to. None: no graph can replay the step."""
        tables, images = step.decode_rows + step.num_prefills, step.images
        fits = max(tables, len(step.sampled_rows)) <= len(self._sampled)
        # Images whose tokens see their whole image need other tiles than chunks.
        fits = fits and len(images.embeddings) <= len(self._embeddings) and not len(images.seen_whole)
        return size_for(step, self._sizes) if fits else None

    def forward(self, size: Size, step: Step, layer_done: LayerDone) -> None:
        """Launches the forward pass of a step. `size` is the result of `self.size(step)`. Inputs that no
        graph of this step reads keep the values of an earlier one: the device may idle until the launch."""
        inputs = self._staging[0]
        self._staging.reverse()
        arrays, widths = read_by_device(step), self._widths
        if len(embeddings := arrays.pop("images.embeddings")):
            (moved,) = upload([embeddings], self._embeddings.device)
            self._embeddings[: len(moved)].copy_(moved, non_blocking=True)
        if step.variant is Variant.GREEDY:
            for name in Draws._fields:
                del arrays[f"draws.{name}"]
        prefills, rows = step.prefills, step.decode_rows
        if size.chunks:
            for name, shape in (("tiles", widths.tiles), ("window_tiles", widths.window_tiles)):
                if shape.tokens:
                    arrays[name] = shape.work(prefills, rows)
            if widths.scan:
                arrays["scans"] = scan_work(prefills, rows, widths.scan)
        self._lengths = {name: len(values) for name, values in arrays.items()}
        inputs.put(arrays)
        inputs.move_to(self.static)
        attend: LayerDone | None = None
        *layers, last = self._forward[size]
        for i, layer in enumerate(layers):
            layer.replay()
            layer_done(i)
            if self._attends is not None:
                # Made while the device computes what precedes the first attention.
                attend = attend or self._attends(
                    attention_metadata(
                        self.static.tensors,
                        block_size=self._block_size,
                        num_decodes=rows,
                        prefills=prefills,
                    )
                )
                attend(i)
        last.replay()

    def logits(self, rows: int) -> Tensor:
        """Launches the logits of the `rows` sampled rows of the last step. Returns [rows, vocabulary]
        float32, valid until the next step."""
        self._logits_graphs[self._padded(rows)].replay()
        return self._logits[:rows]

    def choose(self, rows: int, variant: Variant) -> None:
        """Launches sampling from the result of `logits`."""
        self._choose[self._padded(rows), variant].replay()

    def share_sampled(self) -> None:
        """Launches the copy of what rank 0 sampled to the other ranks."""
        if self._share is not None:
            self._share.replay()

    def inputs(self, rows: int) -> Mapping[str, Tensor]:
        """The arrays of the last step on the device, those by sampled row cut to `rows`."""
        return self.static.first({"sampled": rows, "drafted": rows})

    def unpadded(self) -> Mapping[str, Tensor]:
        """The arrays of the last step on the device that graphs of its forward pass read. `WORK` is left
        out."""
        lengths = {name: count for name, count in self._lengths.items() if name not in WORK}
        return {name: self.static.tensors[name][:count] for name, count in lengths.items()}

    def _padded(self, rows: int) -> int:
        return next(size for size in self.batch_sizes if size >= rows)

    def _run_forward(self, size: Size, layer_done: LayerDone) -> None:
        rows, widths = size.rows, self._widths
        tensors = self.static.first(
            {
                "tokens": rows,
                "state rows": rows,
                "window rows": rows,
                "shifted": rows,
                "pictured": rows if size.chunks else 0,
                "pieces": widths.tiles.pieces(rows) if size.chunks else 0,
                "window pieces": widths.window_tiles.pieces(rows) if size.chunks else 0,
                "scans": widths.scans(rows) if size.chunks else 0,
            }
        )
        tensors["images.embeddings"] = self._embeddings
        decodes = min(rows, len(self._sampled)) if size.decodes else 0
        attention = attention_metadata(
            tensors,
            block_size=self._block_size,
            num_decodes=decodes,
            prefills=[],
            apart=self._apart if size.chunks else None,
            tile_shape=widths.tiles.shape,
        )
        cut = layer_done if size.chunks else lambda _: None
        hidden = self._forward_of(tensors, attention, cut)
        self.hidden[:rows].copy_(hidden)

    def _run_logits(self, rows: int, _: LayerDone) -> None:
        logits = self._logits_of(self.hidden[self.static.tensors["sampled_rows"][:rows]])
        if self._ranks.rank == 0:
            self._logits[:rows].copy_(logits)

    def _run_choose(self, rows: int, variant: Variant, _: LayerDone) -> None:
        self._choose_of(self._logits[:rows], variant, self.inputs(rows))


class Capture:
    """Captures graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[LayerDone], None]) -> list[torch.cuda.CUDAGraph]:
        """Captures what `work` launches. Where `work` calls its argument, a graph ends and another begins.
        `work` runs once before the capture, because kernels are compiled and chosen in their first run."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work(lambda _: None)
            self._stream.synchronize()
            graphs = _captured(work, self._pool)
        torch.cuda.current_stream().wait_stream(self._stream)
        return graphs


class LateCapture:
    """Captures graphs that share one memory pool, while other threads use the device. What is captured has
    run before in this thread, on the current stream."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[LayerDone], None]) -> list[torch.cuda.CUDAGraph]:
        """As of `Capture`."""
        with _no_collection():
            return _captured(work, self._pool)


def _captured(work: Callable[[LayerDone], None], pool: Any) -> list[torch.cuda.CUDAGraph]:
    graphs: list[torch.cuda.CUDAGraph] = []

    def begin() -> None:
        graphs.append(torch.cuda.CUDAGraph())
        # thread_local: other threads of the process may use CUDA meanwhile.
        graphs[-1].capture_begin(pool, capture_error_mode="thread_local")

    def cut(_: int) -> None:
        graphs[-1].capture_end()
        begin()

    begin()
    try:
        work(cut)
    except BaseException:
        with suppress(RuntimeError):  # the stream would stay in the capture
            graphs[-1].capture_end()
        raise
    graphs[-1].capture_end()
    return graphs


def _milliseconds(graphs: list[torch.cuda.CUDAGraph]) -> float:
    """Device time of these graphs in their second run."""
    for _ in range(2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for graph in graphs:
            graph.replay()
        ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pauses the garbage collector: freeing device memory during a capture would crash the process."""
    gc.collect()
    with _no_collection():
        yield


@contextmanager
def _no_collection() -> Iterator[None]:
    """The same, where a collection would hold up other threads."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
