"""Steps that graphs replay (on a GPU) give the results of steps that are launched kernel by kernel."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import Engine, EngineRequest
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.step_builder import Schedule, build_step
from baton.engine.execution.graphs import (
    CHUNKS,
    LARGEST,
    LARGEST_ALONE,
    WORK,
    Size,
    StepGraphs,
    TileShape,
    Widths,
    batch_sizes,
    chunk_sizes,
    largest_graph,
    size_for,
)
from baton.engine.execution.inputs import Inputs, read_by_device
from baton.engine.kernels import parts
from baton.engine.layers.ranks import Ranks
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine, TinyOf, request_of, save_tiny, tokens_of
from tests.engine.replays import capture_on_cpu, replayed_steps
from tests.engine.scheduling import end, hooks_to

PROMPTS = [list(range(3, 3 + n)) for n in (1, 2, 15, 16, 17, 40, 70, 100)]


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 16, 17, 64, 256, 1000, 1024])
@pytest.mark.parametrize("sizes", [batch_sizes, chunk_sizes])
def test_there_is_a_size_for_every_step(sizes: Callable[[int], list[int]], most: int) -> None:
    found = sizes(most)
    assert found == sorted(set(found))
    assert found[-1] == most
    assert found[0] >= 1


def test_at_most_a_fifth_of_the_rows_is_padding_above_64() -> None:
    sizes = chunk_sizes(1024)
    assert len(sizes) == 21
    for rows in range(65, 1025):
        padded = next(size for size in sizes if size >= rows)
        assert padded - rows <= padded / 5


@pytest.mark.parametrize(
    ("full_step", "budget", "rows"),
    [
        pytest.param(512, 16384, LARGEST, id="dense"),
        pytest.param(512 * 64 // 4, 16384, 8192, id="experts"),
        pytest.param(4096, 16384, 4096, id="few experts"),
        pytest.param(1 << 16, 16384, LARGEST_ALONE, id="many experts"),
        pytest.param(8192, 4000, 4000, id="a small budget"),
    ],
)
def test_prompts_that_share_a_step_have_a_graph(full_step: int, budget: int, rows: int) -> None:
    assert largest_graph(full_step, budget) == rows
    assert chunk_sizes(rows)[-1] == rows


def test_slow_graphs_are_not_replayed_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would free the workspace of cuBLAS that the others use, too."""
    found = StepGraphs.__new__(StepGraphs)
    milliseconds = {Size(16, True, True): 3.0, Size(32, True, True): 2.0, Size(64, True, True): 2.5}
    made = {size: [_Timed(took)] for size, took in milliseconds.items()}
    monkeypatch.setattr("baton.engine.execution.graphs._milliseconds", lambda graphs: graphs[0].took)
    kept = weakref.WeakSet(graph for graphs in made.values() for graph in graphs)
    monkeypatch.setattr(found, "_ranks", Ranks(), raising=False)
    monkeypatch.setattr(found, "_sampled", torch.zeros(1), raising=False)
    monkeypatch.setattr(found, "_sizes", list(made), raising=False)
    monkeypatch.setattr(found, "_forward", made, raising=False)
    del made
    found._drop_slow()
    assert found.rows_with_chunks(decodes=True) == [32, 64]
    assert len(kept) == len(milliseconds)


@dataclass(eq=False)
class _Timed:
    took: float


SIZES = [Size(rows, *kind) for rows in (8, 64) for kind in ((True, True), (True, False), (False, True))]


@pytest.mark.parametrize(
    ("decodes", "prompts", "size"),
    [
        pytest.param([1] * 9, [], Size(64, True, False), id="decodes"),
        pytest.param([5, 1], [], Size(8, True, False), id="decodes of several tokens"),
        pytest.param([], [7], Size(8, False, True), id="a chunk"),
        pytest.param([], [1], Size(8, False, True), id="a chunk of one token"),
        pytest.param([1], [7], Size(8, True, True), id="a chunk beside a decode"),
        pytest.param([1, 2, 5], [40], Size(64, True, True), id="a chunk beside decodes of several tokens"),
        pytest.param([1], [64], None, id="too many rows"),
        pytest.param([], [2] * (CHUNKS + 1), None, id="too many chunks"),
    ],
)
def test_only_a_step_with_chunks_is_cut_by_layer(
    decodes: list[int], prompts: list[int], size: Size | None
) -> None:
    schedule = Schedule()
    for number, length in enumerate([*decodes, *prompts]):
        live = LiveRequest(EngineRequest(bytes([number]), [3] * length), number)
        live.blocks.extend(range(length))
        schedule.chunks[live] = range(length)
        if number >= len(decodes):
            schedule.prompts[live] = range(length)
    step = build_step(schedule, 199, block_size=1, table_width=None)
    assert size_for(step, SIZES) == size


