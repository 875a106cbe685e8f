"""`engine.kernels.sampling.drafts` on the GPU: one launch each, where torch has a dozen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.sampling.drafts import Sources, StepInputs

BLOCK = 256  # rows of one program


def follow(
    inputs: StepInputs, sources: Sources, sampled: Tensor, guesses: Tensor, resolved: Tensor
) -> StepInputs:
    """As `drafts.follow`. All tensors are dense."""
    positions, slots, contexts = (torch.empty_like(values) for values in inputs[1:])
    out = StepInputs(torch.empty_like(positions), positions, slots, contexts)
    tokens, columns = len(inputs.token_ids), resolved.shape[1]
    _follow[(triton.cdiv(max(tokens, columns, len(inputs.contexts)), BLOCK),)](
        *inputs,
        *sources,
        sampled,
        guesses,
        resolved,
        *out,
        tokens,
        min(len(sources.shift_rows), tokens),
        len(inputs.contexts),
        columns,
        AHEAD=sources.token_ids.shape[1],
        BLOCK=BLOCK,
    )
    return out


def accepted(tokens: Tensor, rows: Tensor, drafts: Tensor, resolved: Tensor) -> Tensor:
    """As `drafts.accepted`. All tensors are dense."""
    count = torch.empty_like(tokens)
    columns = resolved.shape[1]
    _accepted[(triton.cdiv(len(tokens), BLOCK),)](
        tokens, rows, drafts, resolved, count, len(tokens), columns, BLOCK=BLOCK
    )
    return count


@triton.jit(do_not_specialize=["tokens", "rows", "contexts_size", "columns"])
def _follow(
    token_ids,
    positions,
    slots,
    contexts,
    source_rows,
    shift_rows,
    ahead_ids,
    ahead_slots,
    guess_index,
    sampled,
    guesses,
    resolved,
    out_ids,
    out_positions,
    out_slots,
    out_contexts,
    tokens,
    rows,
    contexts_size,
    columns,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, decoding = row < tokens, row < rows
    first = tl.load(shift_rows + row, mask=decoding, other=-1)
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
    tl.store(resolved + row, tl.where(decoding, token, 0), mask=row < columns)
    tl.store(resolved + columns + row, shift, mask=row < columns)


@triton.jit(do_not_specialize=["count", "columns"])
def _accepted(tokens, rows, drafts, resolved, accepted, count, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    length = tl.load(drafts + row, mask=inside, other=0)
    most = tl.max(length, axis=0)
    at = tl.load(rows + row, mask=inside, other=0)
    right = inside
    total = tl.zeros([BLOCK], tl.int64)
    for j in range(most):
        right = right & (j < length)
        token = tl.load(tokens + row + j, mask=right, other=0)
        following = tl.load(resolved + at + j + 1, mask=right & (at + j + 1 < columns), other=0)
        right = right & (token == following)
        total += right.to(tl.int64)
    tl.store(accepted + row, total, mask=inside)
