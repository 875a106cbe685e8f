"""Triton's kernels of attention against the torch kernels that define them (`kernel_checks`)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.kernels import AttentionMetadata, HeadNorm, Kernels
from baton.engine.kernels.attention.paged import first_seen
from baton.engine.model_config import Span
from tests.device import DEVICE
from tests.engine.attention_step import RAGGED, Step, placed
from tests.engine.kernel_checks import BF16, DTYPES, F16, F32, close, normal

pytestmark = pytest.mark.all

BLOCK_SIZES = [*(2**i for i in range(7)), *range(128, 1025, 64)]
"""That a user can choose: divisors and multiples of 64."""


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (64, 16, F32),
        (64, 192, F16),
        (128, 64, F16),
        (512, 32, F16),
        pytest.param(128, 128, BF16, marks=pytest.mark.gpu),
    ],
)
def test_mixed_batch(triton_kernels: Kernels, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    Step(RAGGED, (4, 2), head_dim, block_size, dtype).check(triton_kernels, DEVICE)


def test_requests_with_one_two_five_and_300_tokens(triton_kernels: Kernels) -> None:
    several = [(69, 71), (40, 45)]
    Step([(15, 16), *several, (10, 310)], (4, 2), dtype=F16, decodes=several).check(triton_kernels, DEVICE)


@pytest.mark.parametrize(
    ("heads", "dtype", "few"),
    [((4, 2), F16, 32), ((4, 2), F32, 0), ((3, 1), F16, 0), ((8, 1), F16, 32), ((2, 2), F16, 0)],
)
def test_queries_of_a_request_that_decodes_share_its_keys(
    triton_kernels: Kernels,
    heads: tuple[int, int],
    dtype: torch.dtype,
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests with up to eight queries, whose contexts end before, in and behind a tile of keys, or a piece
    of several. Up to 16 query heads share keys."""
    from baton.engine.kernels.attention import decode, pieces

    monkeypatch.setattr(decode, "FEW_REQUESTS", few)
    monkeypatch.setattr(pieces, "PIECES_PER_SM", 6)
    spans = [(15, 16), (0, 3), (62, 66), (30, 38), (350, 354), (94, 97), (2, 3), (10, 50)]
    step = Step(spans, heads, 64, 16, dtype, decodes=spans[:-1], ahead=8)
    assert step.metadata.places is not None
    assert step.metadata.places.tolist() == [0, *range(3), *range(4), *range(8), *range(4), *range(3), 0]
    step.check(triton_kernels, DEVICE)


@pytest.mark.parametrize("queries", [2, 4])
def test_requests_that_share_pieces(kernel_device: str, queries: int) -> None:
    from baton.engine.kernels.attention.pieces import Sharing, most_pieces, partition

    contexts, places = [5, 199, 200, 201, 202, 203, 64, 65, 0], [0, 0, 1, 2, 3, 4, 0, 1, 0]
    on_device = [
        torch.tensor(values, dtype=torch.int32, device=kernel_device) for values in (contexts, places)
    ]
    most = most_pieces(len(contexts), 2, 3)
    pieces = partition(on_device[0], 2, most, sharing=Sharing(queries, on_device[1], on_device[0]))
    first, work = pieces.first.tolist(), pieces.work.tolist()
    covered = {}
    for i, place in enumerate(places):
        own = work[first[i] : first[i + 1]]
        assert bool(own) == (place % queries == 0)
        if own:
            assert [start for _, start, _ in own] == [0, *(stop for _, _, stop in own[:-1])]
            covered[i] = own[-1][2]
    assert covered == (
        {0: 5, 1: 200, 3: 202, 5: 203, 6: 65, 8: 0} if queries == 2 else {0: 5, 1: 202, 5: 203, 6: 65, 8: 0}
    )


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_batch_padded_as_for_a_graph(triton_kernels: Kernels, dtype: torch.dtype) -> None:
    """Padding rows have no slot, padding requests no context, padding tiles are zeros. They write nothing and
    do not change the other rows."""
    from baton.engine.kernels.attention.tiles import SHORT, tile_work

    step = Step([*RAGGED, (30, 33)], (4, 2), 64, 16, dtype, decodes=[(30, 33)])
    expected, expected_kv, _ = step.run(triton_kernels, DEVICE)
    rows, padded, m = len(expected), len(expected) + 5, step.metadata
    programs = triton_kernels.tile_programs(SHORT, 2)
    cut = tile_work(m.prefills, m.num_decodes, SHORT.tokens(2), programs, SHORT.piece_keys)
    work = torch.from_numpy(cut)
    contexts = torch.zeros(padded, dtype=torch.int32)
    contexts[: m.num_decodes] = m.contexts[: m.num_decodes]
    step.qkv = F.pad(step.qkv, (0, 0, 0, 0, 0, padded - rows), value=torch.nan)
    step.rotary = F.pad(step.rotary, (0, 0, 0, 0, 0, padded - rows))
    step.metadata = replace(
        m,
        slots=F.pad(m.slots, (0, padded - rows), value=-1),
        contexts=contexts,
        num_decodes=padded,
        prefills=[],
        tiles=F.pad(work, (0, 0, 0, 3)),
    )
    out, kv, _ = step.run(triton_kernels, DEVICE)
    close(out[:rows], expected.cpu())
    assert torch.equal(kv.nan_to_num(9.0), expected_kv.nan_to_num(9.0))


