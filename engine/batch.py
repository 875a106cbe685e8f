"""Everything one step needs, as tensors: built from the schedule, read by the model, gone after the step."""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionPlan, DecodeGroup, PrefillSpan
from engine.live_request import LiveRequest
from engine.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class StepBatch:
    token_ids: Tensor  # [tokens] int64, the chunks one after the other
    positions: Tensor  # [tokens] int64
    attention: AttentionPlan
    sampled: list[LiveRequest]  # whose tokens are all computed after this step
    sampled_rows: Tensor  # [sampled] int64: the row of each one's last token


def build_batch(chunks: list[Chunk], block_size: int, dtype: torch.dtype, device: torch.device) -> StepBatch:
    def tensor(values: np.ndarray | list[int]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    def minus_infinity(where: Tensor) -> Tensor:
        return torch.zeros(where.shape, dtype=dtype).masked_fill_(where, float("-inf")).to(device)

    def padded_length(chunk: Chunk) -> int:
        """Number of blocks, rounded up to a power of two: groups of like length waste at most half."""
        return 1 << (-(-chunk.stop // block_size) - 1).bit_length()

    decodes = sorted((c for c in chunks if c.stop - c.start == 1), key=padded_length)
    prefills = [c for c in chunks if c.stop - c.start > 1]
    chunks = decodes + prefills

    positions = np.concatenate([np.arange(c.start, c.stop) for c in chunks])
    token_ids = [token for c in chunks for token in c.live.token_ids[c.start : c.stop]]
    slots = np.concatenate([_slots(c, block_size) for c in chunks])
    ends = np.cumsum([c.stop - c.start for c in chunks])
    sampled = [
        (c.live, end - 1) for c, end in zip(chunks, ends, strict=True) if c.stop == len(c.live.token_ids)
    ]

    groups = []
    row = 0
    for _, members in groupby(decodes, key=padded_length):
        group = list(members)
        rows = slice(row, row := row + len(group))
        contexts = np.array([c.stop for c in group])
        width = -(-int(contexts.max()) // block_size)
        blocks = np.zeros((len(group), width), dtype=np.int64)
        for table, chunk in zip(blocks, group, strict=True):
            own = chunk.live.blocks[:width]
            table[: len(own)] = own
        padded = np.arange(width * block_size) >= contexts[:, None]
        groups.append(
            DecodeGroup(
                rows=rows,
                blocks=tensor(blocks.reshape(-1)),
                padding=tensor(np.flatnonzero(padded)),
                mask=minus_infinity(torch.from_numpy(padded))[:, None, None],
            )
        )

    spans = []
    for chunk in prefills:
        mask = None
        if chunk.start:
            future = torch.arange(chunk.stop) > torch.arange(chunk.start, chunk.stop)[:, None]
            mask = minus_infinity(future)
        used = -(-chunk.stop // block_size)
        spans.append(
            PrefillSpan(
                rows=slice(row, row := row + chunk.stop - chunk.start),
                blocks=tensor(chunk.live.blocks[:used]),
                context=chunk.stop,
                mask=mask,
            )
        )

    return StepBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        attention=AttentionPlan(tensor(slots), groups, spans),
        sampled=[live for live, _ in sampled],
        sampled_rows=tensor([int(end) for _, end in sampled]),
    )


def _slots(chunk: Chunk, block_size: int) -> np.ndarray:
    first = chunk.start // block_size
    used = np.array(chunk.live.blocks[first : -(-chunk.stop // block_size)])
    positions = np.arange(chunk.start, chunk.stop)
    return used[positions // block_size - first] * block_size + positions % block_size
