"""One transfer at its receiver: COMPLETE exactly when every byte asked for came once, in any order."""

import math
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_names.cache_kinds import STATE, CacheArray
from baton.kv_transfer.layout import KVLayout, Piece, cut, slice_bytes
from baton.kv_transfer.protocol.incoming import Fault, Incoming
from baton.kv_transfer.protocol.messages import Commit, FirstToken
from baton.kv_transfer.slices import Slice
from tests.layouts import kv_layout

LAYOUT = kv_layout(2, 4, 8, "float32")
FIRST = FirstToken(3)


def slice_of(piece: Piece, seq: int, *, layout: KVLayout = LAYOUT, length: int | None = None) -> Slice:
    size = slice_bytes(layout, piece) if length is None else length
    return Slice(piece, b"", seq, size)


def incoming(*ranges: tuple[int, int], **other: Any) -> Incoming:
    return Incoming(LAYOUT, ranges, slot_bytes=4096, **other)


def frames_of(ranges: list[tuple[int, int]], slot_bytes: int = 1024) -> list[Slice]:
    pieces = [
        piece for layer in range(2) for r in ranges for piece in cut(LAYOUT, layer, r, (0, 4), slot_bytes)
    ]
    return [slice_of(piece, seq) for seq, piece in enumerate(pieces)]


def take(it: Incoming, h: Slice) -> bool:
    it.begin(h)
    return it.verified(h)


@pytest.mark.all
@given(st.data())
def test_any_cutting_in_any_order(data: st.DataObject) -> None:
    """Overlapping begin and end of frames on several lanes; different slice sizes; several ranges."""
    ranges = [(0, 9), (20, 21), (40, 47)]
    frames = frames_of(ranges, data.draw(st.integers(256, 4000)))
    commit = Commit(FIRST, len(frames), sum(h.size for h in frames))
    it = incoming(*ranges)
    todo: list[Any] = [*data.draw(st.permutations(frames)), "commit"]
    begun: list[Slice] = []
    done = 0
    while todo or begun:
        if begun and (not todo or data.draw(st.booleans())):
            h = begun.pop(data.draw(st.integers(0, len(begun) - 1)))
            complete = it.verified(h)
        else:
            item = todo.pop(data.draw(st.integers(0, len(todo) - 1)))
            if item != "commit":
                it.begin(item)
                begun.append(item)
                continue
            complete = it.commit(commit)
        done += 1
        assert complete == (done == len(frames) + 1)
        assert complete or it.missing_frames > 0 or it.frames == len(frames)
    assert it.bytes == commit.bytes


WHOLE = Piece(0, 0, 4, 0, 8)


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (slice_of(Piece(2, 0, 4, 0, 8), 0), "frame_fields"),
        (slice_of(Piece(0, 0, 4, 0, 8, 1), 0, length=1024), "frame_fields"),
        (slice_of(WHOLE, 0, length=100), "frame_length"),
        (slice_of(Piece(0, 0, 4, 0, 0), 0), "frame_length"),
        (slice_of(Piece(0, 0, 4, 0, 9), 0), "frame_range"),
        (slice_of(Piece(0, 0, 4, 8, 1), 0), "frame_range"),
        (slice_of(Piece(0, 2, 3, 0, 8), 0), "frame_range"),
        (slice_of(WHOLE, 64), "sequence"),
        (slice_of(WHOLE, (1 << 32) - 1), "sequence"),
    ],
)
def test_a_frame_that_does_not_belong(bad: Slice, kind: str) -> None:
    with pytest.raises(Fault) as fault:
        incoming((0, 8)).begin(bad)
    assert fault.value.kind == kind


def test_duplicates() -> None:
    it = incoming((0, 8))
    take(it, slice_of(Piece(0, 0, 4, 2, 4), 5))
    with pytest.raises(Fault, match="sequence number 5 came twice"):
        it.begin(slice_of(Piece(0, 0, 4, 0, 2), 5))
    for start, count in ((2, 4), (0, 3), (5, 3), (3, 1), (0, 8)):
        with pytest.raises(Fault, match="came twice"):
            it.begin(slice_of(Piece(0, 0, 4, start, count), 6 + start * 8 + count))
    take(it, slice_of(Piece(0, 0, 4, 0, 2), 1))
    take(it, slice_of(Piece(0, 0, 4, 6, 2), 2))


