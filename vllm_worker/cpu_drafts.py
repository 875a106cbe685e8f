"""Drafts in vLLM for CPUs (to 0.32): the temperature and the top_k of a request are repeated for its drafts.

The kernel for CPUs that does it writes to a copy of its output, unless that is of int64, and the copy goes.
So drafts were sampled with whatever the memory held, and an engine could die.
"""

from __future__ import annotations

from typing import Any

import torch


def repeat_what_drafts_are_sampled_with() -> None:
    """In the process with the model, before its first step. May be repeated."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_kernel._impl = _repeat


def _repeat(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Names are those of the kernel. `cu_num_tokens`: where the drafts of each request end in `output`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(values.repeat_interleave(counts))
