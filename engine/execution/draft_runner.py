"""Computes a draft head after the sampling of a step (`engine.step.Drafting`).

    all tokens of the step, each with the token after it ─▶ KV, so that later guesses find it
    the last right token of each request ─▶ a guess ─▶ with that guess, another one ─▶ …

Graphs replay the first line if a graph has replayed the step and it has no prompts, by its rows. One graph
replays all guesses, by the requests and the guesses of each. Requests that pad a graph have no blocks; their
guesses go to a row of their own. The next step overwrites the KV of the guesses. Nothing here waits for the
device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.execution.graphs import LayerDone, Size, StepGraphs, no_garbage_collection
from baton.engine.execution.inputs import attention_metadata
from baton.engine.execution.layer_attention import LayerAttention
from baton.engine.execution.sampler import to_host
from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.kernels.sampling.reference import with_sampled
from baton.engine.layers.current_step import CurrentStep, computing
from baton.engine.layers.ranks import Ranks
from baton.engine.models.draft_heads import DraftHead, HeadConfig
from baton.engine.step import Step


@dataclass(slots=True)
class SampledStep:
    """A step, and what the draft head takes of it."""

    step: Step
    size: Size | None
    """Of the graph that has replayed it."""
    inputs: Mapping[str, Tensor]
    """The arrays of the step on the device."""
    hidden: Tensor
    """[tokens or more, (1 + taps) · hidden_size]: what the model gave, and the inputs of the taps."""
    layer_done: LayerDone


class _Guessed(NamedTuple):
    """The newest guess of each request, and what the next one needs."""

    tokens: Tensor  # [requests] int64
    index: Tensor  # [requests] int64: of the guess among all guesses, as `Ahead.guess_index`
    hidden: Tensor  # [requests, hidden_size], behind which the token is
    positions: Tensor  # [requests] int64, of the hidden state
    ends: Tensor  # [requests] int64: the last position in its blocks; −1: it pads a graph
    tables: Tensor  # [requests, width] int32


class DraftRunner:
    """Makes the guesses after each step."""

    def __init__(
        self,
        head: DraftHead,
        config: HeadConfig,
        layer: int,
        sampled: Tensor,
        resolved: Tensor,
        guesses: Tensor,
        attention: LayerAttention,
        ranks: Ranks,
        block_size: int,
    ) -> None:
        """`layer`: its index in the cache. `sampled`, `resolved` and `guesses` are those of the runner.
        `attention`: of its layer."""
        self.taps = len(config.taps)
        self._head = head
        self._config = config.model
        self._layer = layer
        self._sampled = sampled
        self._resolved = resolved
        self._guesses = guesses
        self._attention = attention
        self._ranks = ranks
        self._block_size = block_size
        self._kv_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """By the rows of the step."""
        self._guess_graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """By requests, and guesses of each of them."""
        self._hidden: Tensor | None = None
        """The memory in which graphs pass on hidden states. A graph itself keeps no tensor alive."""

    def capture(self, graphs: StepGraphs) -> None:
        """Captures graphs for the steps that these graphs replay."""
        sizes, static, most = graphs.batch_sizes, graphs.static, self._guesses.shape[1]
        self._hidden = hidden = graphs.hidden.new_zeros((sizes[-1], self._config.hidden_size))

        def read(rows: int, _: LayerDone) -> None:
            filled = dict.fromkeys(("tokens", "window rows", "decode rows", "requests", "followed"), rows)
            # These graphs are for steps that only decode. The work of chunks is that of an earlier step.
            inputs = static.first({**filled, "pieces": 0, "scans": 0})
            hidden[:rows].copy_(self._read(inputs, graphs.hidden, rows, [], lambda _: None))

        def guess(requests: int, count: int, _: LayerDone) -> None:
            self._guess_all(static.first({"drafting": requests}), hidden, count)

        with no_garbage_collection():
            for rows in reversed(sizes):
                (self._kv_graphs[rows],) = graphs.capture(partial(read, rows))
                for count in range(1, most + 1):
                    (self._guess_graphs[rows, count],) = graphs.capture(partial(guess, rows, count))

    def draft(self, sampled_step: SampledStep) -> Tensor | None:
        """Enqueues the work. Returns the guesses on the host, [sampled rows, count], once the step is over.
        None: there are none."""
        step, size = sampled_step.step, sampled_step.size
        requests, count = len(step.drafting.first_rows), step.drafting.count
        guesses = count and requests
        if size is not None and not size.chunks:
            self._kv_graphs[size.rows].replay()
            if guesses:
                padded = min(rows for rows, _ in self._guess_graphs if rows >= requests)
                self._guess_graphs[padded, count].replay()
        else:
            inputs, hidden = sampled_step.inputs, sampled_step.hidden
            hidden = self._read(inputs, hidden, step.decode_rows, step.prefills, sampled_step.layer_done)
            if guesses:
                self._guess_all(inputs, hidden, count)
        if not guesses:
            return None
        return to_host(self._guesses[: len(step.sampled_rows), :count])

    def _read(
        self,
        inputs: Mapping[str, Tensor],
        model_hidden: Tensor,
        decode_rows: int,
        prefills: Sequence[tuple[int, int]],
        layer_done: LayerDone,
    ) -> Tensor:
        """Writes the KV of all tokens of the step. Returns their hidden states."""
        positions, slots, contexts = _moved(inputs, self._resolved[1])
        attention = attention_metadata(
            {**inputs, "slots": slots, "contexts": contexts},
            block_size=self._block_size,
            num_decodes=decode_rows,
            prefills=prefills,
        )
        next_ids = with_sampled(inputs["drafting.next_ids"], inputs["drafting.next_rows"], self._sampled)
        size = self._config.hidden_size if self.taps else 0
        model_hidden = self._head.first(model_hidden[: len(next_ids), size:].contiguous())
        return self._compute(next_ids, model_hidden, positions, attention, layer_done)

    def _guess_all(self, inputs: Mapping[str, Tensor], hidden: Tensor, count: int) -> None:
        """Makes `count` guesses for each request. `hidden`: of all tokens of the step."""
        guessed = self._first(inputs, hidden)
        for _ in range(1, count):
            guessed = self._next(guessed)

    def _first(self, inputs: Mapping[str, Tensor], hidden: Tensor) -> _Guessed:
        """The first guesses after a step, from the hidden states of its tokens."""
        names = "first_rows", "table_rows", "capacities"
        rows, table_rows, capacities = (inputs[f"drafting.{name}"] for name in names)
        last_right = inputs["sampled_rows"][rows + self._sampled[rows, 1]]  # the token before the guesses
        index = torch.where(capacities > 0, rows, len(self._sampled)) * self._guesses.shape[1]
        ends = capacities.clamp_max(self._config.max_model_len) - 1
        shift = self._resolved[1, last_right.clamp_max(self._resolved.shape[1] - 1)]
        positions = inputs["positions"][last_right] + shift
        return self._guess(index, hidden[last_right], positions, ends, inputs["block_tables"][table_rows])

    def _next(self, newest: _Guessed) -> _Guessed:
        # A guess without a place takes the last one of its request. Later guesses may be worse for it.
        positions = torch.minimum(newest.positions + 1, newest.ends).clamp_min(0)
        block = newest.tables.gather(1, (positions // self._block_size)[:, None])[:, 0].long()
        used = newest.ends >= 0
        attention = AttentionMetadata(
            block_size=self._block_size,
            slots=torch.where(used, block * self._block_size + positions % self._block_size, -1),
            block_tables=newest.tables,
            contexts=torch.where(used, positions + 1, 0).int(),
            num_decodes=len(positions),
            prefills=[],
        )
        hidden = self._compute(newest.tokens, newest.hidden, positions, attention, lambda _: None)
        return self._guess(newest.index + 1, hidden, positions, newest.ends, newest.tables)

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
        attend = self._attention.of_step(attention, layer_done)
        with computing(CurrentStep(attention.num_decodes, attention.slots, counts)):
            return self._head(self._layer, token_ids, hidden, positions, attend)

    def _guess(
        self, index: Tensor, hidden: Tensor, positions: Tensor, ends: Tensor, tables: Tensor
    ) -> _Guessed:
        """What follows these hidden states. Rank 0 guesses for all ranks."""
        logits, guesses = self._head.logits(hidden), self._guesses.view(-1)
        if self._ranks.rank == 0:
            chosen, known = logits.argmax(dim=-1), self._head.token_ids
            guesses[index] = chosen if known is None else known[chosen]
        self._ranks.broadcast(self._guesses)
        return _Guessed(guesses[index], index, hidden, positions, ends, tables)


def _moved(inputs: Mapping[str, Tensor], shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, slots and contexts of a step, from where the step before left its requests. `shift`: by row,
    how many drafts that step accepted."""
    positions, slots, contexts = inputs["positions"], inputs["slots"], inputs["contexts"]
    shift_rows, slots_ahead = inputs["ahead.shift_rows"], inputs["ahead.slots"]
    rows = len(shift_rows)
    shift = shift[:rows]
    moved = torch.where(shift_rows < 0, slots[:rows], slots_ahead.gather(1, shift[:, None])[:, 0])
    return (
        torch.cat((positions[:rows] + shift, positions[rows:])),
        torch.cat((moved, slots[rows:])),
        torch.cat((contexts[:rows] + shift[: len(contexts)].int(), contexts[rows:])),
    )
