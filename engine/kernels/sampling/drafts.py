"""What a step takes over from the step before if that has drafts, in plain torch: it defines the results.

`sampled` [rows, 2] has, for each row that the step before sampled, its token and how many of the drafts after
the row were right. `given` [2, most + 1] keeps, for the first tokens of the newest step, the token, and how
many drafts of its request the step before accepted. Its last column is 0. The other arrays are those of
`engine.step.Step` and `Ahead`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """What a step computes. The rows [0, len(after)) may come after drafts."""

    token_ids: Tensor  # [tokens] int64; −1 − i: the token of sampled row i
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64
    contexts: Tensor  # [rows] int32


def follow(
    inputs: Inputs, after: Tensor, token_ids: Tensor, slots: Tensor, sampled: Tensor, given: Tensor
) -> Inputs:
    """Returns what the step computes, after the step before. Writes `given`. after [rows], token_ids and
    slots [rows, ahead] are those of `Ahead`."""
    rows = min(len(after), len(inputs.token_ids))
    after = after[:rows]
    shift = torch.where(after < 0, 0, sampled[after.clamp_min(0), 1])

    def chosen(values: Tensor, columns: Tensor) -> Tensor:
        column = columns[:rows].gather(1, shift[:, None])[:, 0]
        return torch.cat((torch.where(after < 0, values[:rows], column), values[rows:]))

    ids = chosen(inputs.token_ids, token_ids)
    ids = torch.where(ids < 0, sampled[(-1 - ids).clamp_min(0), 0].clamp_min(0), ids)
    given.zero_()
    given[:, :rows] = torch.stack((ids[:rows], shift))
    contexts = inputs.contexts
    return Inputs(
        ids,
        torch.cat((inputs.positions[:rows] + shift, inputs.positions[rows:])),
        chosen(inputs.slots, slots),
        torch.cat((contexts[:rows] + shift[: len(contexts)].int(), contexts[rows:])),
    )


def accepted(tokens: Tensor, rows: Tensor, drafts: Tensor, given: Tensor) -> Tensor:
    """For each sampled row, how many of the drafts after it are right, all from the first one on. tokens
    [rows] int64 are those sampled; rows and drafts [rows] int64 as in `Step` and `Ahead`."""
    following = given[0, (rows + 1).clamp_max(given.shape[1] - 1)]
    index = torch.arange(len(tokens), device=tokens.device)
    wrong = torch.where((drafts > 0) & (tokens == following), len(tokens), index)
    return wrong.flip(0).cummin(0).values.flip(0) - index
