"""The canonical layout: how KV is cut into slices, for any block size and number of ranks on either side.

On the wire a slice is a dense piece of one array of a cache (`kv_names.cache_kinds`) in one layer, for one
range of heads. An array that each token has is cut into ranges of positions:
``[rows, tokens, heads, head_dim]``. In FP8 the scales follow: ``[rows, tokens, heads]`` float32. Both sides
map positions to their own block tables; a block size never travels. An array that each request has is
``[rows, heads, head_dim]``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from baton.kv_names.cache_kinds import FP8, ITEM_BYTES, CacheArray, Range

WIRE_VERSION = 12
"""In each header. Two sides of different versions refuse each other."""
U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Name = Annotated[str, Meta(max_length=64)]


class KVLayout(msgspec.Struct, frozen=True, dict=True):
    """What both sides must agree on before a byte of KV travels: what all layers of a model keep.

    Block sizes and numbers of ranks are not in it: these may differ. So may `dtypes`: the side with the wider
    one converts.
    """

    num_layers: int
    arrays: tuple[CacheArray, ...]  # by `Piece.array`, with the heads of all ranks
    layers: tuple[tuple[int, ...], ...]  # that keep each array, ascending

    @classmethod
    def of(cls, layers: Sequence[Sequence[CacheArray]]) -> "KVLayout":
        """`layers`: of each layer, what it keeps. Arrays of tokens come first."""
        layers_of: dict[CacheArray, list[int]] = {}
        for number, arrays in enumerate(layers):
            for array in arrays:
                layers_of.setdefault(array, []).append(number)
        arrays = tuple(sorted(layers_of, key=lambda array: not array.per_token))
        return cls(len(layers), arrays, tuple(tuple(layers_of[array]) for array in arrays))

    def __post_init__(self) -> None:
        counts = {"layers": self.num_layers, **{f"heads of {x.name}": x.heads for x in self.arrays}}
        for name, value in counts.items():
            if not 0 < value < 1 << 16:
                raise ValueError(f"{name}: {value}: must be between 1 and 65535")
        for array in self.arrays:
            if array.dtype not in ITEM_BYTES:
                raise ValueError(
                    f"dtype of {array.name} is {array.dtype!r}: KV is moved as one of {', '.join(ITEM_BYTES)}"
                )
        if any(array.dtype != self.dtypes.of(array) for array in self.arrays if array.kind.converts):
            raise ValueError(
                "arrays that convert have several dtypes: a session has one for KV, one for states"
            )

    @cached_property
    def dtypes(self) -> "Dtypes":
        of = {array.per_token: array.dtype for array in self.arrays if array.kind.converts}
        return Dtypes(of.get(True, self.arrays[0].dtype), of.get(False, ""))

    def sent_as(self, dtypes: "Dtypes") -> "KVLayout":
        """The layout of slices in these dtypes."""
        if dtypes == self.dtypes:
            return self
        arrays = (replace(x, dtype=dtypes.of(x)) if x.kind.converts else x for x in self.arrays)
        return msgspec.structs.replace(self, arrays=tuple(arrays))

    @cached_property
    def numbers(self) -> Sequence[Sequence[int]]:
        """Of each layer, the numbers of the arrays that it keeps."""
        return [
            [number for number, layers in enumerate(self.layers) if layer in layers]
            for layer in range(self.num_layers)
        ]

    @cached_property
    def sizes(self) -> Sequence[tuple[bool, int]]:
        """Of each array, whether each token has it, and the bytes of one head. Each slice asks for them."""
        return [(array.per_token, array.head_bytes) for array in self.arrays]

    @cached_property
    def token_arrays(self) -> Sequence[tuple[CacheArray, Sequence[int]]]:
        """Those that each token has, with their layers."""
        of_layers = zip(self.arrays, self.layers, strict=True)
        return [(array, layers) for array, layers in of_layers if array.per_token]

    @cached_property
    def token_layers(self) -> Sequence[int]:
        """The layers that keep something of each token."""
        return sorted({layer for _, layers in self.token_arrays for layer in layers})

    @cached_property
    def has_states(self) -> bool:
        """Whether a layer keeps something of each request."""
        return len(self.token_arrays) < len(self.arrays)

    @cached_property
    def fingerprint(self) -> str:
        """Readable on purpose: a mismatch is refused with both sides' fingerprints in the message."""
        everywhere = tuple(range(self.num_layers))
        words, before = [f"kv{WIRE_VERSION} layers={self.num_layers}"], everywhere
        for array, layers in zip(self.arrays, self.layers, strict=True):
            if layers != before:
                words.append(f"@{_ranges(layers)}")
            words.append(array.identity)
            before = layers
        return " ".join(words)

    @cached_property
    def least_slice(self) -> int:
        """Bytes that a slice must be able to have: all heads of a position, or one head of a request."""
        return max(array.bytes if array.per_token else array.head_bytes for array in self.arrays)

    @property
    def bytes_per_token(self) -> int:
        return sum(array.bytes * len(layers) for array, layers in self.token_arrays)


