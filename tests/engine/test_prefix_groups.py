"""Requests that decode and begin with the same blocks read the KV of these together."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine import Engine, EngineConfig, EngineRequest, build_engine
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.meters import Batch
from baton.engine.core.prefix_groups import Group, PrefixGroups, prefix_groups
from baton.engine.core.step_builder import Schedule, StepSize, build_step
from baton.engine.execution.warmup import Rehearsal, rehearse
from baton.engine.kernels import Kernels
from baton.engine.step import PrefixReads, Step
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine, request_of, run, tokens_of
from tests.engine.random_checkpoints import save_random
from tests.engine.replays import capture_on_cpu, replayed_steps

BLOCK = 4
READS = PrefixReads(members=4, result=0.25)


def found(tables: Sequence[Sequence[int]], written: Sequence[int], reads: PrefixReads = READS) -> list[Any]:
    groups = prefix_groups([array("i", table) for table in tables], written, BLOCK, reads)
    return [(list(rows), blocks) for rows, blocks in groups]


def test_requests_with_one_beginning_are_a_group() -> None:
    tables = [[1, 2, 3, 4], [9, 8, 7], [1, 2, 3, 5], [9, 6, 5], [1, 2, 3, 7]]
    assert found(tables, [15, 10, 14, 9, 13]) == [([0, 2, 4], 3), ([1, 3], 1)]
    assert found([[1, 2], [3, 4]], [7, 7]) == []
    assert found([[1, 2, 3]], [9]) == []


def test_a_group_has_no_block_that_a_request_writes() -> None:
    """The third block is the same, but one request writes into it; a context that ends within the prefix."""
    tables = [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 5]]
    assert found(tables, [15, 11, 12]) == [([0, 1, 2], 2)]
    assert found(tables, [15, 3, 12]) == [([0, 2], 3)]
    assert found([[1], [1]], [2, 3]) == []


def test_the_groups_of_a_tree_save_the_most() -> None:
    """Two conversations of four requests each, behind one system prompt: a group for both of them, or one for
    each, whichever reads fewer positions."""
    long, short = list(range(10, 40)), list(range(50, 80))
    few = [[1, *long, 100 + i] for i in range(4)] + [[1, *short, 200 + i] for i in range(4)]
    assert found(few, [127] * 8) == [([0, 1, 2, 3], 31), ([4, 5, 6, 7], 31)]
    system = list(range(300, 340))
    many = [[*system, 500, 400 + i] for i in range(4)] + [[*system, 501, 410 + i] for i in range(4)]
    many += [[*system, 600 + i] for i in range(30)]
    assert found(many, [163] * 38) == [(list(range(38)), 40)]


def test_too_short_a_prefix_is_read_by_each() -> None:
    """The results of a group take bytes, too: here 4 · 0.25 positions of each request."""
    tables = [[1, 2], [1, 3]]
    assert found(tables, [7, 7]) == [([0, 1], 1)]
    assert found(tables, [7, 7], PrefixReads(members=4, result=0.5)) == []


def test_a_long_path_of_the_tree_is_cut() -> None:
    """So what a client sends cannot make a step expensive: request i leaves the path behind block i."""
    path = list(range(1, 200))
    tables = [[*path[: i + 1], 1000 + i] + [2000 + i] * (200 - i) for i in range(100)]
    assert found(tables, [803] * 100)[0][1] <= 4


@given(st.randoms(use_true_random=False), st.sampled_from([2, 4, 16]))
def test_groups_of_random_tables(rng: random.Random, members: int) -> None:
    """All requests of a group have its blocks, and write behind them. Each is in one group at most."""
    tables = [
        [rng.randrange(1 + 2 * (depth > 1)) + 10 * depth for depth in range(rng.randrange(1, 9))]
        for _ in range(rng.randrange(1, 20))
    ]
    written = [rng.randrange(len(table) * BLOCK) for table in tables]
    groups = prefix_groups(
        [array("i", t) for t in tables], written, BLOCK, PrefixReads(members, rng.random())
    )
    rows = [row for group in groups for row in group.rows]
    assert len(rows) == len(set(rows))
    for of_group, blocks in groups:
        assert len(of_group) > 1
        assert blocks
        assert len({tuple(tables[row][:blocks]) for row in of_group}) == 1
        assert all(blocks * BLOCK <= written[row] for row in of_group)


def test_a_step_has_the_requests_of_a_group_one_after_the_other() -> None:
    schedule, groups = Schedule(), PrefixGroups(BLOCK, READS)
    tables = [[1, 2, 3, 4], [9, 8], [1, 2, 3], [7, 6, 5], [1, 2, 3, 5, 6]]
    contexts = [14, 5, 12, 12, 20]
    for number, (table, context) in enumerate(zip(tables, contexts, strict=True)):
        live = LiveRequest(EngineRequest(bytes([number]), [3] * context), number)
        live.blocks.extend(table)
        schedule.chunks[live] = range(context - 1, context)
    schedule.size = StepSize(5, sum(contexts), 0, 0.0)
    step = build_step(schedule, 99, block_size=BLOCK, table_width=None, groups=groups)
    assert step.contexts.tolist() == [12, 14, 20, 5, 12]
    assert step.prefix_places.tolist() == [0, 1, 2, 0, 0]
    assert step.prefix_stops.tolist() == [8, 8, 8, 0, 0]
    assert [live.id[0] for live in schedule.sampled] == [2, 0, 4, 1, 3]
    assert schedule.size.context == sum(contexts) - 2 * 8


def test_groups_change_with_the_requests() -> None:
    groups, tables = PrefixGroups(BLOCK, READS), [array("i", [1, 2, 3]), array("i", [1, 2, 4])]
    assert groups.of(["a", "b"], tables, [9, 9]) == [Group([0, 1], 2)]
    assert groups.of(["a", "c"], [tables[0], array("i", [5, 6, 7])], [10, 9]) == []


def test_an_engine_reads_a_common_prefix_once(
    triton_kernels: Kernels, one_form: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tenants with system prompts of their own, and a request without one. Its requests begin and end in
    different steps, which graphs replay. The tokens are those of kernels that read all contexts, and the
    attention of a step reads as many positions as the step says."""
    from baton.engine import step_loop
    from baton.engine.kernels import triton_kernels as kernels
    from baton.engine.kernels.attention import decode

    save_random(tmp_path, "Llama", head_dim=16, num_hidden_layers=1)
    first, second = list(range(3, 32)), list(range(70, 91))
    prompts = [[*first, 100 + i] for i in range(3)] + [[*second, 50 + i] for i in range(2)] + [[60, 61]]
    requests = [
        request_of(10 + i, prompt, max_tokens=2 + i % 3, ignore_eos=True) for i, prompt in enumerate(prompts)
    ]
    config = EngineConfig(
        str(tmp_path),
        dtype="float32",
        num_blocks=64,
        block_size=BLOCK,
        max_num_batched_tokens=32,
        max_num_seqs=6,
        enable_prefix_caching=True,
        share_prefix_reads=True,
    )
    read: list[int] = []
    expected: list[int] = []
    contexts: list[int] = []

    def partition(*args: Any, real: Any = kernels.partition, **options: Any) -> Any:
        pieces = real(*args, **options)
        read.append(sum(stop - start for number, start, stop in pieces.work.tolist() if number >= 0))
        return pieces

    def build(schedule: Schedule, *args: Any, real: Any = step_loop.build_step, **options: Any) -> Any:
        step = real(schedule, *args, **options)
        if schedule.decodes:
            expected.append(schedule.size.context)
            contexts.append(schedule.decode_context)
        return step

    def tokens(engine: Engine) -> list[list[int]]:
        tokens_of(engine, [request_of(i, p, max_tokens=1) for i, p in enumerate((first, second))])
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "partition", partition)
            patch.setattr(step_loop, "build_step", build)
            return tokens_of(engine, requests)

    alone = build_engine(replace(config, device="cpu"))
    assert alone._runner.prefix_reads is None
    without = tokens(alone)
    assert not read
    assert expected == contexts
    expected.clear()
    contexts.clear()
    for module in ("baton.engine.execution.start", "baton.engine.layers.weights"):
        monkeypatch.setattr(f"{module}.kernels_for", lambda device, head_dim, exact=False: triton_kernels)
    monkeypatch.setattr(decode, "MOST_MEMBERS", 2)
    together = build_engine(replace(config, device=DEVICE))
    if DEVICE == "cpu":
        capture_on_cpu(together, monkeypatch, [32])
    assert tokens(together) == without
    assert sum(expected) < 0.8 * sum(contexts)
    if DEVICE == "cpu":  # a GPU replays no cuts of this process
        assert replayed_steps(together)[True, False]
        assert read == expected


