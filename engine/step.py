"""A step as plain arrays: everything that one rank computes, without the requests that it is for.

    engine.core builds a `Step` ─▶ forward pass ─▶ logits of the sampled rows
    engine.core builds `Adjustments` ─▶ logits as single requests want them ─▶ tokens, log probabilities

All arrays are numpy arrays on the host. `engine.execution` reads nothing else. So a test can write a step by
hand, a CUDA graph can replay it, and another process can receive it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_type_hints

import numpy as np

Array = TypeVar("Array")

NOT_FINITE = -1
"""Stands in place of a token: the model's logits are not all finite, so nothing can be sampled from them."""
NO_CHOICE = -2
"""Stands in place of a token: the request's parameters bar every token, or drive a logit beyond float32."""


class Layout(NamedTuple):
    """The definition of an array of a step."""

    dtype: type[np.number]
    dims: tuple[str | int, ...]
    """A name stands for the same size in all arrays of a step. No size is above the number of tokens, except
    `width` and `ahead`."""
    on_device: bool = True
    """Whether the device reads the array."""
    padding: int | None = 0
    """What a graph reads past the end of the array. None: it reads nothing there."""

    def shape(self, sizes: Mapping[str, int]) -> list[int]:
        return [sizes[dim] if isinstance(dim, str) else dim for dim in self.dims]


class Variant(IntEnum):
    """How much sampling has to do for a batch; each variant includes the ones before."""

    GREEDY = 0
    DRAWN = 1  # some rows are drawn at random
    FILTERED = 2  # and some of these are limited by top_k, top_p or min_p


class Draws(NamedTuple, Generic[Array]):
    """How the token of each sampled row is drawn, as numpy arrays or as tensors."""

    temperature: Annotated[Array, Layout(np.float32, ("sampled",))]  # 0: the most likely token
    keys: Annotated[Array, Layout(np.int32, ("sampled",))]  # stands for all random numbers of the row
    top_k: Annotated[Array, Layout(np.int32, ("sampled",))]  # the size of the vocabulary: no limit
    top_p: Annotated[Array, Layout(np.float32, ("sampled",))]  # above 1: no limit
    min_p: Annotated[Array, Layout(np.float32, ("sampled",))]


class Scored(NamedTuple):
    """Tokens of prompts that get log probabilities."""

    rows: Annotated[np.ndarray, Layout(np.int64, ("scored",), on_device=False)]
    """Index of the token before each of them, which predicts it."""
    tokens: Annotated[np.ndarray, Layout(np.int64, ("scored",), on_device=False)]
    top: int  # the most alternatives that any of them wants


NOT_SCORED = Scored(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)


class Ahead(NamedTuple):
    """What a step with drafts needs beside its other arrays. All are empty if the engine has no drafts.

    The step before may be under way, with drafts of its own. Then the host does not know where its requests
    go on. Column a of these arrays is for a request of which that step accepts a drafts. Column 0 is that of
    the other arrays. Positions, contexts and `Step.source_rows` are larger by a."""

    shift_rows: Annotated[np.ndarray, Layout(np.int32, ("decode rows",), padding=-1)]
    """For each token of the requests that decode: the first row in which the step before samples its request,
    if that step has drafts of it; else −1. There that step counts the drafts that it accepts, which shift
    the request."""
    token_ids: Annotated[np.ndarray, Layout(np.int32, ("decode rows", "ahead"))]
    guess_index: Annotated[np.ndarray, Layout(np.int32, ("decode rows",), padding=-1)]
    """For each token of the requests that decode: the index of the draft head's guess that it is, if the host
    does not know the guess yet; else −1. The step before makes ahead − 1 guesses in each of its rows: guess j
    of row i has index (ahead − 1) · i + j."""
    slots: Annotated[np.ndarray, Layout(np.int64, ("decode rows", "ahead"))]
    keys: Annotated[np.ndarray, Layout(np.int32, ("drafted", "ahead"))]
    """Of each sampled row, as in `Draws`."""
    places: Annotated[np.ndarray, Layout(np.int32, ("decode rows",))]
    """As in `AttentionMetadata`."""
    drafts: Annotated[np.ndarray, Layout(np.int64, ("drafted",))]
    """For each sampled row, the number of drafts that follow it in its request."""


