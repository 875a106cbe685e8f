"""Lays out the arrays of a step (`step`), from what requests compute in it."""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from baton.engine.step import (
    NO_DRAFTING,
    NO_IMAGES,
    NO_ROWS,
    NO_SHIFT,
    NOT_AHEAD,
    NOT_SCORED,
    Ahead,
    Drafting,
    Draws,
    Scored,
    Step,
    Variant,
)
from baton.engine.step_drafts import Draft, look_ahead, with_drafts

NO_PAIRS = np.zeros((0, 2), dtype=np.int64)


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
    ids = with_drafts(token_ids, drafts, ends) if drafts else np.array(token_ids, dtype=np.int32)
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
        look_ahead(drafts, begins, ends, sources, ahead)
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
