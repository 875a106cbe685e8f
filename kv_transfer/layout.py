"""The canonical layout: how KV is cut into slices, for any block size and number of ranks on either side.

On the wire a slice is a dense array ``[2 (K, V), tokens, heads, head_dim]``. It has one layer, one range of
positions and one range of KV heads. In FP8 the scales follow: ``[2, tokens, heads]`` float32. Both sides map
positions to their own block tables; a block size never travels.

A layer may keep states of fixed size for a request, in place of KV. Then a slice is a dense ``[rows, heads,
head_dim]`` of one state of one layer, for one range of heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

WIRE_VERSION = 6
"""In each header. Two sides of different versions refuse each other."""
U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
FP8 = "float8_e4m3fn"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
SCALE_BYTES = 4  # of each K and each V head of a position in FP8


class StateType(msgspec.Struct, frozen=True):
    """A state that each state layer of a model keeps for a request: [rows, heads, head_dim]."""

    name: str
    rows: int
    heads: int  # of the model, over all ranks
    head_dim: int
    dtype: str  # a key of ITEM_BYTES; the same on both sides

    @property
    def head_bytes(self) -> int:
        """Bytes of one head, over all rows."""
        return self.rows * self.head_dim * ITEM_BYTES[self.dtype]


class KVLayout(msgspec.Struct, frozen=True):
    """What both sides must agree on before a byte of KV travels: the shape of a model's whole KV cache.

    Block sizes and numbers of ranks are not in it: these may differ. So may two dtypes that are
    `convertible`: KV travels in the dtype of the sender.
    """

    num_layers: int  # with KV or states
    num_kv_heads: int  # of the model, over all ranks
    head_dim: int
    dtype: str  # of KV: a key of ITEM_BYTES
    states: tuple[StateType, ...] = ()  # of each state layer
    state_layers: tuple[int, ...] = ()  # all other layers have KV

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not 0 < value < 1 << 16:
                raise ValueError(f"{name} is {value}: must be between 1 and 65535")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}: KV is moved as one of {', '.join(ITEM_BYTES)}")

    @property
    def fingerprint(self) -> str:
        """Readable on purpose: a mismatch is refused with both sides' fingerprints in the message."""
        shape = f"layers={self.num_layers} kv_heads={self.num_kv_heads} head_dim={self.head_dim}"
        if self.states:
            shape += f" kv_layers={','.join(map(str, self.kv_layers))}"
            shape += "".join(f" {s.name}={s.rows}x{s.heads}x{s.head_dim}:{s.dtype}" for s in self.states)
        return f"kv{WIRE_VERSION} {shape}"

    @property
    def kv_layers(self) -> list[int]:
        return [layer for layer in range(self.num_layers) if layer not in self.state_layers]

    @property
    def head_bytes(self) -> int:
        """Bytes of K and V of one position and one head in one layer, with their scales."""
        scale = SCALE_BYTES if self.dtype == FP8 else 0
        return 2 * (self.head_dim * ITEM_BYTES[self.dtype] + scale)

    @property
    def bytes_per_token_layer(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def bytes_per_token(self) -> int:
        return len(self.kv_layers) * self.bytes_per_token_layer

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of a request."""
        return len(self.state_layers) * sum(state.heads * state.head_bytes for state in self.states)


def scales_of(dtype: str) -> str:
    """The name in HELLO of the scales that KV of this dtype has."""
    return "token_head" if dtype == FP8 else "none"


def convertible(sent: str, kept: str) -> bool:
    """Whether a receiver that keeps KV in one dtype takes KV in the other. Models that compute in different
    dtypes do not exchange plain KV."""
    return sent == kept or (sent == FP8) != (kept == FP8)


class Slice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One payload: `[2, token_count, head_count, head_dim]` of one layer, or heads of a state of it."""

    layer: U16
    head_start: U16
    head_count: U16
    token_start: U32  # of a state: how many positions it covers
    token_count: U32  # of a state: 0
    state: U16 | None = None  # index into `KVLayout.states`; None: KV


Range = tuple[int, int]  # [start, stop) of positions


def intersect(start: int, stop: int, ranges: Iterable[Range]) -> Iterator[Range]:
    """The parts of [start, stop) that `ranges` contain, in the order of `ranges`."""
    for a, b in ranges:
        if max(a, start) < min(b, stop):
            yield max(a, start), min(b, stop)


def cut(layout: KVLayout, layer: int, tokens: Range, heads: Range, slot_bytes: int) -> Iterator[Slice]:
    """Cut a token range × head range of one layer into as few slices of at most `slot_bytes` as it takes.

    They are as equal as possible, so that no last slice is much smaller than the others.
    """
    start, stop = tokens
    head_start, head_count = heads[0], heads[1] - heads[0]
    most = slot_bytes // (head_count * layout.head_bytes)
    if most < 1:
        raise ValueError(
            f"slot_bytes is {slot_bytes}, less than one position of {head_count} heads "
            f"({head_count * layout.head_bytes} bytes): use larger slots"
        )
    pieces = -(-(stop - start) // most)
    for i in range(pieces, 0, -1):
        count = -(-(stop - start) // i)
        yield Slice(layer, head_start, head_count, start, count)
        start += count


def cut_state(
    layout: KVLayout, layer: int, state: int, positions: int, heads: Range, slot_bytes: int
) -> Iterator[Slice]:
    """Cut heads of a state of one layer, which covers so many positions, as `cut` does with positions."""
    first, stop = heads
    pieces = -(-(stop - first) // (slot_bytes // layout.states[state].head_bytes))
    for i in range(pieces, 0, -1):
        count = -(-(stop - first) // i)
        yield Slice(layer, first, count, positions, 0, state)
        first += count


def heads_of(layout: KVLayout, rank: int, ranks: int, state: int | None = None) -> Range:
    """The heads that a rank holds of KV, or of a state. With fewer heads than ranks each is held by several
    ranks in a row."""
    heads = layout.num_kv_heads if state is None else layout.states[state].heads
    first = rank * heads // ranks
    return first, first + max(1, heads // ranks)


def rank_of(layout: KVLayout, head: int, ranks: int, state: int | None = None) -> int:
    """The first of the ranks that hold the head of KV, or of a state. Slices with it come from there. Raises
    StopIteration if no rank holds it: so many ranks do not share the heads."""
    return next(rank for rank in range(ranks) if head in range(*heads_of(layout, rank, ranks, state)))


def slice_bytes(layout: KVLayout, piece: Slice) -> int:
    if piece.state is not None:
        return piece.head_count * layout.states[piece.state].head_bytes
    return piece.token_count * piece.head_count * layout.head_bytes


def runs(
    block_table: Sequence[int], block_size: int, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Where positions [start, stop) lie in a pool of `[blocks × block_size]` rows.

    Yields (position, row, count) runs, as long as the table allows: neighbouring blocks are one run.
    """
    position = start
    while position < stop:
        index, offset = divmod(position, block_size)
        row = block_table[index] * block_size + offset
        end = min(stop, (index + 1) * block_size)
        while end < stop and block_table[end // block_size] == block_table[end // block_size - 1] + 1:
            end = min(stop, end + block_size)
        yield position, row, end - position
        position = end
