"""Slicing and mapping: whatever is cut on one side covers exactly what the other side asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_names.cache_kinds import LATENT, STATE, CacheArray
from baton.kv_transfer.layout import (
    Piece,
    cut,
    intersect,
    runs,
    slice_bytes,
)
from tests.layouts import kv_layout

LAYOUT = kv_layout(4, 8, 64, "bfloat16")
STATES = (
    CacheArray(STATE, "conv", 3, 2, 128, "bfloat16"),
    CacheArray(STATE, "ssm", 1, 128, 8192, "float32"),
)
HYBRID = kv_layout(4, 8, 64, "bfloat16", STATES, (0, 1, 3))


@given(
    st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 7), st.integers(1, 8), st.integers(1, 1 << 20)
)
def test_cut_covers_exactly_and_fits(start: int, count: int, head: int, heads: int, slot_bytes: int) -> None:
    tokens, heads_range = (start, start + count), (head, min(8, head + heads))
    if slot_bytes < (heads_range[1] - head) * LAYOUT.arrays[0].head_bytes:
        with pytest.raises(ValueError, match="larger slots"):
            list(cut(LAYOUT, 0, tokens, heads_range, slot_bytes))
        return
    pieces = list(cut(LAYOUT, 3, tokens, heads_range, slot_bytes))
    position = start
    for piece in pieces:
        assert piece == Piece(3, head, heads_range[1] - head, position, piece.token_count)
        assert 0 < slice_bytes(LAYOUT, piece) <= slot_bytes
        position += piece.token_count
    assert position == start + count
    most = slot_bytes // ((heads_range[1] - head) * LAYOUT.arrays[0].head_bytes)
    assert len(pieces) == -(-count // most), "as few as it takes"
    if pieces:
        sizes = [p.token_count for p in pieces]
        assert max(sizes) - min(sizes) <= 1, "as even as they can be"


@given(st.permutations(range(40)), st.sampled_from([1, 7, 16, 128]), st.data())
def test_runs_map_every_position_once(table: list[int], block_size: int, data: st.DataObject) -> None:
    total = len(table) * block_size
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    mapped = [
        (position + i, row + i)
        for position, row, count in runs(table, block_size, start, stop)
        for i in range(count)
    ]
    assert mapped == [(p, table[p // block_size] * block_size + p % block_size) for p in range(start, stop)]


def test_neighbouring_blocks_are_one_run() -> None:
    assert list(runs([3, 4, 5, 9, 10, 1], 16, 5, 96)) == [(5, 53, 43), (48, 144, 32), (80, 16, 16)]


def test_intersect() -> None:
    assert list(intersect(10, 50, [(0, 12), (20, 30), (45, 60), (60, 70)])) == [(10, 12), (20, 30), (45, 50)]


def test_a_state_is_cut_by_heads() -> None:
    pieces = [*cut(HYBRID, 3, (0, 77), (32, 128), 1 << 20, 2)]
    assert pieces == [Piece(3, first, 32, 77, 0, 2) for first in (32, 64, 96)]
    assert [slice_bytes(HYBRID, piece) for piece in pieces] == [1 << 20] * 3
    assert [slice_bytes(HYBRID, piece) for piece in cut(HYBRID, 0, (0, 9), (0, 2), 4096, 1)] == [2 * 3 * 256]
    assert [HYBRID.arrays[1].heads_of(rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_fingerprint_tells_what_differs_and_nothing_else() -> None:
    assert LAYOUT.fingerprint == "kv12 layers=4 attention.kv=2x8x64"
    states = "state.conv=3x2x128:bfloat16 state.ssm=1x128x8192:float32"
    assert HYBRID.fingerprint == f"kv12 layers=4 @2 attention.kv=2x8x64 @0-1,3 {states}"
    assert (LAYOUT.bytes_per_token, HYBRID.bytes_per_token) == (8192, 2048)
    assert LAYOUT.arrays[0].bytes == 2 * 8 * 64 * 2
    latents = kv_layout(4, 9, 64, "bfloat16", kind=LATENT)
    assert latents.fingerprint == "kv12 layers=4 latent.kv=1x9x64"
    assert latents.bytes_per_token == 4 * 1152
    assert kv_layout(4, 9, 64, "float8_e4m3fn", kind=LATENT).bytes_per_token == 4 * (576 + 9 * 4)
    assert [latents.arrays[0].heads_of(rank, 2) for rank in range(2)] == [(0, 9)] * 2, "copies"
    fp8 = kv_layout(4, 8, 64, "float8_e4m3fn")
    assert fp8.fingerprint == LAYOUT.fingerprint
    assert fp8.arrays[0].bytes == 2 * 8 * (64 + 4), "with scales"


@pytest.mark.parametrize("bad", [(0, 8, 64, "float32"), (4, 70000, 64, "float32"), (4, 8, 64, "int8")])
def test_what_cannot_be_moved_is_named(bad: tuple[int, int, int, str]) -> None:
    with pytest.raises(ValueError, match=r"heads|layers|dtype"):
        kv_layout(*bad)
