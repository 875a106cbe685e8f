"""A step as plain arrays: everything that one rank computes, without the requests that it is for.

    engine.core builds a `Step` ─▶ forward pass ─▶ logits of the sampled rows
    engine.core builds `Adjustments` ─▶ logits as single requests want them ─▶ tokens, log probabilities

All arrays are numpy arrays on the host. `engine.execution` reads nothing else. So a test can write a step by
hand, a CUDA graph can replay it, and another process can receive it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np

Array = TypeVar("Array")

NOT_FINITE = -1
"""Stands in place of a token: the model's logits are not all finite, so nothing can be sampled from them."""
NO_CHOICE = -2
"""Stands in place of a token: the request's parameters bar every token, or drive a logit beyond float32."""


class Variant(Enum):
    """How much sampling has to do for a batch; each variant includes the ones before."""

    GREEDY = 0
    DRAWN = 1  # some rows are drawn at random
    FILTERED = 2  # and some of these are limited by top_k, top_p or min_p


class Draws(NamedTuple, Generic[Array]):
    """How the token of each sampled row is drawn: [rows] each, as numpy arrays or as tensors."""

    temperature: Array  # float32; 0: the most likely token
    keys: Array  # int32: stands for all random numbers of the row
    top_k: Array  # int32; the size of the vocabulary: no limit
    top_p: Array  # float32; above 1: no limit
    min_p: Array  # float32


class Scored(NamedTuple):
    """Tokens of prompts that get log probabilities: [scored] each."""

    rows: np.ndarray  # int64: index of the token before each of them, which predicts it
    tokens: np.ndarray  # int64
    top: int  # the most alternatives that any of them wants


@dataclass(frozen=True, slots=True)
class Step:
    """Chunks of requests, one after the other; chunks of one token (decodes) come first."""

    token_ids: np.ndarray  # [tokens] int64; −1 − i: the token that the step before samples in its row i
    positions: np.ndarray  # [tokens] int64
    slots: np.ndarray  # [tokens] int64: where the KV of each token goes
    block_tables: np.ndarray  # [requests, blocks] int32, zero past the blocks of a request
    contexts: np.ndarray  # [requests] int32: positions of each request, those of this step included
    num_decodes: int
    prefills: list[tuple[int, int]]  # (start, stop) positions of each longer chunk
    sampled_rows: np.ndarray  # [sampled] int64: indices of the tokens that get a next token
    hands_over: bool  # KV of some chunk leaves layer by layer, so `layer_done` must be called
    variant: Variant
    draws: Draws[np.ndarray]  # [sampled] each
    scored: Scored | None = None
    state_slots: np.ndarray | None = None  # [requests] int32: their states; None: no layer has states
    restores: Sequence[tuple[int, int]] = ()  # (from, to) slots of states that are copied before the step
    saves: Sequence[tuple[int, int]] = ()  # the same, after the step
    copies: Sequence[tuple[int, int]] = ()
    """(row, slot): the states after this row of a prompt are copied to the slot, before the step computes
    later rows. As `AttentionMetadata.state_copies`."""


def copies_by_row(step: Step) -> np.ndarray:
    """`AttentionMetadata.state_copies` of a step."""
    slots = np.zeros(len(step.token_ids), dtype=np.int32)
    for row, slot in step.copies:
        slots[row] = slot + 1
    return slots


