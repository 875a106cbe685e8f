"""Sums over the KV of blocks. The kernel gets addresses of rows, not tensors of which it may read all."""

import pytest
import torch

from tests.device import DEVICE

pytestmark = pytest.mark.all


def test_sums_of_blocks_change_with_each_word_and_its_place(kernel_device: str) -> None:
    from baton.engine.kernels.block_sums import CHUNK, block_sums  # late: it needs Triton

    cache = [torch.randint(-(2**62), 2**62, (6, words), device=DEVICE) for words in (3, CHUNK + 5)]
    rows = torch.tensor([[x.data_ptr(), x.shape[1]] for x in cache], device=DEVICE)

    def sums(*blocks: int) -> list[int]:
        return block_sums(rows, CHUNK + 5, torch.tensor(blocks, device=DEVICE)).tolist()

    first = sums(4, 1)
    row, place = (torch.arange(n, device=DEVICE) for n in (2, CHUNK + 5))
    odd = 2 * (row[:, None] * (CHUNK + 5) + place) + 1
    assert first == [
        sum((x[block] * each[: x.shape[1]]).sum() for x, each in zip(cache, odd, strict=True))
        for block in (4, 1)
    ]
    cache[1][1, [7, CHUNK + 1]] = cache[1][1, [CHUNK + 1, 7]]
    cache[0][2] += 1
    assert sums(4, 1) == [first[0], sums(1)[0]]
    assert sums(1)[0] != first[1]
