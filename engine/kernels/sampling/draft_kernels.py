"""`engine.kernels.sampling.drafts` on the GPU: one launch each, where torch has a dozen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.sampling.drafts import Inputs, Sources

BLOCK = 256  # rows of one program


def follow(inputs: Inputs, sources: Sources, sampled: Tensor, guesses: Tensor, given: Tensor) -> Inputs:
    """As `drafts.follow`. All tensors are dense."""
    positions, slots, contexts = (torch.empty_like(values) for values in inputs[1:])
    out = Inputs(torch.empty_like(positions), positions, slots, contexts)
    tokens, kept = len(inputs.token_ids), given.shape[1]
    _follow[(triton.cdiv(max(tokens, kept, len(inputs.contexts)), BLOCK),)](
        *inputs,
        *sources,
        sampled,
        guesses,
        given,
        *out,
        tokens,
        min(len(sources.after), tokens),
        len(inputs.contexts),
        kept,
        AHEAD=sources.token_ids.shape[1],
        BLOCK=BLOCK,
    )
    return out


def accepted(tokens: Tensor, rows: Tensor, drafts: Tensor, given: Tensor) -> Tensor:
    """As `drafts.accepted`. All tensors are dense."""
    count = torch.empty_like(tokens)
    kept = given.shape[1]
    _accepted[(triton.cdiv(len(tokens), BLOCK),)](
        tokens, rows, drafts, given, count, len(tokens), kept, BLOCK=BLOCK
    )
    return count


@triton.jit(do_not_specialize=["tokens", "rows", "contexts_size", "kept"])
def _follow(
    token_ids,
    positions,
    slots,
    contexts,
    source_rows,
    after,
    ahead_ids,
    ahead_slots,
    guess_index,
    sampled,
    guesses,
    given,
    out_ids,
    out_positions,
    out_slots,
    out_contexts,
    tokens,
    rows,
    contexts_size,
    kept,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, decoding = row < tokens, row < rows
    first = tl.load(after + row, mask=decoding, other=-1)
    moved = first >= 0
    shift = tl.load(sampled + first * 2 + 1, mask=moved, other=0)
    token = tl.load(token_ids + row, mask=inside, other=0)
    token = tl.where(moved, tl.load(ahead_ids + row * AHEAD + shift, mask=moved, other=0), token)
    source = tl.load(source_rows + row, mask=inside, other=-1)
    newest = tl.load(sampled + (source + shift) * 2, mask=source >= 0, other=0)
    token = tl.where(source >= 0, tl.maximum(newest, 0), token)
    guess = tl.load(guess_index + row, mask=decoding, other=-1)
    token = tl.where(guess >= 0, tl.load(guesses + guess, mask=guess >= 0, other=0), token)
    slot = tl.load(slots + row, mask=inside, other=0)
    slot = tl.where(moved, tl.load(ahead_slots + row * AHEAD + shift, mask=moved, other=0), slot)
    tl.store(out_ids + row, token, mask=inside)
    tl.store(out_positions + row, tl.load(positions + row, mask=inside, other=0) + shift, mask=inside)
    tl.store(out_slots + row, slot, mask=inside)
    seen = row < contexts_size
    context = tl.load(contexts + row, mask=seen, other=0)
    tl.store(out_contexts + row, (context + shift).to(tl.int32), mask=seen)
    tl.store(given + row, tl.where(decoding, token, 0), mask=row < kept)
    tl.store(given + kept + row, shift, mask=row < kept)


@triton.jit(do_not_specialize=["count", "kept"])
def _accepted(tokens, rows, drafts, given, accepted, count, kept, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    left = tl.load(drafts + row, mask=inside, other=0)
    most = tl.max(left, axis=0)
    at = tl.load(rows + row, mask=inside, other=0)
    right = inside
    total = tl.zeros([BLOCK], tl.int64)
    for j in range(most):
        right = right & (j < left)
        token = tl.load(tokens + row + j, mask=right, other=0)
        following = tl.load(given + at + j + 1, mask=right & (at + j + 1 < kept), other=0)
        right = right & (token == following)
        total += right.to(tl.int64)
    tl.store(accepted + row, total, mask=inside)
