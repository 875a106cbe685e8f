"""A step as plain arrays: everything that one rank computes, without the requests that it is for.

    engine.core builds a `Step` ─▶ forward pass ─▶ logits of the sampled rows
    engine.core builds `Adjustments` ─▶ logits as single requests want them ─▶ tokens, log probabilities

All arrays are numpy arrays on the host. `engine.execution` reads nothing else. So a test can write a step by
hand, a CUDA graph can replay it, and another process can receive it.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
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


class Draft(NamedTuple):
    """The drafts of one request in a step."""

    guesses: Sequence[int] | None
    """Of the tokens at successive positions, from the first one that the step may sample. The drafts are
    guesses[a : a + count], if the step before accepts a drafts. None: the draft head makes them in the step
    before, of the tokens after those that this step accepts, and the host does not know them yet."""
    count: int
    slack: int = 0
    """Drafts of the step before, if its tokens are not known. There are slack + count guesses."""

    def right(self, tokens: Sequence[int]) -> int:
        """How many drafts are right, if the step samples these tokens before them. There is no slack."""
        assert self.guesses is not None, "the device counts the right ones of these"
        same = (guess == token for guess, token in zip(self.guesses, tokens, strict=False))
        return sum(takewhile(bool, same))


def arrange(
    token_ids: Sequence[int] | np.ndarray,
    starts: Sequence[int],
    stops: Sequence[int],
    tables: Sequence["array[int]"],
    sampled: Sequence[int],
    variant: Variant,
    draws: Draws[np.ndarray],
    *,
    num_decodes: int,
    hands_over: bool,
    awaits_kv: bool = False,
    block_size: int,
    table_width: int | None,
    source_rows: Sequence[int] | None = None,
    scored: Scored = NOT_SCORED,
    state_slots: Sequence[int] | None = None,
    restores: Sequence[tuple[int, int]] = (),
    saves: Sequence[tuple[int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
    drafts: Mapping[int, Draft] | None = None,
    keys: np.ndarray | None = None,
    following: Mapping[int, int] | None = None,
    guessed: Sequence[int] = (),
    guesses: int = 0,
    window_blocks: np.ndarray | None = None,
) -> Step:
    """Lays out a step.

    Request i computes positions [starts[i], stops[i]) with block table tables[i]. `token_ids` has the tokens
    of all requests in order. `sampled` has the numbers of the requests that get a token, ascending.
    `table_width`: of the block tables; None: as many blocks as the longest table has. `source_rows`:
    of each request, the first row in which the step before samples it, if the host does not know the first of
    its tokens here; else −1. None: the host knows all tokens. `state_slots`
    None: no layer has states. `copies` (row, slot): the states after this row of a prompt are copied to the
    slot, before the step computes later rows. `drafts`: by number of the request, behind its tokens. `keys`
    as in `Ahead`; None: the engine has no drafts. `following`: the token after the last one of each request
    that gets none; None: there is no draft head. It makes `guesses` for each of the requests `guessed`, which
    are among `sampled`. `window_blocks`: the block in layers with windows, by that in other layers. None: it
    is the same. The other arguments are as in `Step`."""
    drafts = drafts or {}
    ends_at = np.array(stops)
    for i, draft in drafts.items():
        ends_at[i] += draft.count
    lengths = ends_at - np.array(starts)
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - ends_at, lengths)
    padded, width = _padded(tables, table_width, window_blocks)
    request = np.repeat(np.arange(len(lengths)), lengths)
    index, offset, size = positions // block_size, positions % block_size, np.int64(block_size)
    slots = padded[request, index] * size + offset
    in_windows = window_blocks is not None
    window_slots = padded[request, width + index] * size + offset if in_windows else NO_ROWS
    state_copies = np.zeros(0 if state_slots is None else len(positions), dtype=np.int32)
    for row, slot in copies:
        state_copies[row] = slot + 1
    row_counts = np.array([drafts[i].count + 1 if i in drafts else 1 for i in sampled], dtype=np.int64)
    drafts_behind = np.repeat(np.cumsum(row_counts), row_counts) - np.arange(1, row_counts.sum() + 1)
    sampled_rows = np.repeat(ends[list(sampled)] - 1, row_counts) - drafts_behind
    ids = _with_drafts(token_ids, drafts, ends)
    begins = ends - lengths
    sources = np.full(len(ids), -1, dtype=np.int32)
    if source_rows is not None:
        sources[begins] = source_rows
    if keys is None:
        ahead = NOT_AHEAD
    else:
        # With states, requests with drafts come after those without, and attend as prompts do.
        last = max(num_decodes, 1 + max(drafts, default=-1))
        rows = int(ends[last - 1]) if last else 0
        later = positions[:rows, None] + np.arange(keys.shape[1])
        blocks = padded[request[:rows, None], np.minimum(later // block_size, width - 1)]
        ahead = Ahead(
            shift_rows=np.full(rows, -1, dtype=np.int32),
            token_ids=np.repeat(ids[:rows, None], keys.shape[1], axis=1),
            guess_index=np.full(rows, -1, dtype=np.int32),
            slots=blocks * np.int64(block_size) + later % block_size,
            keys=keys,
            places=np.where(request[:rows] < num_decodes, np.arange(rows) - begins[request[:rows]], 0).astype(
                np.int32
            ),
            drafts=drafts_behind,
        )
        _look_ahead(drafts, begins, ends, sources, ahead)
    drafting = NO_DRAFTING
    if following is not None:
        next_ids = np.append(ids[1:], ids[:1])
        next_ids[ends - 1] = [following.get(i, 0) for i in range(len(ends))]
        next_rows = np.full(len(ids), -1, dtype=np.int32)
        next_rows[sampled_rows] = np.arange(len(sampled_rows))
        # On the device, each query that decodes has a row in the block tables.
        first_rows = np.searchsorted(sampled_rows, begins[list(guessed)])
        rows = int(ends[num_decodes - 1]) if num_decodes else 0
        table_rows = [begins[i] if i < num_decodes else rows + i - num_decodes for i in guessed]
        capacities = np.array([len(tables[i]) for i in guessed], dtype=np.int64) * block_size
        drafting = Drafting(
            next_ids, next_rows, first_rows, np.array(table_rows, dtype=np.int64), capacities, guesses
        )
    return Step(
        token_ids=ids,
        source_rows=sources,
        positions=positions,
        slots=slots,
        window_slots=window_slots,
        query_lengths=lengths,
        contexts=ends_at.astype(np.int32),
        block_tables=padded,
        sampled_rows=sampled_rows,
        draws=draws,
        state_slots=np.array(() if state_slots is None else state_slots, dtype=np.int32),
        state_copies=state_copies,
        restores=_pairs(restores),
        saves=_pairs(saves),
        scored=scored,
        ahead=ahead,
        drafting=drafting,
        images=NO_IMAGES,
        rotary_shift=NO_SHIFT,
        num_decodes=num_decodes,
        hands_over=hands_over,
        awaits_kv=awaits_kv,
        variant=variant,
    )


def _with_drafts(
    token_ids: Sequence[int] | np.ndarray, drafts: Mapping[int, Draft], ends: np.ndarray
) -> np.ndarray:
    """The token ids of a step whose requests end at these rows, if the step before accepts no draft."""
    if not drafts:
        return np.array(token_ids, dtype=np.int32)
    is_draft = np.zeros(ends[-1], dtype=bool)
    ids = np.zeros(ends[-1], dtype=np.int32)
    for i, draft in drafts.items():
        rows = slice(ends[i] - draft.count, ends[i])
        is_draft[rows] = True
        if draft.guesses is not None:
            ids[rows] = draft.guesses[: draft.count]
    ids[~is_draft] = token_ids
    return ids


def _look_ahead(
    drafts: Mapping[int, Draft], begins: np.ndarray, ends: np.ndarray, source_rows: np.ndarray, ahead: Ahead
) -> None:
    """Writes to `ahead` what comes after drafts, the ids of drafts, and the indices of guesses. Request i has
    the rows [begins[i], ends[i])."""
    guesses_per_row = ahead.token_ids.shape[1] - 1
    for i, (guesses, count, slack) in drafts.items():
        begin, first, columns = begins[i], ends[i] - count, slack + 1
        row = source_rows[begin]
        if guesses is None:
            ahead.guess_index[first : ends[i]] = row * guesses_per_row + np.arange(count)
        else:
            for j in range(count):
                ahead.token_ids[first + j, :columns] = guesses[j : j + columns]
        if slack:
            ahead.shift_rows[begin : ends[i]] = row


NO_PAIRS = np.zeros((0, 2), dtype=np.int64)


def _pairs(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, dtype=np.int64) if pairs else NO_PAIRS


def _padded(
    tables: Sequence["array[int]"], width: int | None, window_blocks: np.ndarray | None
) -> tuple[np.ndarray, int]:
    """[requests, width] int32, and how many of the columns are for the tables themselves. A loop over the
    rows would take longer than the rest of `arrange`."""
    used, halves = np.array([len(table) for table in tables]), 1 if window_blocks is None else 2
    columns = width // halves if width else int(used.max())
    padded = np.zeros((len(tables), columns * halves), dtype=np.int32)
    begins = np.arange(len(tables)) * padded.shape[1] - (np.cumsum(used) - used)
    flat = np.frombuffer(b"".join(tables), dtype=np.int32)
    at = np.arange(len(flat)) + np.repeat(begins, used)
    padded.reshape(-1)[at] = flat
    if window_blocks is not None:
        padded.reshape(-1)[at + columns] = window_blocks[flat]
    return padded, columns
