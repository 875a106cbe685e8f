"""Graphs on a CPU: a replay runs again what a capture ran, on the same memory.

So tests see which memory graphs read and write, and what their padding does. A graph with chunks is cut in
each layer, as on a GPU: its pieces are one run, which stops between two replays. Kernels of CPUs get the
chunks of a step from what graphs of a GPU read of them (`WORK`), and not from the host.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from baton.engine import Engine
from baton.engine.execution import graphs
from baton.engine.execution.inputs import Inputs
from baton.engine.kernels import Index, IndexQueries, Kernels
from baton.engine.kernels.attention import latent as latents
from baton.engine.kernels.attention.paged import (
    AttentionMetadata,
    TorchTiling,
    decode_group,
    group_of_rows,
    prefill_group,
    tile_attention,
)
from baton.engine.kernels.attention.tiles import SHORT
from baton.engine.kernels.state.mamba2 import Prompt, TorchStateTiling, nonzero

Work = Callable[[graphs.LayerDone], None]


class _Run:
    """Runs work piece by piece. Its thread waits at each cut for the next replay."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._left = False  # the run under way is not gone on with
        self._running = False
        self._error: BaseException | None = None

    def begin(self) -> None:
        if self._running:  # the step before was given up
            self._left = True
            self.go_on()
        self._next, self._cut = threading.Semaphore(0), threading.Semaphore(0)
        self._running, self._left = True, False
        threading.Thread(target=self._main, daemon=True).start()
        self.go_on()

    def go_on(self) -> None:
        assert self._running, "a piece is replayed out of order"
        self._next.release()
        self._cut.acquire()
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        self._next.acquire()
        try:
            with torch.inference_mode():
                self.work(self._pause)
        except _Left:
            pass
        except BaseException as error:  # noqa: BLE001  it belongs to the thread that replays
            self._error = error
        self._running = False
        self._cut.release()

    def _pause(self, _: int) -> None:
        self._cut.release()
        self._next.acquire()
        if self._left:
            raise _Left


class _Left(Exception):
    pass


class _Replay:
    """A graph, or a piece of one."""

    def __init__(self, run: _Run, is_first: bool) -> None:
        self.run = run
        self.count = 0
        self._is_first = is_first

    def replay(self) -> None:
        self.count += 1
        if self._is_first:
            self.run.begin()
        else:
            self.run.go_on()


class Capture:
    def __call__(self, work: Work) -> list[_Replay]:
        cuts: list[int] = []
        work(cuts.append)
        run = _Run(work)
        return [_Replay(run, is_first=not piece) for piece in range(len(cuts) + 1)]


def capture_on_cpu(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, chunk_sizes: Sequence[int] | None = None
) -> None:
    """From now on, graphs replay the steps of the engine. `chunk_sizes`: the rows of graphs with chunks, if
    fewer than there would be."""
    monkeypatch.setattr(graphs, "Capture", Capture)
    monkeypatch.setattr(
        graphs, "Inputs", lambda _, **sizes: Inputs(partial(torch.zeros, dtype=torch.uint8), **sizes)
    )
    if chunk_sizes is not None:
        monkeypatch.setattr(graphs, "chunk_sizes", lambda most: list(chunk_sizes))
    # What is measured chooses between graphs. All of them are replayed here.
    monkeypatch.setattr(graphs.StepGraphs, "_outlasts_launches", lambda self, rows: False)
    monkeypatch.setattr(graphs.StepGraphs, "_drop_slow", lambda self: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    _read_padded_steps(monkeypatch)
    runner = engine.runner
    width = -(-engine.model_config.max_model_len // engine.block_size)
    runner.cache.table_width = width if engine.lives.pool.windows is None else 2 * width
    runner.capture(64, lambda done: None)
    engine.loop.graph_rows = runner.graph_rows
    engine.scheduler._mixed_rows = runner.mixed_rows
    if (drafter := runner.drafter) is not None:
        # A real graph does not keep the memory that it reads and writes.
        for graph in (*drafter._kv_graphs.values(), *drafter._guess_graphs.values()):
            cells = cast(Any, graph).run.work.func.__closure__
            tensors = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Tensor)]
            assert {*map(id, tensors)} <= {*map(id, vars(drafter).values())}


def replayed(engine: Engine) -> int:
    """How many guesses of a draft head graphs have made."""
    drafter = engine.runner.drafter
    assert drafter is not None
    return sum(cast(_Replay, graph).count * each for (_, each), graph in drafter._guess_graphs.items())


def replayed_steps(engine: Engine) -> dict[tuple[bool, bool], int]:
    """How many steps graphs have replayed, by whether the graphs have decodes, and chunks."""
    made = engine.runner._graphs
    assert made is not None
    counts: dict[tuple[bool, bool], int] = {}
    for size, pieces in made._forward.items():
        kind = size.decodes, size.chunks
        counts[kind] = counts.get(kind, 0) + cast(_Replay, pieces[-1]).count
    return counts


class _Latents(NamedTuple):
    """What attends in some rows, as kernels of a GPU tile it for latents."""

    rows: slice
    tiling: latents.LatentTiling


