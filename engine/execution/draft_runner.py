"""Computes a draft head after the sampling of a step (`engine.step.Drafting`).

    all tokens of the step, each with the token after it ─▶ KV, so that later guesses find it
    the last right token of each request ─▶ a guess ─▶ with that guess, another one ─▶ …

The next step overwrites the KV of the guesses. Nothing here waits for the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.engine.execution.graphs import LayerDone
from baton.engine.execution.inputs import attention_metadata
from baton.engine.execution.sampler import to_host
from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.layers.current_step import CurrentStep, computing
from baton.engine.layers.ranks import Ranks
from baton.engine.models.draft_heads import DraftHead, HeadConfig
from baton.engine.step import GUESSED, Step


@dataclass(slots=True)
class SampledStep:
    """A step, and what the draft head takes of it."""

    step: Step
    inputs: Mapping[str, Tensor]
    """The arrays of the step on the device."""
    hidden: Tensor
    """[tokens or more, (1 + taps) · hidden_size]: what the model gave, and the inputs of the taps."""
    layer_done: LayerDone


class DraftRunner:
    """Owns the guesses of the newest step."""

    def __init__(
        self,
        head: DraftHead,
        config: HeadConfig,
        layer: int,
        guesses: Tensor,
        attends: Callable[[AttentionMetadata, LayerDone], Any],
        ranks: Ranks,
        block_size: int,
    ) -> None:
        """`layer`: its index in the cache. `guesses` [sampled rows, most guesses] int64: those of each
        request are written to its first sampled row. `attends`: what its layer calls to attend."""
        self.taps = len(config.taps)
        self._head = head
        self._config = config.model
        self._layer = layer
        self._guesses = guesses
        self._attends = attends
        self._ranks = ranks
        self._block_size = block_size

    def known(self, token_ids: Tensor) -> Tensor:
        """The token ids with those that were guessed after the step before."""
        index = (-GUESSED - token_ids).clamp_min(0)
        return torch.where(token_ids <= -GUESSED, self._guesses.view(-1)[index], token_ids)

    def draft(self, sampled_step: SampledStep, sampled: Tensor, given: Tensor) -> Tensor | None:
        """Enqueues the work. `sampled` and `given` are those of the runner. Returns the guesses on the host,
        [sampled rows, count], once the step is over. None: there are none."""
        step, inputs = sampled_step.step, sampled_step.inputs
        positions, slots, contexts = _moved(inputs, given[1])
        attention = attention_metadata(
            {**inputs, "slots": slots, "contexts": contexts},
            block_size=self._block_size,
            num_decodes=step.decode_rows,
            prefills=step.prefills,
        )
        rows = inputs["sampled_rows"]
        newest = sampled[: len(rows), 0].clamp_min(0)  # a request whose token is negative fails
        token_ids = inputs["drafting.following"].index_copy(0, rows, newest)
        size = self._config.hidden_size if self.taps else 0
        of_model = self._head.first(sampled_step.hidden[: len(token_ids), size:].contiguous())
        hidden = self._compute(token_ids, of_model, positions, attention, sampled_step.layer_done)
        if not step.drafting.count or not len(step.drafting.first_rows):
            return None
        first, tables, room = (inputs[f"drafting.{name}"] for name in ("first_rows", "tables", "room"))
        last = rows[first + sampled[first, 1]]  # of the tokens that are right
        hidden, positions, tables = hidden[last], positions[last], inputs["block_tables"][tables]
        end = room.clamp_max(self._config.max_model_len) - 1
        self._guess(0, first, hidden)
        for number in range(1, step.drafting.count):
            # A guess without a place takes the last one of its request. Later guesses may be worse for it.
            positions = torch.minimum(positions + 1, end)
            block = tables.gather(1, (positions // self._block_size)[:, None])[:, 0].long()
            attention = AttentionMetadata(
                block_size=self._block_size,
                slots=block * self._block_size + positions % self._block_size,
                block_tables=tables,
                contexts=(positions + 1).int(),
                num_decodes=len(first),
                prefills=[],
            )
            token_ids = self._guesses[first, number - 1]
            hidden = self._compute(token_ids, hidden, positions, attention, lambda _: None)
            self._guess(number, first, hidden)
        return to_host(self._guesses[: len(rows), : step.drafting.count])

    def _compute(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: AttentionMetadata,
        layer_done: LayerDone,
    ) -> Tensor:
        experts, counts = self._config.experts, None
        if experts is not None:
            counts = torch.zeros((1, experts.num_experts), dtype=torch.int32, device=hidden.device)
        attend = self._attends(attention, layer_done)
        with computing(CurrentStep(attention.num_decodes, attention.slots, counts)):
            return self._head(self._layer, token_ids, hidden, positions, attend)

    def _guess(self, number: int, first: Tensor, hidden: Tensor) -> None:
        """Guess `number` of the requests with these first rows. Rank 0 guesses for all ranks."""
        logits = self._head.logits(hidden)
        if self._ranks.rank == 0:
            chosen, known = logits.float().argmax(dim=-1), self._head.token_ids
            self._guesses[first, number] = chosen if known is None else known[chosen]
        self._ranks.broadcast(self._guesses)


def _moved(inputs: Mapping[str, Tensor], shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, slots and contexts of a step, from where the step before left its requests. `shift`: by row,
    how many drafts that step accepted."""
    positions, slots, contexts = inputs["positions"], inputs["slots"], inputs["contexts"]
    after, ahead = inputs["ahead.after"], inputs["ahead.slots"]
    rows = len(after)
    shift = shift[:rows]
    moved = torch.where(after < 0, slots[:rows], ahead.gather(1, shift[:, None])[:, 0])
    return (
        torch.cat((positions[:rows] + shift, positions[rows:])),
        torch.cat((moved, slots[rows:])),
        torch.cat((contexts[:rows] + shift[: len(contexts)].int(), contexts[rows:])),
    )
