"""The canonical layout: how KV is cut into slices, for any block size and number of ranks on either side.

On the wire a slice is a dense piece of one array of a cache (`content.cache_kinds`) in one layer, for one
range of heads. An array that each token has is cut into ranges of positions:
``[rows, tokens, heads, head_dim]``. In FP8 the scales follow: ``[rows, tokens, heads]`` float32. Both sides
map positions to their own block tables; a block size never travels. An array that each request has is
``[rows, heads, head_dim]``.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.content.cache_kinds import FP8, ITEM_BYTES, KINDS, CacheArray, Range

WIRE_VERSION = 8
"""In each header. Two sides of different versions refuse each other."""
U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]


class KVLayout(msgspec.Struct, frozen=True, dict=True):
    """What both sides must agree on before a byte of KV travels: the shape of a model's whole KV cache.

    Block sizes and numbers of ranks are not in it: these may differ. So may two dtypes that are
    `convertible`: KV travels in the dtype of the sender.
    """

    num_layers: int
    num_kv_heads: int  # of the model, over all ranks
    head_dim: int
    dtype: str  # of KV: a key of ITEM_BYTES
    states: tuple[CacheArray, ...] = ()  # of each state layer
    state_layers: tuple[int, ...] = ()  # all other layers have KV
    kind: str = "attention"  # of the layers with KV: a key of KINDS

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not 0 < value < 1 << 16:
                raise ValueError(f"{name} is {value}: must be between 1 and 65535")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}: KV is moved as one of {', '.join(ITEM_BYTES)}")

    @cached_property
    def arrays(self) -> Sequence[CacheArray]:
        """By `Slice.array`: what the layers keep of each token, then the states."""
        rows = KINDS[self.kind].rows
        assert rows is not None, "a kind with KV has one array"
        kv = CacheArray(self.kind, "kv", rows, self.num_kv_heads, self.head_dim, self.dtype)
        return kv, *self.states

    def layers_of(self, array: int) -> Sequence[int]:
        """The layers that keep this array."""
        return self.kv_layers if self.arrays[array].per_token else self.state_layers

    @property
    def fingerprint(self) -> str:
        """Readable on purpose: a mismatch is refused with both sides' fingerprints in the message."""
        kv, *states = (array.identity for array in self.arrays)
        if states:
            kv += f" kv_layers={','.join(map(str, self.kv_layers))}"
        return " ".join([f"kv{WIRE_VERSION} layers={self.num_layers}", kv, *states])

    @cached_property
    def kv_layers(self) -> list[int]:
        return [layer for layer in range(self.num_layers) if layer not in self.state_layers]

    @property
    def bytes_per_token_layer(self) -> int:
        return self.arrays[0].bytes

    @property
    def bytes_per_token(self) -> int:
        return len(self.kv_layers) * self.bytes_per_token_layer


def convertible(sent: str, kept: str) -> bool:
    """Whether a receiver that keeps KV in one dtype takes KV in the other. Models that compute in different
    dtypes do not exchange plain KV."""
    return sent == kept or (sent == FP8) != (kept == FP8)


class Slice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One payload: heads of one array of one layer, of each token in a range or of a request."""

    layer: U16
    head_start: U16
    head_count: U16
    token_start: U32  # of a state: how many positions it covers
    token_count: U32  # of a state: 0
    array: U16 = 0  # index into `KVLayout.arrays`; 0: KV


def intersect(start: int, stop: int, ranges: Iterable[Range]) -> Iterator[Range]:
    """The parts of [start, stop) that `ranges` contain, in the order of `ranges`."""
    for a, b in ranges:
        if max(a, start) < min(b, stop):
            yield max(a, start), min(b, stop)


def cut(
    layout: KVLayout, layer: int, tokens: Range, heads: Range, slot_bytes: int, array: int = 0
) -> Iterator[Slice]:
    """Cut a token range × head range of one layer into as few slices of at most `slot_bytes` as it takes.

    Heads of a state are cut in place of tokens. The state covers positions up to the end of `tokens`."""
    kept, (first, last) = layout.arrays[array], heads
    if not kept.per_token:
        for start, count in _equal_pieces(first, last, slot_bytes // kept.head_bytes):
            yield Slice(layer, start, count, tokens[1], 0, array)
        return
    position_bytes = (last - first) * kept.head_bytes
    if slot_bytes < position_bytes:
        raise ValueError(
            f"slot_bytes is {slot_bytes}, less than one position of {last - first} heads "
            f"({position_bytes} bytes): use larger slots"
        )
    for start, count in _equal_pieces(*tokens, slot_bytes // position_bytes):
        yield Slice(layer, first, last - first, start, count, array)


def _equal_pieces(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, count) of as few pieces as it takes. They are as equal as possible, so that no last piece is
    much smaller than the others."""
    for i in range(-(-(stop - start) // most), 0, -1):
        count = -(-(stop - start) // i)
        yield start, count
        start += count


def rank_of(layout: KVLayout, head: int, ranks: int, array: int = 0) -> int:
    """The first of the ranks that hold the head of an array. Slices with it come from there. Raises
    StopIteration if no rank holds it: so many ranks do not share the heads."""
    held = layout.arrays[array].heads_of
    return next(rank for rank in range(ranks) if head in range(*held(rank, ranks)))


def slice_bytes(layout: KVLayout, piece: Slice) -> int:
    return layout.arrays[piece.array].bytes_of(piece.head_count, piece.token_count)


def runs(
    block_table: Sequence[int], block_size: int, start: int, stop: int, *, joined: bool = True
) -> Iterator[tuple[int, int, int]]:
    """Where positions [start, stop) lie in a pool of `[blocks × block_size]` rows.

    Yields (position, row, count) runs, as long as the table allows: neighbouring blocks are one run. If they
    are not `joined` in memory, each block is.
    """
    position = start
    while position < stop:
        index, offset = divmod(position, block_size)
        row = block_table[index] * block_size + offset
        end = min(stop, (index + 1) * block_size)
        while joined and end < stop:
            if block_table[end // block_size] != block_table[end // block_size - 1] + 1:
                break
            end = min(stop, end + block_size)
        yield position, row, end - position
        position = end
