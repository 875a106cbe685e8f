"""Sums over the KV of blocks, which show whether it is still what it was. Imported where there is Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048  # words of a program's turn


def block_sums(rows: Tensor, words: int, blocks: Tensor) -> Tensor:
    """int64 [blocks] on the device: the sum of each word times an odd number of its own, modulo 2⁶⁴. So a sum
    changes with any one word, and if words change their places.

    `rows` int64 [rows, 2]: of each row of the cache, its address, and the words of 8 bytes of one block in
    it; `words`: the most of these. `blocks` int64: their places in all rows."""
    sums = torch.zeros(len(blocks), dtype=torch.int64, device=blocks.device)
    _sum[len(blocks), len(rows)](rows, blocks, sums, words, CHUNK=CHUNK)
    return sums


@triton.jit
def _sum(rows, blocks, sums, most, CHUNK: tl.constexpr):
    which = tl.program_id(0)
    row = tl.program_id(1)
    words = tl.load(rows + 2 * row + 1)
    first = tl.load(blocks + which) * words
    block = (tl.load(rows + 2 * row) + 8 * first).to(tl.pointer_type(tl.int64))
    total = tl.zeros((CHUNK,), dtype=tl.int64)
    for start in range(0, most, CHUNK):
        place = start + tl.arange(0, CHUNK)
        x = tl.load(block + place, mask=place < words, other=0)
        total += x * (2 * (row.to(tl.int64) * most + place) + 1)
    tl.atomic_add(sums + which, tl.sum(total))
