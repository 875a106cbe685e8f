"""What only some rows of a step ask for, as plain arrays (`engine.step`).

"Row" means a row of the sampled logits, in the order of `Step.sampled_rows`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


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
    prompt: tuple[np.ndarray, np.ndarray]  # as `output`, but a token once, and only for `repetition`
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


class ScoredLogprobs(NamedTuple):
    """Log probabilities of the tokens of `Scored`, from the model's own logits."""

    logprobs: np.ndarray  # [scored] float32
    ranks: np.ndarray  # [scored] int32: 1 if no token was more likely
    top_ids: np.ndarray  # [scored, top] int32: the most likely tokens, most likely first
    top_logprobs: np.ndarray  # [scored, top] float32
