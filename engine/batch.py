"""Everything one step needs, in numpy: built from the schedule, moved to the device at once, gone after the
launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.live_request import PENDING, LiveRequest
from engine.scheduler import Chunk

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for pointers that are aligned differently."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Chunks one after the other, those of one token first."""

    token_ids: np.ndarray  # [tokens] int64; −1 − i: the i-th token that the step before samples
    positions: np.ndarray  # [tokens] int64
    slots: np.ndarray  # [tokens] int64: where the KV of each goes
    block_tables: np.ndarray  # [requests, blocks] int32
    contexts: np.ndarray  # [requests] int32: positions of each request, those of this step included
    num_decodes: int
    prefills: list[tuple[int, int]]  # (start, stop) positions of each longer chunk
    sampled: list[LiveRequest]  # whose tokens are all computed after this step
    sampled_rows: np.ndarray  # [sampled] int64: the row of each one's last token

    def on(self, device: torch.device, block_size: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Token ids, positions, and what attention needs."""
        arrays = [self.token_ids, self.positions, self.slots, self.block_tables, self.contexts]
        token_ids, positions, slots, tables, contexts = upload(arrays, device)
        metadata = AttentionMetadata(block_size, slots, tables, contexts, self.num_decodes, self.prefills)
        return token_ids, positions, metadata


def build_batch(chunks: list[Chunk], block_size: int, table_width: int | None = None) -> StepBatch:
    """`table_width`: blocks of a row of the block tables; None: as many as the longest request has."""
    # Decodes by length: those of like length are attended to together.
    decodes = sorted([c for c in chunks if c.stop - c.start == 1], key=attrgetter("stop"))
    prefills = [c for c in chunks if c.stop - c.start > 1]
    chunks = decodes + prefills

    newest = [c.live.token_ids[c.start] for c in decodes]
    tokens = [t if t != PENDING else -1 - c.live.row for t, c in zip(newest, decodes, strict=True)]
    for c in prefills:
        tokens += c.live.token_ids[c.start : c.stop]
    stops = np.array([c.stop for c in chunks])
    lengths = np.array([1] * len(decodes) + [c.stop - c.start for c in prefills])
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - stops, lengths)

    tables = _block_tables(chunks, table_width)
    request = np.repeat(np.arange(len(chunks)), lengths)
    slots = tables[request, positions // block_size] * np.int64(block_size) + positions % block_size

    sampled = [i for i, c in enumerate(chunks) if c.stop == len(c.live.token_ids)]
    return StepBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        positions=positions,
        slots=slots,
        block_tables=tables,
        contexts=stops.astype(np.int32),
        num_decodes=len(decodes),
        prefills=[(c.start, c.stop) for c in prefills],
        sampled=[chunks[i].live for i in sampled],
        sampled_rows=ends[sampled] - 1,
    )


def _block_tables(chunks: Sequence[Chunk], width: int | None) -> np.ndarray:
    """[requests, width] int32, zero past a request's blocks. Row by row it would take longer than all else
    here."""
    tables = [c.live.blocks for c in chunks]
    used = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), width or int(used.max())), dtype=np.int32)
    begins = np.arange(len(tables)) * padded.shape[1] - (np.cumsum(used) - used)
    flat = np.frombuffer(b"".join(tables), dtype=np.int32)
    padded.reshape(-1)[np.arange(len(flat)) + np.repeat(begins, used)] = flat
    return padded


def aligned(size: int) -> int:
    """Bytes to the next place where an array may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """On a GPU in one copy, which waits for nothing and nobody waits for: from pinned memory, which torch
    keeps until the copy is over."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    offsets = np.cumsum([0, *(aligned(array.nbytes) for array in arrays)]).tolist()
    packed = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
    host = packed.numpy()
    for array, at in zip(arrays, offsets, strict=False):
        host[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
    moved = packed.to(device, non_blocking=True)
    return [
        moved[at : at + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, at in zip(arrays, offsets, strict=False)
    ]