def test_a_graph_reads_a_step_with_padding() -> None:
    """Requests that decode one, two and five tokens, after a larger step in the same memory."""
    widths = Widths(table=4, hidden=1, vocabulary=199, tiles=TileShape(16, 0), scan=0)
    make = partial(Inputs, partial(torch.zeros, dtype=torch.uint8), widths.sizes(64, 16), WORK)
    staging, static = make(), make()
    for lengths in ([5, 5, 5], [1, 2, 5]):
        schedule = Schedule()
        for number, length in enumerate(lengths):
            live = LiveRequest(EngineRequest(bytes([number]), [3 + number] * 9), number)
            live.blocks.extend(range(3 * number, 3 * number + 3))
            schedule.chunks[live] = range(9 - length, 9)
        step = build_step(schedule, 199, block_size=4, table_width=4)
        staging.put(read_by_device(step))
        staging.move_to(static)
    seen = static.first({"tokens": 10})
    assert seen["token_ids"].tolist() == [3] + [4] * 2 + [5] * 5 + [0] * 2
    assert seen["slots"].tolist() == [8, 19, 20, 28, 29, 30, 31, 32, -1, -1]
    assert seen["contexts"].tolist() == [9, 8, 9, 5, 6, 7, 8, 9] + [0] * 8
    assert seen["sampled_rows"].tolist() == [0, 2, 7] + [0] * 13
    assert seen["block_tables"][:8, 0].tolist() == [0, 3, 3, 6, 6, 6, 6, 6]
    assert seen["state_slots"].tolist() == seen["scans"].tolist() == []


class LayersSeen:
    """Copies the cache of a layer when `layer_done` is called for it."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.tables: dict[bytes, list[int]] = {}
        self.kv: dict[tuple[bytes, int, int], torch.Tensor] = {}
        self.order: list[int] = []

    def prefill_started(self, live: LiveRequest) -> None:
        self.tables[live.owner] = list(live.blocks)

    def layer_done(self, layer: int, chunks: Mapping[bytes, range]) -> None:
        assert self.engine is not None
        self.order.append(layer)
        size = self.engine.block_size
        for request_id, positions in chunks.items():
            table = self.tables[request_id]
            slots = [table[p // size] * size + p % size for p in positions]
            index = torch.tensor(slots, device=DEVICE)
            seen = parts(self.engine.caches[layer])[0].flatten(1, 2)[:, index]
            for position, value in zip(positions, seen.unbind(1), strict=True):
                self.kv[request_id, layer, position] = value


@pytest.mark.cases(1)
@pytest.mark.parametrize("budget", [1024, 48])
def test_the_kv_of_a_layer_is_written_when_layer_done_is_called(
    tiny_engine: MakeEngine, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without graphs, for prompts alone and together, whole and in chunks, beside a decode."""
    seen: list[LayersSeen] = []
    tokens: list[dict[bytes, list[int]]] = []
    decoding = request_of(99, [7, 8, 9], max_tokens=200, ignore_eos=True)
    for graphs in (False, True):
        sink = LayersSeen()
        engine = sink.engine = tiny_engine(
            hooks=hooks_to(sink),
            cuda_graphs=graphs,
            num_blocks=128,
            max_num_batched_tokens=budget,
            max_num_seqs=8,
        )
        if graphs and DEVICE == "cpu":
            capture_on_cpu(engine, monkeypatch)
        sink.order.clear()
        found: dict[bytes, list[int]] = {decoding.id: []}
        engine.add(decoding)
        for number, prompt in enumerate(PROMPTS):
            engine.add(request_of(number, prompt, max_tokens=2), handover=True)
            if number % 3 == 0:
                continue  # two at once
            while engine.stats().requests_running + engine.stats().requests_waiting > 1:
                for output in engine.loop.step().outputs:
                    found.setdefault(output.id, []).append(output.token)
                    if output.id != decoding.id:
                        end(engine, output.id)
        end(engine, decoding.id)
        engine.assert_whole()
        if graphs and DEVICE == "cpu":
            assert all(replayed_steps(engine).values()), "of each kind"
        layers = engine.model_config.num_layers
        assert sink.order == list(range(layers)) * (len(sink.order) // layers)
        seen.append(sink)
        tokens.append(found)
    # How many steps the chunks take, and so how many tokens are decoded, depends on measured times.
    decoded = [of_engine.pop(decoding.id) for of_engine in tokens]
    common = min(map(len, decoded))
    assert common > len(PROMPTS) / 2
    assert decoded[0][:common] == decoded[1][:common]
    assert tokens[0] == tokens[1]
    plain, replayed = seen
    assert plain.kv.keys() == replayed.kv.keys()
    for key, value in plain.kv.items():
        # Products of other numbers of rows round differently. KV that is not written yet differs far more.
        torch.testing.assert_close(replayed.kv[key], value, rtol=1e-3, atol=1e-3)


@pytest.mark.all
@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU all engine tests have graphs")
@pytest.mark.parametrize("kind", ["Llama", "GptOss", "DeepseekV3", "GlmMoeDsa", "Bamba", "Gemma4Text"])
def test_graphs_with_chunks_read_what_the_step_says(
    tiny_engine: MakeEngine, tiny_of: TinyOf, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts alone, together and beside decodes, in chunks: attention, tiles of two kinds, latents between
    graphs, states."""
    path = tiny_of(kind) if kind != "Gemma4Text" else tmp_path
    if path is tmp_path:  # its layers with windows have two KV heads, the others one
        save_tiny(
            path,
            kind,
            num_hidden_layers=3,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            num_kv_shared_layers=1,
        )
    requests = [
        request_of(number, prompt, max_tokens=4, ignore_eos=True) for number, prompt in enumerate(PROMPTS)
    ]
    config: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 4}
    make = partial(tiny_engine, model=str(path), num_blocks=160, enable_prefix_caching=True, **config)
    expected = tokens_of(make(), requests)
    engine = make()
    capture_on_cpu(engine, monkeypatch)
    for _ in range(2):  # then with what the prefix cache has, and with copies of states
        assert tokens_of(engine, requests) == expected
    counts = replayed_steps(engine)
    assert all(counts.values()), counts
