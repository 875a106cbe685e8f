"""Log probabilities of the tokens of prompts, on the device.

The logits of a long prompt are far larger than its KV: a row has a number for each token of the vocabulary.
So they are computed for `PIECE` rows at a time, and only what was asked for stays.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.execution.inputs import upload
from baton.engine.execution.sampler import to_host
from baton.engine.step import Scored, ScoredLogprobs

PIECE = 256
"""Rows of logits that exist at a time."""


def prompt_logprobs(
    hidden: Tensor, scored: Scored, logits: Callable[[Tensor], Tensor], rank: int
) -> ScoredLogprobs | None:
    """Enqueues the work for one step with hidden states [tokens, hidden_size]. The result is valid once the
    step is over. All ranks call `logits`, in the same order. Only rank 0 has its result; None on the
    others."""
    rows, tokens = upload([scored.rows, scored.tokens], hidden.device)
    pieces: list[tuple[Tensor, ...]] = []
    for piece, actual in zip(rows.split(PIECE), tokens.split(PIECE), strict=True):
        values = logits(hidden[piece])
        if rank == 0:
            pieces.append(_logprobs(values.float(), actual, scored.top))
    if not pieces:
        return None
    fields = (torch.cat(of_field) for of_field in zip(*pieces, strict=True))
    return ScoredLogprobs(*(to_host(of_field).numpy() for of_field in fields))


def _logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, ...]:
    """The fields of `ScoredLogprobs` for some rows."""
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1, dtype=torch.int32) + 1
    best = logits.topk(top, dim=-1)
    total = logits.logsumexp(dim=-1, keepdim=True)
    return (chosen - total)[:, 0], ranks, best.indices.int(), best.values - total