def test_chunks_beside_decodes_count_what_these_read(tiny_engine: MakeEngine) -> None:
    """And so does what routers are told. The kernels of a CPU read all, and give the same tokens."""
    engine = tiny_engine(block_size=BLOCK, enable_prefix_caching=True, max_num_seqs=4)
    engine.loop._groups = PrefixGroups(BLOCK, READS)
    prefix, limit = list(range(3, 33)), engine._meters.chunk_limit
    tokens_of(engine, [request_of(1, prefix, max_tokens=1)])
    for number in (2, 3):
        engine.add(request_of(number, [*prefix, 40 + number], max_tokens=9, ignore_eos=True))
    while engine.stats().requests_decoding < 2 or engine.stats().tokens_waiting:
        engine.loop.step()
    engine.loop.step()
    contexts = sum(live.num_computed for live in engine.lives.running)
    assert engine.stats().decode_context == contexts - 28, "seven blocks, once"
    asked: list[Batch] = []

    def tokens(batch: Batch, *others: Any, real: Any = limit.tokens) -> int:
        asked.append(batch)
        return real(batch, *others)

    engine.add(request_of(4, range(60, 90), max_tokens=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limit, "tokens", tokens)
        engine.loop.step()
    assert [batch.context for batch in asked] == [contexts + 2 - 28]
    run(engine)
    assert engine.stats().decode_context == 0


def test_the_rehearsal_has_steps_with_a_group(tiny_path: Path) -> None:
    """So their kernels are compiled before the first request."""
    config = EngineConfig(str(tiny_path), dtype="float32", device="cpu", num_blocks=16, block_size=BLOCK)
    engine = build_engine(config)
    engine._runner.prefix_reads = READS
    seen: list[list[int]] = []

    def run(step: Step, *args: Any, real: Any = engine._runner.run) -> Any:
        seen.append(step.prefix_stops.tolist())
        assert all(stop <= context for stop, context in zip(seen[-1], step.contexts.tolist(), strict=False))
        return real(step, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runner, "run", run)
        limits = replace(config, max_num_seqs=4, max_num_batched_tokens=40)
        list(rehearse(engine._runner, Rehearsal(limits, 16, BLOCK, pool=16), lambda done: None))
    assert {len(stops) for stops in seen} == {0, 2, 4}
    assert any(stops and min(stops) for stops in seen)
