"""Attention to positions that an index chose for each query, in plain torch on any device.

It computes request by request, and reads all keys of a request. CUDA graphs cannot capture it. Models with
latents have kernels for this instead (`index`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels.attention.paged import KV, AttentionMetadata, by_scores, gathered

QUERIES = 64
"""Of a prompt at a time: their scores with all keys are in memory together, those of an index for each of its
heads."""


class Request(NamedTuple):
    """The rows of a request in a step."""

    rows: slice
    start: int
    """The position of the first row."""
    blocks: Tensor  # [blocks] int32: all with positions up to the last row

    @property
    def stop(self) -> int:
        return self.start + self.rows.stop - self.rows.start

    def parts(self) -> "Iterator[Request]":
        """Its rows, at most `QUERIES` at a time."""
        for first in range(self.rows.start, self.rows.stop, QUERIES):
            rows = slice(first, min(first + QUERIES, self.rows.stop))
            yield self._replace(rows=rows, start=self.start + first - self.rows.start)


def requests_of(metadata: AttentionMetadata) -> Iterator[Request]:
    contexts = metadata.contexts[: metadata.num_decodes].tolist()
    row = 0
    for number, (start, stop) in enumerate([*((seen - 1, seen) for seen in contexts), *metadata.prefills]):
        blocks = metadata.block_tables[number, : -(-stop // metadata.block_size)]
        yield Request(slice(row, row + stop - start), start, blocks)
        row += stop - start


def keep_keys(cache: Tensor, slots: Tensor, request: Request, keys: Tensor) -> Tensor:
    """Writes the keys [1, tokens, head_dim] of an index, those of the rows of a request, to its cache
    [1, num_blocks, block_size, 1, head_dim]. `slots` [rows]: of all rows of the step. Returns all keys of the
    request up to these, [1, positions, head_dim]."""
    places, size = slots[request.rows], cache.shape[2]
    cache[0, places // size, places % size, 0] = keys[0].to(cache.dtype)
    return cache[0].index_select(0, request.blocks).flatten(0, 2)[None, : request.stop].to(keys.dtype)


def attend_chosen(
    q: Tensor,
    kv: KV,
    requests: Iterable[Request],
    chosen: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """As `paged_attention`. chosen [tokens, positions]: those that each query sees, as far as they are not
    behind its own; negative numbers stand for none."""
    parts: list[Tensor] = []
    of_heads = None if sinks is None else sinks[:, None]
    for request in requests:
        seen = gathered(kv, request.blocks, q.dtype).flatten(1, 2)[:, : request.stop].transpose(1, 2)
        for part in request.parts():
            mask = _mask(chosen[part.rows], range(part.start, part.stop), request.stop, q.dtype)
            queries = q[part.rows].transpose(0, 1)[None]
            out = by_scores(queries, seen[0, None], seen[1, None], mask, of_heads, scale, softcap)
            parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _mask(chosen: Tensor, queries: Sequence[int], keys: int, dtype: torch.dtype) -> Tensor:
    """[queries, keys]: 0, or -inf where a query does not see a key."""
    hidden = torch.ones(len(chosen), keys + 1, dtype=torch.bool, device=chosen.device)
    hidden.scatter_(1, chosen.long().where(chosen >= 0, keys), False)  # the last column stands for no key
    positions = torch.arange(keys, device=chosen.device)
    later = positions > positions.new_tensor(queries)[:, None]
    return torch.zeros(later.shape, dtype=dtype, device=chosen.device).masked_fill_(
        hidden[:, :keys] | later, float("-inf")
    )
