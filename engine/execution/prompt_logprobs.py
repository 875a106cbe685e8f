"""Log probabilities of the tokens of prompts, on the device.

The logits of a long prompt are far larger than its KV: a row has a number for each token of the vocabulary.
So they are computed for `PIECE` rows at a time, and only what was asked for stays.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.execution.inputs import upload
from baton.engine.execution.sampler import to_host
from baton.engine.step import Scored, ScoredLogprobs

PIECE = 256
"""Rows of logits that exist at a time."""

Piece = tuple[Tensor, Tensor, Tensor, Tensor]
"""The fields of `ScoredLogprobs` for some rows, on the host; valid once the step is over."""


def prompt_logprobs(
    hidden: Tensor, scored: Scored, logits: Callable[[Tensor], Tensor], rank: int
) -> list[Piece]:
    """Enqueues the work for one step with hidden states [tokens, hidden_size].

    All ranks call `logits`, in the same order; only rank 0 has its result, and returns pieces."""
    rows, tokens = upload([scored.rows, scored.tokens], hidden.device)
    pieces: list[Piece] = []
    for piece, actual in zip(rows.split(PIECE), tokens.split(PIECE), strict=True):
        values = logits(hidden[piece])
        if rank == 0:
            pieces.append(_logprobs(values.float(), actual, scored.top))
    return pieces


def _logprobs(logits: Tensor, tokens: Tensor, top: int) -> Piece:
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1, dtype=torch.int32) + 1
    best = logits.topk(top, dim=-1)
    total = logits.logsumexp(dim=-1, keepdim=True)
    values = (chosen - total)[:, 0], ranks, best.indices.int(), best.values - total
    return to_host(values[0]), to_host(values[1]), to_host(values[2]), to_host(values[3])


def joined(pieces: Sequence[Piece]) -> ScoredLogprobs | None:
    """The result of a step that is over. None: nothing was scored, or this is not rank 0."""
    if not pieces:
        return None
    return ScoredLogprobs(
        *(np.concatenate([x.numpy() for x in of_field]) for of_field in zip(*pieces, strict=True))
    )