def test_duplicates_of_some_heads() -> None:
    """Cut by heads in another way: bytes and frames could add up, and something would still be missing."""
    it = incoming((0, 8))
    take(it, slice_of(Piece(0, 1, 2, 0, 8), 0))
    for seq, (first, count) in enumerate([(0, 4), (0, 2), (2, 2), (1, 1), (1, 2)], 10):
        with pytest.raises(Fault, match="positions 4–6 of layer 0 came twice"):
            it.begin(slice_of(Piece(0, first, count, 4, 2), seq))
    for seq, (first, start, count) in enumerate([(0, 0, 3), (3, 0, 8), (0, 3, 5)], 1):
        take(it, slice_of(Piece(0, first, 1, start, count), seq))
    take(it, slice_of(Piece(1, 0, 4, 0, 8), 4))
    assert (it.bytes, it.missing_frames) == (4096, 0)


@pytest.mark.parametrize("commit", [Commit(FIRST, 2, 4095), Commit(FIRST, 2, 4097), Commit(FIRST, 1, 4096)])
def test_a_commit_that_does_not_match(commit: Commit) -> None:
    it = incoming((0, 8))
    frames = frames_of([(0, 8)], 2048)
    take(it, frames[0])
    with pytest.raises(Fault):
        _ = it.commit(commit) or take(it, frames[1])
    late = incoming((0, 8))
    for h in frames:
        take(late, h)
    with pytest.raises(Fault):
        late.commit(commit)


@pytest.mark.parametrize(
    ("first", "valid"),
    [
        (FirstToken(5, math.nan), False),
        (FirstToken(5, math.inf), False),
        (FirstToken(5, -0.5, (1, 2), (-0.5, math.nan)), False),
        (FirstToken(5, -0.5, (1, 2), (-0.5, -math.inf)), True),
    ],
)
def test_logprobs_of_a_commit_are_numbers(first: FirstToken, valid: bool) -> None:
    """Else the transfer ends, and not the session with all others: a model can produce NaN."""
    it = incoming()
    if valid:
        assert it.commit(Commit(first, 0, 0))
    else:
        with pytest.raises(Fault, match="logprob") as fault:
            it.commit(Commit(first, 0, 0))
        assert fault.value.kind == "commit"


def test_a_second_commit() -> None:
    it = incoming((0, 8))
    it.commit(Commit(FIRST, 2, 4096))
    with pytest.raises(Fault):
        it.commit(Commit(FIRST, 2, 4096))
    with pytest.raises(Fault):
        it.begin(frames_of([(0, 8)])[2])  # beyond its count


# Of 3 layers the first has KV; the others have a state of 1,024 bytes and one of 512 bytes.
HYBRID = kv_layout(
    3,
    4,
    8,
    "float32",
    (CacheArray(STATE, "a", 2, 4, 32, "float32"), CacheArray(STATE, "b", 1, 2, 64, "float32")),
    (1, 2),
)


def of_hybrid(piece: Piece, seq: int, length: int | None = None) -> Slice:
    return slice_of(piece, seq, layout=HYBRID, length=length)


def hybrid_frames(stop: int = 8) -> list[Slice]:
    pieces = [*cut(HYBRID, 0, (0, stop), (0, 4), 4096)]
    for layer in (1, 2):
        for part, heads in ((1, (0, 4)), (2, (0, 2))):
            pieces += cut(HYBRID, layer, (0, stop), heads, 512, part)
    return [of_hybrid(piece, seq) for seq, piece in enumerate(pieces)]


def hybrid(states_at: tuple[int, ...] = (8,)) -> Incoming:
    return Incoming(HYBRID, ((0, 8),), slot_bytes=512, states_at=states_at)


@given(st.permutations(range(8)))
def test_a_transfer_is_complete_with_all_of_its_states(order: list[int]) -> None:
    frames, it = hybrid_frames(), hybrid()
    assert [h.size for h in frames] == [2048, *[512] * 3, *[512] * 3]
    assert it.missing_frames == 10  # KV of 2,048 bytes in slots of 512
    commit = Commit(FIRST, len(frames), sum(h.size for h in frames))
    done = [it.commit(commit) if i == 7 else take(it, frames[i]) for i in order]
    assert done == [False] * 7 + [True]
    assert it.missing_frames == 0


