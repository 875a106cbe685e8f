"""What only some requests ask for, as arrays of a step: biases, penalties, grammars, log probabilities. Pure.

It is built when the tokens of a step are sampled. By then the host knows the tokens of the step before, which
a grammar needs.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from baton.engine.core.live_request import LiveRequest
from baton.engine.step_adjustments import Adjustments, Bias, Penalties, TokenMask


def build_adjustments(
    requests: Sequence[LiveRequest],
    eos_ids: Collection[int],
    mask: tuple[list[int], np.ndarray] | None,
    drafts: Mapping[int, Sequence[int]] | None = None,
) -> Adjustments:
    """For the sampled rows of a step. `mask`: rows with a grammar, and the bits of `TokenMask`. `drafts`: by
    row, those that come before its token."""
    drafts = drafts or {}
    logprob_rows = [row for row, live in enumerate(requests) if live.request.sampling.logprobs is not None]
    asked = [requests[row].request.sampling for row in logprob_rows]
    most = max((p.num_alternatives for p in asked), default=0)
    return Adjustments(
        _bias(requests, eos_ids, drafts),
        _penalties(requests, drafts),
        None if mask is None else _token_mask(requests, *mask),
        np.array(logprob_rows) if logprob_rows else None,
        most,
        _named([p.logprob_token_ids for p in asked], most),
    )


def _named(ids: Sequence[Sequence[int]], most: int) -> np.ndarray | None:
    """The token ids that rows name for log probabilities, padded with -1 to `most`."""
    if not any(ids):
        return None
    return np.array([[*row, *[-1] * (most - len(row))] for row in ids])


def _below_minimum(live: LiveRequest, drafts: int = 0) -> bool:
    return live.num_generated + drafts < live.request.sampling.min_tokens


def _bias(
    requests: Sequence[LiveRequest], eos_ids: Collection[int], drafts: Mapping[int, Sequence[int]]
) -> Bias | None:
    """logit_bias, and the tokens that min_tokens bars for now."""
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for row, live in enumerate(requests):
        p = live.request.sampling
        barred = {*eos_ids, *p.stop_token_ids} if _below_minimum(live, len(drafts.get(row, ()))) else ()
        tokens += [*p.logit_bias, *barred]
        values += [*p.logit_bias.values(), *[-np.inf] * len(barred)]
        rows += [row] * (len(tokens) - len(rows))
    if not tokens:
        return None
    return Bias(np.array(rows), np.array(tokens), np.array(values, dtype=np.float32))


def _penalties(requests: Sequence[LiveRequest], drafts: Mapping[int, Sequence[int]]) -> Penalties | None:
    rows = [
        row
        for row, live in enumerate(requests)
        for p in [live.request.sampling]
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
    ]
    if not rows:
        return None
    live = [requests[row] for row in rows]
    sampling = [r.request.sampling for r in live]
    pending = np.array([(i, r.row) for i, r in enumerate(live) if r.pending], dtype=np.int64).reshape(-1, 2)

    def flat(tokens: Sequence["array[int]"]) -> tuple[np.ndarray, np.ndarray]:
        row = np.repeat(np.arange(len(tokens)), [len(of_row) for of_row in tokens])
        return row, np.frombuffer(b"".join(tokens), np.int32).astype(np.int64)

    return Penalties(
        np.array(rows),
        np.array([p.repetition_penalty for p in sampling], dtype=np.float32),
        np.array([p.presence_penalty for p in sampling], dtype=np.float32),
        np.array([p.frequency_penalty for p in sampling], dtype=np.float32),
        flat([r.asked.repetitions for r in live]),
        flat(
            [
                r.token_ids[len(r.request.prompt_ids) : r.num_known] + array("i", drafts.get(row, ()))
                for row, r in zip(rows, live, strict=True)
            ]
        ),
        (pending[:, 0], pending[:, 1]),
    )


def _token_mask(requests: Sequence[LiveRequest], rows: list[int], bits: np.ndarray) -> TokenMask:
    return TokenMask(np.array(rows), bits, any(_below_minimum(requests[row]) for row in rows))