def _ranges(layers: Sequence[int]) -> str:
    """0-2,5 for layers 0, 1, 2 and 5."""
    groups: list[list[int]] = []
    for layer in layers:
        if groups and layer == groups[-1][-1] + 1:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else f"{g[0]}" for g in groups)


class Dtypes(NamedTuple):
    """Those of the arrays that travel in another dtype than one side keeps."""

    kv: _Name
    states: _Name = ""
    """"": no layer has states of heads."""

    def of(self, array: CacheArray) -> str:
        return self.kv if array.per_token else self.states

    def exchanges(self, other: "Dtypes") -> bool:
        """Whether peers with these dtypes send each other slices."""
        return all(map(convertible, other, self, (True, False)))

    def sent_to(self, receiver: "Dtypes") -> "Dtypes":
        """Those in which slices travel: the narrower ones. Of two that are as wide, the sender's."""
        pairs = zip(self, receiver, strict=True)
        return Dtypes(*(min(pair, key=lambda dtype: ITEM_BYTES.get(dtype, 0)) for pair in pairs))

    def __str__(self) -> str:
        return f"KV {self.kv}" + (f", states {self.states}" if self.states else "")


def convertible(one: str, other: str, per_token: bool) -> bool:
    """Whether peers that keep an array in these dtypes exchange it. Models that compute in different dtypes
    do not exchange plain KV; states are in any dtype but FP8."""
    if one == other or not {one, other} <= ITEM_BYTES.keys():
        return one == other
    return (one == FP8) != (other == FP8) if per_token else FP8 not in (one, other)


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which KV or state: heads of one array of one layer, of each token in a range or of a request."""

    layer: U16
    head_start: U16
    head_count: U16
    token_start: U32  # of an array of each request: how many positions it covers
    token_count: U32  # of an array of each request: 0
    array: U16 = 0  # index into `KVLayout.arrays`


def intersect(start: int, stop: int, ranges: Iterable[Range]) -> Iterator[Range]:
    """The parts of [start, stop) that `ranges` contain, in the order of `ranges`."""
    for a, b in ranges:
        if max(a, start) < min(b, stop):
            yield max(a, start), min(b, stop)


def cut(
    layout: KVLayout, layer: int, tokens: Range, heads: Range, slot_bytes: int, array: int = 0
) -> Iterator[Piece]:
    """Cut a token range × head range of one layer into as few slices of at most `slot_bytes` as it takes.

    Heads of an array of each request are cut in place of tokens. It covers positions up to the end of
    `tokens`."""
    (per_token, head_bytes), (first, last) = layout.sizes[array], heads
    if not per_token:
        for start, count in _equal_pieces(first, last, slot_bytes // head_bytes):
            yield Piece(layer, start, count, tokens[1], 0, array)
        return
    position_bytes = (last - first) * head_bytes
    if slot_bytes < position_bytes:
        raise ValueError(
            f"slot_bytes is {slot_bytes}, less than one position of {last - first} heads "
            f"({position_bytes} bytes): use larger slots"
        )
    for start, count in _equal_pieces(*tokens, slot_bytes // position_bytes):
        yield Piece(layer, first, last - first, start, count, array)


def _equal_pieces(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, count) of as few pieces as it takes. They are as equal as possible, so that no last piece is
    much smaller than the others."""
    for i in range(-(-(stop - start) // most), 0, -1):
        count = -(-(stop - start) // i)
        yield start, count
        start += count


def rank_of(layout: KVLayout, head: int, ranks: int, array: int) -> int:
    """The first of the ranks that hold the head of an array. Slices with it come from there. Raises
    StopIteration if no rank holds it: so many ranks do not share the heads."""
    held = layout.arrays[array].heads_of
    return next(rank for rank in range(ranks) if head in range(*held(rank, ranks)))


def slice_bytes(layout: KVLayout, piece: Piece) -> int:
    per_token, head_bytes = layout.sizes[piece.array]
    return (piece.token_count if per_token else 1) * piece.head_count * head_bytes


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
