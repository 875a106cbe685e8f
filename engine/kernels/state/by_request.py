"""States that a function computes request by request, such as those of transformers' modules.

One call computes all requests that decode, and one each piece of a prompt. CUDA graphs can capture the first.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.kernels.state.mamba2 import Prompt, tile_states


class Advance(Protocol):
    def __call__(self, rows: slice, states: Sequence[Tensor] | None, *, decodes: bool) -> Sequence[Tensor]:
        """Computes these rows of a step. `decodes`: each row is a request of its own. If not, all belong to
        one. `states` [requests, …]: before the first row; None: the request begins. Returns those after the
        last one."""
        ...


class RequestTiling(NamedTuple):
    source: Tensor
    """[decodes] int64: the row itself, or 0 for a row that pads a graph: both write the same then."""
    slots: Tensor  # [decodes] int64, of these
    fresh: Tensor  # [decodes] bool: the request is at its first position
    prompts: Sequence[Prompt]


def tile_requests(metadata: AttentionMetadata) -> RequestTiling:
    tiling, contexts = tile_states(metadata), metadata.contexts[: metadata.num_decodes]
    rows = torch.arange(len(contexts), device=contexts.device)
    source = torch.where(contexts > 0, rows, 0)
    return RequestTiling(source, tiling.slots[source].clamp_min(0), tiling.fresh, tiling.prompts)


def advance_states(advance: Advance, states: Sequence[Tensor], tiling: RequestTiling) -> None:
    """Takes `states` [slots, …] past the rows of a step, in place."""
    if decodes := len(tiling.slots):
        before = [x[tiling.slots] for x in states]
        for x in before:  # zeros are what modules begin with
            x.masked_fill_(tiling.fresh.view(-1, *[1] * (x.dim() - 1)), 0)
        after = advance(slice(0, decodes), before, decodes=True)
        for x, value in zip(states, after, strict=True):
            x[tiling.slots] = value[tiling.source].to(x.dtype)
    for prompt in tiling.prompts:
        now = None if prompt.fresh else [x[prompt.slot, None].clone() for x in states]
        first, length = prompt.rows.start, prompt.rows.stop - prompt.rows.start
        for piece, copy in prompt.pieces(length):
            now = advance(slice(first + piece.start, first + piece.stop), now, decodes=False)
            for slot in (prompt.slot,) if copy is None else (prompt.slot, copy):
                for x, value in zip(states, now, strict=True):
                    x[slot] = value[0]
