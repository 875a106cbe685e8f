"""Gather and scatter against torch's index operations, bit for bit: compiled on a GPU, else interpreted."""

import pytest
import torch


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("all_heads", "head_start", "heads", "head_dim", "tokens"),
    [(4, 0, 4, 64, 37), (4, 1, 2, 128, 70), (8, 7, 1, 64, 5), (3, 0, 3, 64, 1), (2, 1, 1, 6, 300)],
)
def test_equal_torch(
    kernel_device: str, dtype: str, all_heads: int, head_start: int, heads: int, head_dim: int, tokens: int
) -> None:
    from kv_transfer.copy_kernels import gather, scatter

    element, generator = getattr(torch, dtype), torch.Generator().manual_seed(tokens)
    # Bits of any kind, NaN too: they are moved, not computed with.
    words = torch.randint(-(2**31), 2**31 - 1, (2, 320, all_heads, head_dim), generator=generator)
    pool = words.to(torch.int32).view(element)[..., :head_dim].contiguous()
    rows = torch.randperm(320, generator=generator)[:tokens]
    part = slice(head_start, head_start + heads)
    expected = pool[:, rows, part].contiguous()

    ours = torch.zeros_like(expected, device=kernel_device)
    gather(pool.to(kernel_device), rows.to(kernel_device), head_start, ours)
    assert torch.equal(ours.cpu().view(torch.uint8), expected.view(torch.uint8))

    target = torch.ones_like(pool)
    expected_target = target.clone()
    expected_target[:, rows, part] = expected
    target = target.to(kernel_device)
    scatter(ours, target, rows.to(kernel_device), head_start)
    assert torch.equal(target.cpu().view(torch.uint8), expected_target.view(torch.uint8))
