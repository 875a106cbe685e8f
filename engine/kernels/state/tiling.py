"""Where the state layers of a step read and write, on a GPU: the same for all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.kernels.state.mamba2 import scan_work
from baton.engine.kernels.upload import upload

TOKENS = 64
TOKENS_FLOAT32 = 32  # more do not fit into registers and shared memory


@dataclass(frozen=True, slots=True)
class TritonStateTiling:
    slots: Tensor  # [requests] int32
    contexts: Tensor  # [decodes] int32; a request with context 0 is padding
    scans: Tensor | None  # [chunks, 6] int32, from `scan_work`; None: no chunks. Exact: decodes first
    copies: Tensor | None  # as `AttentionMetadata.state_copies`
    prompts: int  # at most so many have chunks
    tokens: int  # of a chunk, a power of 2
    multiprocessors: int
    exact: bool = False


def chunk_tokens(dtype: torch.dtype) -> int:
    return TOKENS_FLOAT32 if dtype is torch.float32 else TOKENS


def tile_states(
    metadata: AttentionMetadata, dtype: torch.dtype, multiprocessors: int, *, exact: bool = False
) -> TritonStateTiling:
    """`exact`: decodes are chunks of one token."""
    decodes, device, slots = metadata.num_decodes, metadata.contexts.device, metadata.state_slots
    assert slots is not None, "each request of a model with states has a slot"
    scans, tokens = metadata.scans, chunk_tokens(dtype)
    if metadata.prefills:
        (scans,) = upload([scan_work(metadata.prefills, decodes, tokens)], device)
    prompts = len(metadata.prefills)
    if metadata.scans is not None:
        prompts = min(len(slots), len(metadata.scans))
    contexts, copies = metadata.contexts[:decodes], metadata.state_copies
    if exact:
        scans = torch.cat((_of_decodes(contexts), *([] if scans is None else [scans])))
        if copies is None:  # so that all steps run one compiled form of a kernel
            copies = torch.zeros(len(metadata.slots), dtype=torch.int32, device=device)
    return TritonStateTiling(slots, contexts, scans, copies, prompts, tokens, multiprocessors, exact)


def _of_decodes(contexts: Tensor) -> Tensor:
    """As `scan_work`, of decodes. Padding has no token."""
    rows = torch.arange(len(contexts), dtype=torch.int32, device=contexts.device)
    tokens = contexts.clamp_max(1)
    return torch.stack((rows, rows, tokens, torch.zeros_like(rows), tokens, contexts - 1), dim=1)
