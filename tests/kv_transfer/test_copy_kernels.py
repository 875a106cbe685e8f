"""Batches of slices against torch's index operations, bit for bit: compiled on a GPU, else interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.kv_transfer.layout import Slice


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "slices"),
    [
        (4, 64, 16, [(0, 0, 4, 0, 37)]),
        (4, 128, 128, [(0, 1, 2, 5, 70), (1, 0, 4, 0, 1), (1, 3, 1, 100, 28)]),
        (8, 64, 3, [(0, 7, 1, 2, 5), (1, 0, 8, 2, 5)]),
        (2, 6, 16, [(0, 1, 1, 0, 300), (0, 0, 1, 299, 1), (1, 0, 2, 7, 0x40)]),
    ],
)
def test_equal_torch(
    kernel_device: str, dtype: str, heads: int, head_dim: int, block_size: int,
    slices: list[tuple[int, int, int, int, int]],
) -> None:  # fmt: skip
    """`slices`: (layer, first head, heads, first position, positions), two requests in turn."""
    from baton.kv_transfer.device import copy_kernels

    element, generator = getattr(torch, dtype), torch.Generator().manual_seed(len(slices))
    blocks = -(-320 // block_size)
    # Bits of any kind, NaN too: they are moved, not computed with.
    shape = (2, 2 * blocks, block_size, heads, head_dim)
    pools = []
    for _ in range(2):
        words = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).to(torch.int32)
        pools.append(words.view(element)[..., :head_dim].contiguous())
    tables = torch.randperm(2 * blocks, generator=generator).view(2, blocks)

    def rows(number: int) -> torch.Tensor:
        _, _, _, start, tokens = slices[number]
        position = torch.arange(start, start + tokens)
        return tables[number % 2][position // block_size] * block_size + position % block_size

    expected = [
        pools[layer].flatten(1, 2)[:, rows(i), first : first + count].contiguous()
        for i, (layer, first, count, _, _) in enumerate(slices)
    ]
    on_device = [p.to(kernel_device) for p in pools]
    moved = [torch.zeros_like(e, device=kernel_device) for e in expected]
    device_tables = tables.to(kernel_device)

    def launch(layers: list[torch.Tensor], *, into_pool: bool) -> None:
        lines = [
            copy_kernels.line(
                layers[layer],
                device_tables[i % 2],
                moved[i].data_ptr(),
                Slice(layer, first, count, start, tokens),
                (first, first + count),
                0,
            )
            for i, (layer, first, count, start, tokens) in enumerate(slices)
        ]
        table = torch.tensor(lines).to(kernel_device)
        most = max(s[4] for s in slices), max(s[2] for s in slices)
        copy_kernels.launch(table, layers[0], *most, into_pool=into_pool)

    launch(on_device, into_pool=False)
    for ours, right in zip(moved, expected, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), right.view(torch.uint8))

    targets = [torch.ones_like(p) for p in pools]
    expected_targets = [t.clone() for t in targets]
    for i, (layer, first, count, _, _) in enumerate(slices):
        expected_targets[layer].flatten(1, 2)[:, rows(i), first : first + count] = expected[i]
    targets = [t.to(kernel_device) for t in targets]
    launch(targets, into_pool=True)
    for target, right in zip(targets, expected_targets, strict=True):
        assert torch.equal(target.cpu().view(torch.uint8), right.view(torch.uint8))


def checksum(words: np.ndarray) -> int:
    """Of a slice, as its 32-bit words."""
    x = words.astype(np.uint32) ^ (np.arange(len(words), dtype=np.uint32) * np.uint32(0x9E3779B1))
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(13)
    return int(x.astype(np.int64).sum())


@pytest.mark.parametrize("into_pool", [False, True], ids=["gather", "scatter"])
@pytest.mark.parametrize("fp8", [False, True])
def test_checksums_of_what_is_moved(kernel_device: str, fp8: bool, into_pool: bool) -> None:
    """Values, and the scales behind them, of two slices."""
    from baton.kv_transfer.device import copy_kernels

    heads, head_dim, blocks = 3, 16, torch.tensor([7, 2, 5], device=kernel_device)
    pieces = [Slice(0, 0, heads, 5, 37), Slice(0, 1, 2, 0, 48)]
    element = torch.float8_e4m3fn if fp8 else torch.bfloat16
    pool = torch.randint(0, 255, (2, 9, 16, heads, head_dim * element.itemsize), dtype=torch.uint8)
    pool = pool.to(kernel_device).view(element)
    scales = torch.rand(2, 9, heads, 16, device=kernel_device)
    words = [2 * p.token_count * p.head_count * (head_dim * element.itemsize // 4 + fp8) for p in pieces]
    slots = [torch.randint(-9, 9, (n,), dtype=torch.int32, device=kernel_device) for n in words]
    sums = torch.zeros(2, dtype=torch.int64, device=kernel_device)
    for part in (pool, scales)[: 1 + fp8]:
        values = part is scales
        lines = []
        for i, (piece, slot) in enumerate(zip(pieces, slots, strict=True)):
            first = len(slot) - 2 * piece.token_count * piece.head_count if values else 0
            held = piece.head_start, piece.head_start + piece.head_count
            lines.append(
                copy_kernels.line(
                    part, blocks, slot.data_ptr() + 4 * first, piece, held, 0,
                    checksum=sums[i].data_ptr(), first_word=first,
                )
            )  # fmt: skip
        copy_kernels.launch(
            torch.tensor(lines, device=kernel_device), part, 48, heads, into_pool=into_pool, sums=True
        )
    found = sums.tolist()
    assert found == [checksum(slot.cpu().numpy()) for slot in slots]

    again = torch.zeros(2, dtype=torch.int64, device=kernel_device)
    slots[1][words[1] - 1] ^= 1 << 20
    lines = [[s.data_ptr(), len(s), again.data_ptr() + 8 * i] for i, s in enumerate(slots)]
    copy_kernels.launch_sums(torch.tensor(lines, device=kernel_device), max(words))
    assert again.tolist()[0] == found[0]
    assert again.tolist()[1] != found[1], "one bit differs"
    assert again.tolist()[1] == checksum(slots[1].cpu().numpy())


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "beside"),
    [(3, 8, 16, 32), (1, 5, 6 * 4096, 0), (2, 3, 10, 6)],
)
def test_states_equal_torch(kernel_device: str, rows: int, heads: int, head_dim: int, beside: int) -> None:
    """Heads 2 to `heads` of a rank, of which one slice has some. Other numbers lie beside them in a row."""
    from baton.kv_transfer.device import copy_kernels

    generator = torch.Generator().manual_seed(rows)
    width, first_head = (heads - 2) * head_dim, 2
    whole = torch.randint(-(2**31), 2**31 - 1, (4, rows, width + beside), generator=generator).to(torch.int32)
    pieces = [Slice(0, 0, 4, 9, 0, 0), Slice(0, 2, heads - 2, 9, 0, 0)]
    held = [(2, min(4, heads)), (2, heads)]

    def pool(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.float32)[..., beside:].unflatten(2, (-1, head_dim))

    source = whole.to(kernel_device)
    slots = torch.tensor([3, 1], device=kernel_device)
    dense = [
        torch.zeros(rows, p.head_count, head_dim, dtype=torch.int32, device=kernel_device) for p in pieces
    ]
    sums = torch.zeros(2, dtype=torch.int64, device=kernel_device)

    def launch(of: torch.Tensor, *, into_pool: bool) -> None:
        lines = [
            copy_kernels.state_line(
                pool(of), slots[i : i + 1], dense[i].data_ptr(), pieces[i], held[i], first_head,
                checksum=sums[i].data_ptr(),
            )
            for i in range(2)
        ]  # fmt: skip
        table = torch.tensor(lines, device=kernel_device)
        copy_kernels.launch_states(table, pool(of), heads, into_pool=into_pool, sums=True)

    launch(source, into_pool=False)
    for i, (slot, (first, last)) in enumerate(zip((3, 1), held, strict=True)):
        expected = torch.zeros_like(dense[i].cpu())
        part = pool(whole)[slot, :, first - first_head : last - first_head].view(torch.int32)
        expected[:, first - pieces[i].head_start : last - pieces[i].head_start] = part
        assert torch.equal(dense[i].cpu(), expected)
    assert sums.tolist()[1] == checksum(dense[1].cpu().numpy().flatten())

    target, expected = torch.ones_like(source), torch.ones_like(whole)
    launch(target, into_pool=True)
    for slot, (first, last) in zip((3, 1), held, strict=True):
        heads_of_slot = slice(first - first_head, last - first_head)
        pool(expected)[slot, :, heads_of_slot] = pool(whole)[slot, :, heads_of_slot]
    assert torch.equal(target.cpu(), expected)
