"""Drafts of requests in a step. Steps without drafts need nothing of this."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from baton.engine.step import Ahead


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


def with_drafts(
    token_ids: Sequence[int] | np.ndarray, drafts: Mapping[int, Draft], ends: np.ndarray
) -> np.ndarray:
    """The token ids of a step, if the step before accepts no draft. Request i ends before row ends[i]."""
    is_draft = np.zeros(ends[-1], dtype=bool)
    ids = np.zeros(ends[-1], dtype=np.int32)
    for i, draft in drafts.items():
        rows = slice(ends[i] - draft.count, ends[i])
        is_draft[rows] = True
        if draft.guesses is not None:
            ids[rows] = draft.guesses[: draft.count]
    ids[~is_draft] = token_ids
    return ids


def look_ahead(
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