def test_no_work_behind_the_last_line_is_read(kernel_device: str) -> None:
    """There are more places than lines. What follows the lines would put pieces together, too."""
    from baton.engine.kernels.attention.pieces import combine_tiles
    from baton.engine.kernels.attention.tiles import TILE_FIELDS

    lines = torch.zeros(4, TILE_FIELDS, dtype=torch.int32, device=kernel_device)
    lines[:, 10:] = torch.tensor([[row, 1, 2 * row, 2] for row in range(4)])
    partial, lse = torch.ones(8, 1, 2, 64, device=kernel_device), torch.zeros(8, 1, 2, device=kernel_device)
    out = torch.zeros(4, 2, 64, device=kernel_device)
    combine_tiles(partial, lse, lines[:1], out)
    assert out.sum(dim=(1, 2)).tolist() == [128, 0, 0, 0]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("span", [None, Span(9)], ids=repr)
def test_tokens_of_an_image_see_all_of_it(
    triton_kernels: Kernels, exact: bool, span: Span | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of one piece and of several."""
    images = {0: [(190, 230)], 1: [(2, 35), (36, 50)]}
    step = Step([(30, 31), (200, 260), (0, 50)], (4, 2), 64, 16, F16, span=span, images=images)
    monkeypatch.setattr(triton_kernels, "exact", exact)
    step.check(triton_kernels, DEVICE)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1)])
def test_query_heads_per_kv_head(triton_kernels: Kernels, heads: tuple[int, int]) -> None:
    Step([(30, 31), (66, 67), (20, 40)], heads, 64, 32, F16).check(triton_kernels, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normalized_before_they_are_rotated(triton_kernels: Kernels, dtype: torch.dtype) -> None:
    step = Step([(20, 21), (0, 6)], (4, 2), 64, 16, dtype)
    norm = HeadNorm(1 + normal(6, 64).to(dtype) / 4, 1e-6)
    step.check(triton_kernels, DEVICE, norm)


@pytest.mark.parametrize(
    ("long_from", "heads", "head_dim", "block_size", "dtype"),
    [
        (100, (4, 1), 64, 128, F16),
        (4096, (4, 1), 64, 128, F16),
        *(
            pytest.param(100, (7, 1), 128, n, BF16, marks=pytest.mark.gpu)
            for n in (8, 16, 64, 128, 192, 256, 320, 448)
        ),
        *(pytest.param(100, (4, 2), 256, n, F16, marks=pytest.mark.gpu) for n in (32, 192)),
    ],
)
def test_chunks_longer_than_a_tile(
    triton_kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    long_from: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Chunks of several tiles. Each sees whole tiles of keys, and tiles that the causal mask cuts."""
    from baton.engine.kernels.attention import tiles

    monkeypatch.setattr(tiles, "LONG_FROM", long_from)
    monkeypatch.setattr(triton_kernels, "_head_dim", head_dim)  # of `prefill_wgmma`
    spans = [(0, 70), (130, 200), *[(0, 64), (500, 1011)] * (head_dim > 64)]
    Step(spans, heads, head_dim, block_size, dtype).check(triton_kernels, DEVICE)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_copy_engine_never_reads_past_a_block(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each size that a user can choose: what one copy of `prefill_wgmma` loads is in one block."""
    from baton.engine.kernels.attention import prefill_wgmma

    copied: list[int] = []
    monkeypatch.setattr(prefill_wgmma, "on_hopper", lambda: True)
    monkeypatch.setattr(
        prefill_wgmma,
        "_attend",
        {(0,): lambda q, *tiles, **_: copied.extend(tile.block_shape[0] for tile in tiles[:2])},
    )
    nothing = torch.zeros(0, 1, head_dim, dtype=BF16)
    for block_size in BLOCK_SIZES:
        if prefill_wgmma.suits(BF16, head_dim, block_size):
            kv = torch.zeros(2, 1, block_size, 1, head_dim, dtype=BF16)
            prefill_wgmma.attend(nothing, kv, torch.zeros(1, 1), nothing, nothing, nothing, nothing, 1.0)
            assert all(block_size % rows == 0 for rows in copied[-2:]), (block_size, copied[-2:])
    assert set(copied) == {16, 32, 64, *[128] * (head_dim == 128)}


@pytest.mark.parametrize(
    ("block_size", "dtype", "span", "with_sinks"),
    [
        (16, F32, None, True),
        (128, F16, None, False),
        (16, F16, Span(100), True),
        pytest.param(128, BF16, None, True, marks=pytest.mark.gpu),
    ],
)
def test_few_tokens_after_many(
    triton_kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    dtype: torch.dtype,
    span: Span | None,
    with_sinks: bool,
) -> None:
    """Several programs share the keys of a tile. A layer with a span gets the same work."""
    from baton.engine.kernels.attention import tiles

    monkeypatch.setattr(tiles, "LEAST_KEYS", 128)
    monkeypatch.setattr(triton_kernels, "_multiprocessors", 16)
    monkeypatch.setattr(tiles, "SHORT", tiles.SHORT._replace(piece_keys=16))
    monkeypatch.setattr("baton.engine.kernels.triton_kernels.SHORT", tiles.SHORT)
    spans = [(299, 300), (767, 779), (510, 514), (0, 3)]
    step = Step(spans, (4, 2), 64, block_size, dtype, span=span, with_sinks=with_sinks)
    tiling = triton_kernels.tile(placed(step.metadata, lambda x: x.to(DEVICE)), *step.heads, dtype, span)
    assert sorted(tiling.tiles.work[:, 7].tolist()) == [1, 2, 2, 3, 3, 3]
    step.check(triton_kernels, DEVICE)


PREFILLS = st.lists(
    st.tuples(st.sampled_from([0, 3, 700, 8000, 16000]), st.integers(1, 1300)), min_size=1, max_size=4
)


@given(PREFILLS, st.integers(0, 40), st.sampled_from([1, 4, 7]))
def test_pieces_of_tiles_read_each_key_once(
    prefills: list[tuple[int, int]], programs: int, group: int
) -> None:
    from baton.engine.kernels.attention.tiles import LONG, most_pieces, most_places, tile_work

    chunks, tokens = [(start, start + count) for start, count in prefills], LONG.tokens(group)
    work = tile_work(chunks, 5, tokens, programs, LONG.piece_keys)
    number = sum(-(-count // tokens) for _, count in prefills)
    assert len(work) <= most_pieces(number, programs)
    tiles: dict[int, list[list[int]]] = {}
    for piece in work.tolist():
        tiles.setdefault(piece[1], []).append(piece)
    assert len(tiles) == number
    cut = {line[10]: line[11:] for line in work.tolist() if line[13]}
    places = []
    for row, pieces in tiles.items():
        pieces.sort(key=lambda piece: piece[4])
        _, _, count, position, *_ = pieces[0]
        assert [piece[4] for piece in pieces] == [0, *(piece[5] for piece in pieces[:-1])]
        assert pieces[-1][5] == position + count
        assert all(piece[4] % 128 == 0 and piece[4] <= position for piece in pieces)
        assert {piece[7] for piece in pieces} == {len(pieces)}
        if len(pieces) > 1:
            assert cut.pop(row) == [count, pieces[0][6], len(pieces)]
            places += [piece[6] for piece in pieces]
    assert not cut
    assert sorted(places) == [*range(len(places))]
    assert len(places) <= most_places(programs)


def test_few_programs_idle_in_the_last_wave_of_a_chunk() -> None:
    """For an H200, which has 16 programs for each of 8 KV heads: the share of the time in which they compute.
    Before tiles were cut in the last wave it was 0.76."""
    from baton.engine.kernels.attention.tiles import LONG, tile_work

    shares = []
    for tokens in range(16, 2049, 16):
        work = tile_work([(16000, 16000 + tokens)], 24, LONG.tokens(4), 16, LONG.piece_keys)
        keys, busy = work[:, 5] - work[:, 4], [0] * 16
        assert list(keys) == sorted(keys, reverse=True), "the last programs are short"
        for count in keys:
            busy[busy.index(min(busy))] += count
        shares.append(sum(keys) / 16 / max(busy))
    assert min(shares) > 0.65
    assert sum(shares) / len(shares) > 0.94


@pytest.mark.parametrize("tokens", [16, 2128])
def test_cutting_tiles_tries_few_pieces(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One KV head of an H200 behind 120,000 positions. The host took 10 and 16 ms in each step."""
    from baton.engine.kernels.attention import tiles

    tried, ends = [], tiles._ends
    monkeypatch.setattr(tiles, "_ends", lambda *of: tried.append(len(of[0])) or ends(*of))
    work = tiles.tile_work([(120_000, 120_000 + tokens)], 5, tiles.LONG.tokens(8), 132, 512)
    assert max(work[:, 7]) > 1
    assert len(tried) < 100


@pytest.mark.parametrize(
    ("span", "with_sinks", "scale", "block_size", "dtype", "softcap"),
    [
        (None, True, 0.25, 16, F16, None),
        (Span(5), False, None, 16, F16, None),
        (Span(128), True, None, 128, F32, None),
        (Span(24, chunked=True), True, None, 16, F16, None),
        (None, False, 0.5, 16, F32, 0.75),
        (Span(24), True, 0.5, 16, F16, 1.5),
        pytest.param(Span(128), True, 0.25, 128, BF16, None, marks=pytest.mark.gpu),
        pytest.param(Span(160, chunked=True), False, None, 128, BF16, None, marks=pytest.mark.gpu),
        pytest.param(None, False, None, 128, BF16, 0.75, marks=pytest.mark.gpu),
    ],
)
def test_a_layer_with_a_span_sinks_a_scale_or_bounded_scores(
    triton_kernels: Kernels,
    span: Span | None,
    with_sinks: bool,
    scale: float | None,
    block_size: int,
    dtype: torch.dtype,
    softcap: float | None,
) -> None:
    """Decodes of one piece and of several. Spans that end in a tile of keys, within a chunk of queries and
    before it."""
    spans = [(0, 1), (31, 32), (400, 401), (0, 40), (30, 33), (290, 315)]
    step = Step(
        spans, (2, 1), 64, block_size, dtype, span=span, with_sinks=with_sinks, scale=scale, softcap=softcap
    )
    step.check(triton_kernels, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_that_rotates_several_tokens(
    triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As many do not fill the last; Qwen3's norm, three query heads."""
    from baton.engine.kernels.attention import rope

    monkeypatch.setattr(rope, "MANY", 1)
    step = Step([(9, 10), (0, 6)], (3, 1), 64, 16, dtype)
    norm = HeadNorm(1 + normal(4, 64).to(dtype) / 4, 1e-6)
    step.check(triton_kernels, DEVICE, norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "many"), [(6, 1), (1, 1), (8, 1024)])
def test_queries_are_rotated_alone(
    triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int, many: int
) -> None:
    """As of a layer that reads the KV of another one: by one token at a time and by several."""
    from baton.engine.kernels.attention import rope

    monkeypatch.setattr(rope, "MANY", many)
    step = Step([(0, 7)], (heads, 1), 32, 16, dtype)
    norm = HeadNorm(1 + normal(heads, 32).to(dtype) / 4, 1e-6)
    q = step.qkv[:, :heads].contiguous()
    for scale in (norm.scale, None):
        exact = None if scale is None else HeadNorm(scale.double(), norm.eps)
        ours = None if scale is None else HeadNorm(scale.to(DEVICE), norm.eps)
        expected = Kernels().rotate(q.double(), step.rotary.double(), exact)
        close(triton_kernels.rotate(q.to(DEVICE, copy=True), step.rotary.to(DEVICE), ours), expected)


def spans_of(longest_prefix: int, longest_chunk: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Up to four chunks (start, stop) behind prefixes."""
    chunk = st.tuples(st.integers(0, longest_prefix), st.integers(1, longest_chunk))
    span = chunk.map(lambda x: (x[0], x[0] + x[1]))
    return st.lists(span, min_size=1, max_size=4, unique=True)


@settings(max_examples=6)
@given(
    spans=spans_of(150, 12),
    block_size=st.sampled_from(BLOCK_SIZES),
    seed=st.integers(0, 1000),
)
def test_any_batch(triton_kernels: Kernels, spans: Any, block_size: int, seed: int) -> None:
    Step(spans, (2, 1), 16, block_size, F16, seed).check(triton_kernels, DEVICE)


@pytest.mark.gpu
@settings(max_examples=12)
@given(
    spans=spans_of(900, 300),
    block_size=st.sampled_from(BLOCK_SIZES),
    head_dim=st.sampled_from([128, 256]),
    seed=st.integers(0, 1000),
)
def test_any_batch_in_large_tiles(
    triton_kernels: Kernels, spans: Any, block_size: int, head_dim: int, seed: int
) -> None:
    from baton.engine.kernels.attention import tiles

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LONG_FROM", 1)
        patch.setattr(triton_kernels, "_head_dim", head_dim)  # of `prefill_wgmma`
        Step(spans, (4, 1), head_dim, block_size, BF16, seed).check(triton_kernels, DEVICE)


@pytest.mark.parametrize(
    "contexts",
    [[1], [64], [13 * 64], [65, 0, 0], [0], [1, 5000, 64, 200], [1000] * 20, [0, 3000, 0, 1]],
    ids=lambda contexts: f"{len(contexts)}x{max(contexts)}",
)
@pytest.mark.parametrize("span", [None, Span(100), Span(300, chunked=True)], ids=repr)
def test_pieces_cover_each_context_once(kernel_device: str, contexts: list[int], span: Span | None) -> None:
    from baton.engine.kernels.attention.pieces import BLOCK_N, most_pieces, partition

    most = most_pieces(len(contexts), num_kv_heads=2, multiprocessors=3)
    pieces = partition(torch.tensor(contexts, dtype=torch.int32, device=kernel_device), 2, most, span)
    seen = first_seen(torch.tensor(contexts) - 1, span).clamp_min(0).tolist()
    assert not pieces.finished.any()
    work, first = pieces.work.tolist(), pieces.first.tolist()
    assert len(work) == most
    longest = max(stop - start for _, start, stop in work)
    for i, context in enumerate(contexts):
        own = work[first[i] : first[i + 1]]
        assert [request for request, _, _ in own] == [i] * len(own)
        ends = [seen[i], *(stop for _, _, stop in own)]
        assert [start for _, start, _ in own] == ends[:-1]
        assert ends[-1] == context
        assert all(start < stop for _, start, stop in own) if context else len(own) == 1
        assert all(start % BLOCK_N == 0 for _, start, _ in own[1:])
    assert all(request == -1 for request, _, _ in work[first[-1] :]), "the rest does nothing"
    if longest > BLOCK_N:
        shorter = -(-longest // BLOCK_N) * BLOCK_N - BLOCK_N
        tiles = (-(-stop // BLOCK_N) - start // BLOCK_N for start, stop in zip(seen, contexts, strict=True))
        needed = sum(max(1, -(-count * BLOCK_N // shorter)) for count in tiles)
        assert needed > len(work), "no shorter length makes do"


@pytest.mark.parametrize(("few", "heads"), [(2, (2, 1)), (1, (6, 2))], ids=["each head", "last program"])
def test_combining_more_pieces_than_fit_one_pass(
    triton_kernels: Kernels, few: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.engine.kernels.attention import decode, pieces

    monkeypatch.setattr(pieces, "COMBINED", 2)
    monkeypatch.setattr(pieces, "PIECES_PER_SM", 8)
    monkeypatch.setattr(decode, "COMBINED_LAST", 8)
    monkeypatch.setattr(decode, "FEW_REQUESTS", few)
    Step([(350, 351), (9, 10)], heads, 64, 16).check(triton_kernels, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "few"), [(F16, 32), (BF16, 32), (BF16, 0)])
def test_a_captured_decode_step_serves_other_lengths(
    triton_kernels: Kernels, dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of a step with three requests, replayed for longer requests, and for two with padding."""
    from baton.engine.kernels.attention import decode as decode_attention

    monkeypatch.setattr(decode_attention, "FEW_REQUESTS", few)
    steps = [
        Step([(c - 1, c) for c in contexts], (8, 2), 128, 128, dtype, seed=i)
        for i, contexts in enumerate([(100, 200, 3000), (2999, 5, 1), (1, 700, 2500)])
    ]
    kv = torch.full((2, 80, 128, 2, 128), torch.nan, dtype=dtype, device="cuda")
    qkv, rotary = torch.empty_like(steps[0].qkv, device="cuda"), steps[0].rotary.cuda()
    slots = torch.empty(3, dtype=torch.int64, device="cuda")
    metadata = AttentionMetadata(
        128,
        slots,
        torch.zeros(3, 32, dtype=torch.int32, device="cuda"),
        torch.ones(3, dtype=torch.int32, device="cuda"),
        3,
        [],
    )

    def load(step: Step) -> None:
        m, (_, blocks) = step.metadata, step.kv.shape[:2]
        kv.fill_(torch.nan)[:, :blocks].copy_(step.kv)
        qkv.copy_(step.qkv)
        rotary.copy_(step.rotary)
        slots.copy_(m.slots)
        metadata.block_tables[:, : m.block_tables.shape[1]].copy_(m.block_tables)
        metadata.contexts.copy_(m.contexts)

    def forward() -> Tensor:
        q = triton_kernels.rope_and_write(qkv, rotary, None, kv, slots)
        tiling = triton_kernels.tile(metadata, 8, 2, dtype)
        return triton_kernels.attention(q, kv, tiling, None, steps[0].scale)

    load(steps[0])
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for step in steps:
        expected, _, _ = step.run(Kernels(), "cpu", exact=True)
        load(step)
        graph.replay()
        close(out, expected)
    slots[1], metadata.contexts[1] = -1, 0
    qkv.copy_(steps[-1].qkv)
    graph.replay()
    assert not out[1].any()
    close(out[[0, 2]], expected[[0, 2]])


def test_padding_rows_write_and_read_nothing(triton_kernels: Kernels) -> None:
    """Padding as in a captured graph."""
    step = Step([(8, 9), (40, 41), (41, 42)], (2, 1), 64, 16)
    expected, expected_kv, _ = step.run(Kernels(), "cpu")
    m = step.metadata
    padded_kv = step.kv.clone()
    m.slots[1], m.contexts[1] = -1, 0
    out, kv, _ = step.run(triton_kernels, DEVICE)
    assert not out[1].any()
    close(out[[0, 2]], expected[[0, 2]])
    changed = ~torch.eq(kv.cpu().nan_to_num(7), padded_kv.nan_to_num(7)).all(-1).all(0).flatten()
    assert int(changed.sum()) == 2
    assert expected_kv.isfinite().all(-1).all(0).sum() == 9 + 41 + 42