def arrange(
    token_ids: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    tables: Sequence["array[int]"],
    sampled: Sequence[int],
    variant: Variant,
    draws: Draws[np.ndarray],
    *,
    hands_over: bool,
    block_size: int,
    table_width: int | None,
    scored: Scored | None = None,
    state_slots: Sequence[int] | None = None,
    restores: Sequence[tuple[int, int]] = (),
    saves: Sequence[tuple[int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
) -> Step:
    """Lays out a step.

    Chunk i computes positions [starts[i], stops[i]) of a request with block table tables[i]; chunks of one
    token come first. `token_ids` has the tokens of all chunks in order. `sampled` has the numbers of the
    chunks that get a token, ascending. `table_width`: blocks in a row of the block tables; None: as many as
    the longest table has. The other arguments are as in `Step`."""
    ends_at = np.array(stops)
    lengths = ends_at - np.array(starts)
    num_decodes = int((lengths == 1).sum())
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - ends_at, lengths)
    padded = _padded(tables, table_width)
    request = np.repeat(np.arange(len(lengths)), lengths)
    slots = padded[request, positions // block_size] * np.int64(block_size) + positions % block_size
    return Step(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        slots=slots,
        block_tables=padded,
        contexts=ends_at.astype(np.int32),
        num_decodes=num_decodes,
        prefills=list(zip(starts[num_decodes:], stops[num_decodes:], strict=True)),
        sampled_rows=ends[list(sampled)] - 1,
        hands_over=hands_over,
        variant=variant,
        draws=draws,
        scored=scored,
        state_slots=None if state_slots is None else np.array(state_slots, dtype=np.int32),
        restores=restores,
        saves=saves,
        copies=copies,
    )


def _padded(tables: Sequence["array[int]"], width: int | None) -> np.ndarray:
    """[requests, width] int32. A loop over the rows would take longer than the rest of `arrange`."""
    used = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), width or int(used.max())), dtype=np.int32)
    begins = np.arange(len(tables)) * padded.shape[1] - (np.cumsum(used) - used)
    flat = np.frombuffer(b"".join(tables), dtype=np.int32)
    padded.reshape(-1)[np.arange(len(flat)) + np.repeat(begins, used)] = flat
    return padded


# What only some requests ask for. "Row" means a row of the sampled logits, in the order of `sampled_rows`.


@dataclass(frozen=True, slots=True)
class Bias:
    """Numbers that are added to single logits; −inf bars a token."""

    rows: np.ndarray  # [n] int64
    tokens: np.ndarray  # [n] int64
    values: np.ndarray  # [n] float32


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition, presence and frequency penalties, and the tokens that they count."""

    rows: np.ndarray  # [n] int64
    repetition: np.ndarray  # [n] float32
    presence: np.ndarray  # [n] float32
    frequency: np.ndarray  # [n] float32
    prompt: tuple[np.ndarray, np.ndarray]  # [m] int64 each: index into `rows`, token
    output: tuple[np.ndarray, np.ndarray]  # [m] int64 each: index into `rows`, token
    pending: tuple[np.ndarray, np.ndarray]
    """[m] int64 each: index into `rows`, and the row of the step before which samples the row's last token.
    The host does not know this token yet."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Rows that a grammar allows only some tokens."""

    rows: np.ndarray  # [n] int64
    bits: np.ndarray
    """[n, words] int32: bit i of word w says that token 32 w + i is allowed."""
    over_bias: bool
    """A bias may bar all tokens that the grammar allows. The grammar then wins."""


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What the rows of a step ask for beyond `Draws`."""

    bias: Bias | None = None
    penalties: Penalties | None = None
    mask: TokenMask | None = None
    logprob_rows: np.ndarray | None = None  # [k] int64: rows that want log probabilities; None: no row does
    top_logprobs: int = 0  # the most alternatives that any of these rows wants
    logprob_ids: np.ndarray | None = None
    """[k, n] int64: in place of the n most likely tokens, -1 for those. None: no row names any."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of the model's own logits, for the rows in `Adjustments.logprob_rows`."""

    chosen: list[float]  # [k]: of the sampled token
    ids: list[list[int]]  # [k, most]: the tokens that the row names, or the most likely ones, in order
    values: list[list[float]]  # [k, most]


class ScoredLogprobs(NamedTuple):
    """Log probabilities of the tokens of `Scored`, from the model's own logits."""

    logprobs: np.ndarray  # [scored] float32
    ranks: np.ndarray  # [scored] int32: 1 if no token was more likely
    top_ids: np.ndarray  # [scored, top] int32: the most likely tokens, most likely first
    top_logprobs: np.ndarray  # [scored, top] float32


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a step that is over."""

    tokens: list[int]  # [sampled]; negative: why there is none
    logprobs: RowLogprobs | None = None
    scored: ScoredLogprobs | None = None