def test_a_transfer_has_the_states_after_several_positions() -> None:
    it = Incoming(HYBRID, ((0, 4), (6, 8)), slot_bytes=4096, states_at=(4, 8))
    [*kv] = [piece for tokens in ((0, 4), (6, 8)) for piece in cut(HYBRID, 0, tokens, (0, 4), 4096)]
    states = [
        piece
        for at in (8, 4)
        for layer in (1, 2)
        for part, heads in ((1, (0, 4)), (2, (0, 2)))
        for piece in cut(HYBRID, layer, (0, at), heads, 4096, part)
    ]
    frames = [of_hybrid(piece, seq) for seq, piece in enumerate([*states, *kv])]
    with pytest.raises(Fault, match="positions 6–6 were not asked for"):
        it.begin(of_hybrid(Piece(1, 0, 2, 6, 0, 1), 0))
    for h in frames[:-1]:
        assert not take(it, h)
    assert not it.commit(Commit(FIRST, len(frames), sum(h.size for h in frames)))
    assert take(it, frames[-1])


@pytest.mark.parametrize("missing", range(7))
def test_a_commit_that_leaves_out_a_frame_of_a_state(missing: int) -> None:
    it, frames = hybrid(), hybrid_frames()
    del frames[missing]
    for seq, h in enumerate(frames):
        take(it, msgspec.structs.replace(h, seq=seq))
    with pytest.raises(Fault) as fault:
        it.commit(Commit(FIRST, 6, sum(h.size for h in frames)))
    assert fault.value.kind == "commit"


OF_STATE = Piece(1, 0, 2, 8, 0, 1)


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (of_hybrid(Piece(0, 0, 2, 8, 0, 1), 0), "frame_fields"),
        (of_hybrid(Piece(3, 0, 2, 8, 0, 1), 0), "frame_fields"),
        (of_hybrid(Piece(1, 0, 2, 8, 0, 3), 0, length=512), "frame_fields"),
        (of_hybrid(Piece(1, 0, 2, 8, 0, 301), 0, length=512), "frame_fields"),
        (slice_of(Piece(1, 0, 4, 0, 8), 0), "frame_fields"),  # KV of a layer that has states
        (of_hybrid(Piece(1, 0, 1, 8, 0, 1), 0, length=512), "frame_length"),
        (of_hybrid(Piece(1, 3, 2, 8, 0, 1), 0), "frame_range"),
        (of_hybrid(Piece(1, 0, 2, 7, 0, 1), 0), "frame_range"),  # after fewer positions
        (of_hybrid(Piece(1, 0, 2, 7, 1, 1), 0), "frame_range"),
        (of_hybrid(Piece(1, 1, 3, 8, 0, 1), 0), "frame_range"),  # twice
        (of_hybrid(OF_STATE, 8 * 4 + 2 * (4 + 2)), "sequence"),
    ],
)
def test_a_frame_of_a_state_that_does_not_belong(bad: Slice, kind: str) -> None:
    it = hybrid()
    it.begin(of_hybrid(Piece(1, 2, 2, 8, 0, 1), 9))
    with pytest.raises(Fault) as fault:
        it.begin(bad)
    assert fault.value.kind == kind


@pytest.mark.parametrize("early", [False, True])
def test_states_come_with_content_after_its_end(early: bool) -> None:
    """HAVE says where the end is. Frames may come before it."""
    it = Incoming(HYBRID, ((0, 8),), slot_bytes=512, states_at=(4, 8), narrows=True)
    frames = hybrid_frames(4)
    for frame in frames if early else ():
        take(it, frame)
    it.narrow(4)
    for frame in () if early else frames:
        take(it, frame)
    assert it.missing_frames == 0
    assert it.commit(Commit(FIRST, len(frames), sum(frame.size for frame in frames)))


def test_states_of_content_at_two_positions_are_refused() -> None:
    for stop, later in ((4, 8), (8, 4)):
        it = Incoming(HYBRID, ((0, 8),), slot_bytes=512, states_at=(4, 8), narrows=True)
        take(it, of_hybrid(Piece(1, 0, 1, stop, 0, 1), 0))
        with pytest.raises(Fault, match="not asked for"):
            it.begin(of_hybrid(Piece(1, 1, 1, later, 0, 1), 1))
        with pytest.raises(Fault, match="not those after"):
            it.narrow(later)


def test_a_high_sequence_number_costs_no_memory() -> None:
    """The peer chooses it. The transfer has 51 million positions of heads in its layers."""
    it = Incoming(kv_layout(64, 8, 8, "float32"), [(0, 100_000)], slot_bytes=4096)
    first = Piece(0, 0, 8, 0, 1)
    tracemalloc.start()
    take(it, slice_of(first, 51_199_999))
    with pytest.raises(Fault, match="COMMIT of 1 frames after a later one came"):
        it.commit(Commit(FIRST, 1, 512))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
