"""Everything one step needs, as tensors: built from the schedule, read by the model, gone after the step."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.live_request import LiveRequest
from engine.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class StepBatch:
    token_ids: Tensor  # [tokens] int64, the chunks one after the other
    positions: Tensor  # [tokens] int64
    attention: AttentionMetadata
    sampled: list[LiveRequest]  # whose tokens are all computed after this step
    sampled_rows: Tensor  # [sampled] int64: the row of each one's last token


def build_batch(chunks: list[Chunk], block_size: int, device: torch.device) -> StepBatch:
    def tensor(values: np.ndarray | list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)

    # Decodes by length: those of like length are attended to together.
    decodes = sorted((c for c in chunks if c.stop - c.start == 1), key=lambda c: c.stop)
    prefills = [c for c in chunks if c.stop - c.start > 1]
    chunks = decodes + prefills

    positions = np.concatenate([np.arange(c.start, c.stop) for c in chunks])
    token_ids = [token for c in chunks for token in c.live.token_ids[c.start : c.stop]]
    slots = np.concatenate([_slots(c, block_size) for c in chunks])
    ends = np.cumsum([c.stop - c.start for c in chunks])
    sampled = [
        (c.live, end - 1) for c, end in zip(chunks, ends, strict=True) if c.stop == len(c.live.token_ids)
    ]

    tables = np.zeros((len(chunks), max(-(-c.stop // block_size) for c in chunks)), dtype=np.int32)
    for table, chunk in zip(tables, chunks, strict=True):
        own = chunk.live.blocks[: len(table)]
        table[: len(own)] = own

    return StepBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        attention=AttentionMetadata(
            block_size=block_size,
            slots=tensor(slots),
            block_tables=tensor(tables, torch.int32),
            contexts=tensor([c.stop for c in chunks], torch.int32),
            num_decodes=len(decodes),
            prefills=[(c.start, c.stop) for c in prefills],
        ),
        sampled=[live for live, _ in sampled],
        sampled_rows=tensor([int(end) for _, end in sampled]),
    )


def _slots(chunk: Chunk, block_size: int) -> np.ndarray:
    first = chunk.start // block_size
    used = np.array(chunk.live.blocks[first : -(-chunk.stop // block_size)])
    positions = np.arange(chunk.start, chunk.stop)
    return used[positions // block_size - first] * block_size + positions % block_size