class Drafting(NamedTuple):
    """What a draft head computes after the sampling of a step: the KV of all tokens, and guesses of the
    tokens that follow those sampled. All arrays are empty if there is no head."""

    next_ids: Annotated[np.ndarray, Layout(np.int32, ("followed",))]
    """The token after each token, if the host knows it: `next_rows` is −1. Elsewhere undefined."""
    next_rows: Annotated[np.ndarray, Layout(np.int32, ("followed",), padding=-1)]
    """The row in which this step samples the token after each token; −1: the host knows it."""
    first_rows: Annotated[np.ndarray, Layout(np.int64, ("drafting",))]
    """Of each request that gets guesses, the first sampled row."""
    table_rows: Annotated[np.ndarray, Layout(np.int64, ("drafting",))]
    """Its row in the block tables on the device."""
    capacities: Annotated[np.ndarray, Layout(np.int64, ("drafting",))]
    """Positions in its blocks. 0: it pads a graph."""
    count: int
    """Guesses of each of them."""


class Pieces:
    """Rows that lie in several arrays, as one array [rows, bytes] uint8. A device reads them from there.

    Attributes:
        pieces: the arrays, each [rows, bytes] uint8.
        shape: of all of them.
    """

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self.pieces = pieces
        self.shape = sum(map(len, pieces)), pieces[0].shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A copy."""
        return np.concatenate(self.pieces)


class ImageInputs(NamedTuple):
    """The tokens of a step that are part of an image."""

    index: Annotated[np.ndarray, Layout(np.int32, ("pictured",), padding=-1)]
    """For each token of the step: the number of its image row, −1: it is text. Empty: no token is part of an
    image."""
    embeddings: Annotated[np.ndarray | Pieces, Layout(np.uint8, ("image rows", "image bytes"))]
    """Of each image row, in the dtype of the model: what takes the place of the token's embedding, then what
    is added behind the first layers of the model."""
    positions: Annotated[np.ndarray, Layout(np.int64, ("image rows", 3))]
    """Positions in time, from the top and from the left, for rotation."""
    seen_whole: Annotated[np.ndarray, Layout(np.int64, ("whole images", 3), on_device=False)]
    """(chunk, start, stop) of the images whose tokens see all of their image. Chunks are the requests that do
    not decode. Empty: a token sees only those before it."""


NO_ROWS = np.zeros(0, dtype=np.int64)
NO_SHIFT = NO_ROWS.astype(np.int32)
NO_IMAGES = ImageInputs(NO_SHIFT, np.zeros((0, 0), np.uint8), *[np.zeros((0, 3), np.int64)] * 2)
NO_DRAFTING = Drafting(NO_ROWS.astype(np.int32), NO_ROWS.astype(np.int32), NO_ROWS, NO_ROWS, NO_ROWS, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """Queries of requests, one request after the other; requests that decode come first.

    Commands to other ranks, uploads and the inputs of graphs follow from these definitions: each field is an
    array with a `Layout`, a number, or a record of these. A field that has the name of one in
    `AttentionMetadata` becomes that one.

    The last tokens of a request that decodes may be *drafts*: guesses of its next tokens (`Ahead`)."""

    token_ids: Annotated[np.ndarray, Layout(np.int32, ("tokens",))]
    """Of tokens that the host knows: `source_rows` and `Ahead.guess_index` are −1. Elsewhere undefined."""
    source_rows: Annotated[np.ndarray, Layout(np.int32, ("tokens",), padding=-1)]
    """The row in which the step before samples each token, if the host does not know it yet; else −1."""
    positions: Annotated[np.ndarray, Layout(np.int64, ("tokens",))]
    slots: Annotated[np.ndarray, Layout(np.int64, ("tokens",), padding=-1)]
    """Where the KV of each token goes."""
    window_slots: Annotated[np.ndarray, Layout(np.int64, ("window rows",), padding=-1)]
    """The same, of layers with windows. Empty: all layers have the same blocks."""
    query_lengths: Annotated[np.ndarray, Layout(np.int64, ("requests",), on_device=False)]
    """Tokens of each request in this step."""
    contexts: Annotated[np.ndarray, Layout(np.int32, ("requests",))]
    """Positions of each request, those of this step included."""
    block_tables: Annotated[np.ndarray, Layout(np.int32, ("requests", "width"), padding=None)]
    """Zero past the blocks of a request. If layers with windows have blocks of their own, the second half of
    each row has these."""
    sampled_rows: Annotated[np.ndarray, Layout(np.int64, ("sampled",))]
    """Indices of the tokens that get a next token."""
    draws: Draws[np.ndarray]
    state_slots: Annotated[np.ndarray, Layout(np.int32, ("states",))]
    """The states of each request. Empty: no layer has states."""
    state_copies: Annotated[np.ndarray, Layout(np.int32, ("state rows",))]
    """As `AttentionMetadata.state_copies`, for each token. Empty: no layer has states."""
    restores: Annotated[np.ndarray, Layout(np.int64, ("restores", 2), on_device=False)]
    """(from, to) slots of states that are copied before the step."""
    saves: Annotated[np.ndarray, Layout(np.int64, ("saves", 2), on_device=False)]
    """The same, after the step."""
    scored: Scored
    ahead: Ahead
    drafting: Drafting
    images: ImageInputs
    rotary_shift: Annotated[np.ndarray, Layout(np.int32, ("shifted",))]
    """For each token that is not part of an image: its position for rotation, less its position. An image has
    as many positions for rotation as its longer side has tokens. Empty: no request has an image."""
    num_decodes: int
    """Requests whose queries attend one by one, each with a context of its own. The queries of a later
    request attend together."""
    hands_over: bool
    """KV of some request leaves layer by layer, so `layer_done` must be called."""
    awaits_kv: bool
    """Rank 0 waits in `layer_done` for KV from other workers, and the other ranks wait for rank 0."""
    variant: Variant

    @property
    def decode_rows(self) -> int:
        """Tokens of the requests that decode."""
        if not self.num_prefills:
            return len(self.token_ids)
        return int(self.query_lengths[: self.num_decodes].sum())

    @property
    def num_prefills(self) -> int:
        return len(self.contexts) - self.num_decodes

    @property
    def prefills(self) -> list[tuple[int, int]]:
        """(start, stop) positions of each request that does not decode."""
        if not self.num_prefills:
            return []
        stops = self.contexts[self.num_decodes :]
        starts = stops - self.query_lengths[self.num_decodes :]
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    @property
    def whole_images(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """`ImageInputs.seen_whole`, by chunk."""
        by_chunk: dict[int, list[tuple[int, int]]] = {}
        for chunk, start, stop in self.images.seen_whole.tolist():
            by_chunk.setdefault(chunk, []).append((start, stop))
        return by_chunk


RECORDS: Mapping[str, Any] = {
    "draws": Draws,
    "scored": Scored,
    "ahead": Ahead,
    "drafting": Drafting,
    "images": ImageInputs,
}
"""The fields of a step that are records."""


def _leaves(record: type) -> dict[str, Any]:
    """The `Layout` of each array of a record, and the type of each number. Names of nested fields have
    dots."""
    leaves: dict[str, Any] = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        inner = RECORDS.get(name)
        if inner is not None:
            leaves |= {f"{name}.{leaf}": kind for leaf, kind in _leaves(inner).items()}
        else:
            leaves[name] = hint.__metadata__[0] if hasattr(hint, "__metadata__") else hint
    return leaves


NOT_AHEAD = Ahead(*(np.zeros([0, 1][: len(layout.dims)], layout.dtype) for layout in _leaves(Ahead).values()))
_LEAVES = _leaves(Step)
ARRAYS: Mapping[str, Layout] = {name: x for name, x in _LEAVES.items() if isinstance(x, Layout)}
"""The arrays of a step."""
NUMBERS: Mapping[str, type[int]] = {name: x for name, x in _LEAVES.items() if name not in ARRAYS}
"""Its other fields."""
DIMENSIONS = list(dict.fromkeys(d for layout in ARRAYS.values() for d in layout.dims if isinstance(d, str)))

arrays_of = attrgetter(*ARRAYS)
"""The arrays of a step, in the order of `ARRAYS`."""
numbers_of = attrgetter(*NUMBERS)
"""The numbers of a step, in the order of `NUMBERS`."""


def assembled(leaves: Mapping[str, Any]) -> Step:
    """The step with these arrays and numbers."""
    fields = {name: leaf for name, leaf in leaves.items() if "." not in name}
    for name, record in RECORDS.items():
        fields[name] = record(*(leaves[f"{name}.{field}"] for field in record._fields))
    return Step(**fields)
