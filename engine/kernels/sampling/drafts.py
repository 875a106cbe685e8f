"""What a step takes over from the step before, in plain torch: it defines the results.

`sampled` [rows, 2] int64 has, for each row that the step before sampled, its token and how many of the drafts
after the row were right. `guesses` [rows, ahead − 1] int64 has what a draft head made in the step before.
`resolved` [2, max_sampled_rows + 1] int64 keeps, for the first tokens of the newest step, the token, and how
many drafts of its request the step before accepted. Its last column is 0. The other arrays are those of
`engine.step.Step` and `Ahead`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels.sampling.reference import with_sampled


class StepInputs(NamedTuple):
    """What a step computes."""

    token_ids: Tensor  # [tokens] int32 of the step, int64 of what `follow` returns
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64
    contexts: Tensor  # [rows] int32


class Sources(NamedTuple):
    """Where a step finds what the host does not know. Only the first `rows` tokens may come after drafts or
    be guesses."""

    source_rows: Tensor  # [tokens] int32
    shift_rows: Tensor  # [rows] int32
    token_ids: Tensor  # [rows, ahead] int32
    slots: Tensor  # [rows, ahead] int64
    guess_index: Tensor  # [rows] int32


def follow(
    inputs: StepInputs, sources: Sources, sampled: Tensor, guesses: Tensor, resolved: Tensor
) -> StepInputs:
    """Returns what the step computes, after the step before. Writes `resolved`."""
    rows = min(len(sources.shift_rows), len(inputs.token_ids))
    shift_rows, guess_index = sources.shift_rows[:rows], sources.guess_index[:rows]
    shift = torch.where(shift_rows < 0, 0, sampled[shift_rows.clamp_min(0), 1])

    def chosen(values: Tensor, columns: Tensor) -> Tensor:
        column = columns[:rows].gather(1, shift[:, None])[:, 0]
        return torch.cat((torch.where(shift_rows < 0, values[:rows], column), values[rows:]))

    source_rows = sources.source_rows.clone()
    source_rows[:rows] += torch.where(source_rows[:rows] < 0, 0, shift).int()
    ids = with_sampled(chosen(inputs.token_ids, sources.token_ids), source_rows, sampled)
    ids[:rows] = torch.where(guess_index < 0, ids[:rows], guesses.view(-1)[guess_index.clamp_min(0)])
    resolved.zero_()
    resolved[:, :rows] = torch.stack((ids[:rows], shift))
    contexts = inputs.contexts
    return StepInputs(
        ids,
        torch.cat((inputs.positions[:rows] + shift, inputs.positions[rows:])),
        chosen(inputs.slots, sources.slots),
        torch.cat((contexts[:rows] + shift[: len(contexts)].int(), contexts[rows:])),
    )


def accepted(tokens: Tensor, rows: Tensor, drafts: Tensor, resolved: Tensor) -> Tensor:
    """For each sampled row, how many of the drafts after it are right, all from the first one on. tokens
    [rows] int64 are those sampled; rows and drafts [rows] int64 as in `Step` and `Ahead`."""
    following = resolved[0, (rows + 1).clamp_max(resolved.shape[1] - 1)]
    index = torch.arange(len(tokens), device=tokens.device)
    wrong = torch.where((drafts > 0) & (tokens == following), len(tokens), index)
    return wrong.flip(0).cummin(0).values.flip(0) - index