def _read_padded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for CPUs then write nothing for rows with slot −1, and take chunks from `tiles` and `scans`.
    Rows without a context attend to nothing."""
    write, write_latent, tile_states = Kernels.rope_and_write, Kernels.write_latent, Kernels.tile_states
    write_index, choose = Kernels.write_index, Kernels.choose_positions

    def rope_and_write(
        self: Kernels, qkv: Tensor, rotary: Tensor, norm: Any, kv: Any, slots: Tensor
    ) -> Tensor:
        used = slots >= 0
        written = write(self, qkv[used], rotary[used], norm, kv, slots[used])
        q = qkv.new_zeros((len(qkv), *written.shape[1:]))
        q[used] = written
        return q

    def latent(
        q: Tensor, latent: Tensor, shared: Tensor, norm: Any, rotary: Tensor, kv: Any, slots: Tensor
    ) -> None:
        used = slots >= 0
        of_used = q[used]
        write_latent(of_used, latent[used], shared[used], norm, rotary[used], kv, slots[used])
        q[used] = of_used

    def of_index(index: Index, rotary: Tensor, cache: Any, slots: Tensor) -> IndexQueries:
        used = slots >= 0
        parts = Index(index.queries[used], index.keys[used], index.weights[used], index.layer)
        written = write_index(parts, rotary[used], cache, slots[used])
        made = [x.new_zeros((len(slots), *x.shape[1:])) for x in written]
        for padded, x in zip(made, written, strict=True):
            padded[used] = x
        return IndexQueries(*made)

    def choose_positions(self: Kernels, queries: IndexQueries, keys: Any, tiling: Sequence[_Latents]) -> None:
        for part in tiling:
            choose(self, queries, keys, part.tiling)

    def tile(
        self: Kernels,
        metadata: AttentionMetadata,
        heads: int,
        kv_heads: int,
        dtype: Any,
        span: Any = None,
        head_dim: int | None = None,
    ) -> TorchTiling:
        found = tile_attention(_unpadded(metadata), span, dtype, exact=self.exact)
        if metadata.tiles is None:
            return found
        assert not self.exact, "its chunks and decodes are alike"
        most = SHORT.tokens(heads // kv_heads)
        assert all(tile[2] <= most for tile in metadata.tiles.tolist()), "a program has no more rows"
        tiles = (tile[:4] for tile in metadata.tiles.tolist() if tile[2])
        chunks = [
            group_of_rows(
                metadata.block_tables[request],
                range(position, position + tokens),
                metadata.block_size,
                row,
                span,
                dtype,
            )
            for request, row, tokens, position in tiles
        ]
        return TorchTiling(found.decodes, chunks)

    def attention(
        self: Kernels,
        q: Tensor,
        kv: Any,
        tiling: TorchTiling,
        sinks: Any,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        out = q.new_zeros(q.shape)
        for decodes in tiling.decodes:
            out[decodes.rows] = decode_group(q[decodes.rows], kv, decodes, sinks, scale, softcap)
        for chunk in tiling.prefills:
            out[chunk.rows] = prefill_group(q[chunk.rows], kv, chunk, sinks, scale, softcap)
        return out

    def tile_latent(
        self: Kernels, metadata: AttentionMetadata, heads: int, shape: Any, dtype: Any, *, fp8: bool = False
    ) -> list[_Latents]:
        found = tile_attention(_unpadded(metadata), None, dtype)
        most = shape.index.most_chosen if shape.index else None
        groups = [TorchTiling([group], ()) for group in found.decodes]
        groups += [TorchTiling((), [group]) for group in found.prefills]
        return [
            _Latents(
                (*each.decodes, *each.prefills)[0].rows,
                latents.LatentTiling(each, shape.min_expanded_queries, each, most),
            )
            for each in groups
        ]

    def latent_attention(
        self: Kernels, q: Tensor, kv: Any, tiling: Sequence[_Latents], heads: Any, out: Tensor | None = None
    ) -> Tensor:
        out = q.new_zeros((*q.shape[:2], heads.values.shape[1])) if out is None else out
        for part in tiling:
            out[part.rows] = latents.latent_attention(q, kv, part.tiling, heads)
        return out

    def states(self: Kernels, metadata: AttentionMetadata, dtype: torch.dtype) -> TorchStateTiling:
        if metadata.prefills:
            return tile_states(self, metadata, dtype)
        slots, copies = metadata.state_slots, metadata.state_copies
        assert slots is not None
        kept = {} if copies is None else nonzero(copies)
        scans = () if metadata.scans is None else metadata.scans.tolist()
        prompts = []
        for request, row, tokens, number, left, at in scans:
            if tokens and not number:  # the first chunk of a prompt says how many tokens there are
                own = [(end - row + 1, kept[end] - 1) for end in kept if row <= end < row + left]
                prompts.append(Prompt(int(slots[request]), at == 0, slice(row, row + left), own))
        metadata = _unpadded(metadata)
        used = metadata.num_decodes
        return TorchStateTiling(slots[:used].long(), metadata.contexts[:used] == 1, prompts)

    monkeypatch.setattr(Kernels, "rope_and_write", rope_and_write)
    monkeypatch.setattr(Kernels, "write_latent", staticmethod(latent))
    monkeypatch.setattr(Kernels, "write_index", staticmethod(of_index))
    for name, emulated in (
        ("tile", tile),
        ("attention", attention),
        ("tile_latent", tile_latent),
        ("choose_positions", choose_positions),
        ("latent_attention", latent_attention),
        ("tile_states", states),
    ):
        monkeypatch.setattr(Kernels, name, emulated)


def _unpadded(metadata: AttentionMetadata) -> AttentionMetadata:
    """With the queries that decode, without padding behind them."""
    used = int((metadata.contexts[: metadata.num_decodes] > 0).sum())
    return replace(metadata, num_decodes=used)
