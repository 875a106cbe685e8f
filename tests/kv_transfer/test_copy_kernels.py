"""Batches of slices against torch's index operations, bit for bit: compiled on a GPU, else interpreted."""

import numpy as np
import pytest
import torch

from baton.kv_names.cache_kinds import ATTENTION, FP8, STATE, CacheArray
from baton.kv_transfer.device import copy_kernels
from baton.kv_transfer.device.copy_kernels import Pages
from baton.kv_transfer.device.host_pool import converted
from baton.kv_transfer.device.pool import Window, window
from baton.kv_transfer.layout import Piece

from .ranks import ORDERS, as_bytes, in_memory


def lines(
    pools: list[torch.Tensor], tables: list[torch.Tensor], dense: list[torch.Tensor], held: list[Window],
    **sums: list[int],
) -> torch.Tensor:  # fmt: skip
    """The table for `launch`: one line of each pool, request, dense memory and window."""
    found = [
        Pages.of(pool).line(
            pool.data_ptr(), blocks.data_ptr(), x.data_ptr(), part, **{k: v[i] for k, v in sums.items()}
        )
        for i, (pool, blocks, x, part) in enumerate(zip(pools, tables, dense, held, strict=True))
    ]
    return torch.tensor(found, device=dense[0].device)


def most(held: list[Window]) -> tuple[int, int]:
    return max(x.count for x in held), max(x.heads for x in held)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("rows", "dtype", "heads", "head_dim", "block_size", "slices"),
    [
        (2, "float32", 4, 64, 16, [(0, 0, 4, 0, 37)]),
        (1, "bfloat16", 1, 576, 64, [(0, 0, 1, 5, 70), (1, 0, 1, 0, 300)]),
        (2, "bfloat16", 4, 128, 192, [(0, 1, 2, 5, 70), (1, 0, 4, 0, 1), (1, 3, 1, 100, 28)]),
        (2, "float16", 8, 64, 3, [(0, 7, 1, 2, 5), (1, 0, 8, 2, 5)]),
        (2, "bfloat16", 2, 6, 16, [(0, 1, 1, 0, 300), (0, 0, 1, 299, 1), (1, 0, 2, 7, 0x40)]),
        (2, "float32", 3, 1, 16, [(0, 1, 2, 0, 300), (1, 0, 3, 5, 37)]),  # as scales
        (2, "float32", 1, 5, 1, [(0, 0, 1, 0, 300)]),
    ],
)
def test_equal_torch(
    kernel_device: str, order: str, rows: int, dtype: str, heads: int, head_dim: int, block_size: int,
    slices: list[tuple[int, int, int, int, int]],
) -> None:  # fmt: skip
    """`slices`: (layer, first head, heads, first position, positions), two requests in turn."""
    element, generator = getattr(torch, dtype), torch.Generator().manual_seed(len(slices))
    blocks = -(-320 // block_size)
    # Bits of any kind, NaN too: they are moved, not computed with.
    shape = (rows, 2 * blocks, block_size, heads, head_dim)
    pools = []
    for _ in range(2):
        words = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).to(torch.int32)
        pools.append(words.view(element)[..., :head_dim])
    tables = torch.randperm(2 * blocks, generator=generator).view(2, blocks)
    part = CacheArray(ATTENTION, "kv", rows, heads, head_dim, dtype)
    pieces = [Piece(layer, *rest) for layer, *rest in slices]
    held = [window(x, part, (0, heads)) for x in pieces]

    def places(i: int) -> tuple[slice, torch.Tensor, torch.Tensor, slice]:
        piece = pieces[i]
        position = torch.arange(piece.token_start, piece.token_start + piece.token_count)
        held_heads = slice(piece.head_start, piece.head_start + piece.head_count)
        return slice(None), tables[i % 2][position // block_size], position % block_size, held_heads

    expected = [pools[piece.layer][places(i)].contiguous() for i, piece in enumerate(pieces)]
    moved = [torch.zeros_like(e, device=kernel_device) for e in expected]
    device_tables = [tables[i % 2].to(kernel_device) for i in range(len(pieces))]

    def launch(layers: list[torch.Tensor], *, into_pool: bool) -> None:
        sums = torch.zeros(len(pieces), dtype=torch.int64, device=kernel_device)
        at = [sums.data_ptr() + 8 * i for i in range(len(pieces))]
        table = lines([layers[piece.layer] for piece in pieces], device_tables, moved, held, checksum=at)
        copy_kernels.launch(table, Pages.of(layers[0]), most(held), into_pool=into_pool)

    launch([in_memory(order, p).to(kernel_device) for p in pools], into_pool=False)
    for ours, right in zip(moved, expected, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), right.view(torch.uint8))

    expected_targets = [torch.ones_like(p) for p in pools]
    for i, piece in enumerate(pieces):
        expected_targets[piece.layer][places(i)] = expected[i]
    targets = [in_memory(order, torch.ones_like(p)).to(kernel_device) for p in pools]
    launch(targets, into_pool=True)
    for target, right in zip(targets, expected_targets, strict=True):
        ours, right = target.cpu().contiguous(), right.contiguous()
        assert torch.equal(ours.view(torch.uint8), right.view(torch.uint8))


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
    heads, head_dim, blocks = 3, 16, torch.tensor([7, 2, 5], device=kernel_device)
    element = torch.float8_e4m3fn if fp8 else torch.bfloat16
    part = CacheArray(ATTENTION, "kv", 2, heads, head_dim, str(element).removeprefix("torch."))
    pieces = [Piece(0, 0, heads, 5, 37), Piece(0, 1, 2, 0, 48)]
    held = [window(piece, part, (0, heads)) for piece in pieces]
    pool = torch.randint(0, 255, (2, 9, 16, heads, head_dim * element.itemsize), dtype=torch.uint8)
    pool = pool.to(kernel_device).view(element)
    scales = torch.rand(2, 9, heads, 16, device=kernel_device).transpose(2, 3).unsqueeze(4)
    words = [part.bytes_of(x.head_count, x.token_count) // 4 for x in pieces]
    slots = [torch.randint(-9, 9, (n,), dtype=torch.int32, device=kernel_device) for n in words]
    sums = torch.zeros(2, dtype=torch.int64, device=kernel_device)
    at = [sums.data_ptr() + 8 * i for i in range(2)]
    for plane in (pool, scales)[: 1 + fp8]:
        first = [n - 2 * x.dense_size if plane is scales else 0 for n, x in zip(words, held, strict=True)]
        dense = [slot[n:] for slot, n in zip(slots, first, strict=True)]
        table = lines([plane] * 2, [blocks] * 2, dense, held, checksum=at, first_word=first)
        copy_kernels.launch(table, Pages.of(plane), most(held), into_pool=into_pool)
    found = sums.tolist()
    assert found == [checksum(slot.cpu().numpy()) for slot in slots]

    again = torch.zeros(2, dtype=torch.int64, device=kernel_device)
    slots[1][words[1] - 1] ^= 1 << 20
    of_sums = [[s.data_ptr(), len(s), again.data_ptr() + 8 * i] for i, s in enumerate(slots)]
    copy_kernels.launch_sums(torch.tensor(of_sums, device=kernel_device), max(words))
    assert again.tolist()[0] == found[0]
    assert again.tolist()[1] != found[1], "one bit differs"
    assert again.tolist()[1] == checksum(slots[1].cpu().numpy())


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "beside"),
    [(3, 8, 16, 32), (1, 5, 6 * 4096, 0), (2, 3, 10, 6)],
)
def test_states_equal_torch(kernel_device: str, rows: int, heads: int, head_dim: int, beside: int) -> None:
    """Heads 2 to `heads` of a rank, of which one slice has some. Other numbers lie beside them in a row."""
    generator = torch.Generator().manual_seed(rows)
    width, first_head = (heads - 2) * head_dim, 2
    whole = torch.randint(-(2**31), 2**31 - 1, (4, rows, width + beside), generator=generator).to(torch.int32)
    part = CacheArray(STATE, "ssm", rows, heads, head_dim, "float32")
    pieces = [Piece(0, 0, 4, 9, 0, 1), Piece(0, 2, heads - 2, 9, 0, 1)]
    held = [window(piece, part, (first_head, heads)) for piece in pieces]

    def pool(tensor: torch.Tensor) -> torch.Tensor:
        """[slots, rows, heads, head_dim]"""
        return tensor.view(torch.float32)[..., beside:].unflatten(2, (-1, head_dim))

    source = whole.to(kernel_device)
    slots = torch.tensor([3, 1], device=kernel_device)
    dense = [
        torch.zeros(rows, p.head_count, head_dim, dtype=torch.int32, device=kernel_device) for p in pieces
    ]
    sums = torch.zeros(2, dtype=torch.int64, device=kernel_device)
    at = [sums.data_ptr() + 8 * i for i in range(2)]

    def launch(of: torch.Tensor, *, into_pool: bool) -> None:
        plane = pool(of).transpose(0, 1).unsqueeze(3)
        table = lines([plane] * 2, [slots[i:] for i in range(2)], dense, held, checksum=at)
        copy_kernels.launch(table, Pages.of(plane), most(held), into_pool=into_pool)

    launch(source, into_pool=False)
    of_slots = [(3, 2, min(4, heads)), (1, 2, heads)]
    for ours, piece, (slot, first, last) in zip(dense, pieces, of_slots, strict=True):
        expected = torch.zeros_like(ours.cpu())
        right = pool(whole)[slot, :, first - first_head : last - first_head].view(torch.int32)
        expected[:, first - piece.head_start : last - piece.head_start] = right
        assert torch.equal(ours.cpu(), expected)
    assert sums.tolist()[1] == checksum(dense[1].cpu().numpy().flatten())

    target, expected = torch.ones_like(source), torch.ones_like(whole)
    launch(target, into_pool=True)
    for slot, first, last in of_slots:
        moved = slice(first - first_head, last - first_head)
        pool(expected)[slot, :, moved] = pool(whole)[slot, :, moved]
    assert torch.equal(target.cpu(), expected)


@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("sent", "kept", "head_dim"),
    [("float8_e4m3fn", "bfloat16", 16), ("float8_e4m3fn", "float16", 24), ("bfloat16", "float32", 24)],
)
def test_kernel_that_converts(kernel_device: str, order: str, sent: str, kept: str, head_dim: int) -> None:
    """Against the torch code. The pool has heads 2 to 5 of 8, and the slice has heads 1 to 4."""
    part = CacheArray(ATTENTION, "kv", 2, 8, head_dim, sent)
    held = window(Piece(0, 1, 4, 5, 37), part, (2, 6))
    dense = [torch.randn(2, 37, 4, head_dim)]
    dense[0][1, 3] = 0
    if sent == "float8_e4m3fn":
        dense = [dense[0].to(torch.float8_e4m3fn), torch.rand(2, 37, 4, 1) + 0.1]
    else:
        dense = [dense[0].to(getattr(torch, sent))]
    sent_planes = [as_bytes(x).numpy() for x in dense]
    slot = np.concatenate([x.flatten() for x in sent_planes])
    assert len(slot) == part.bytes_of(4, 37)
    [right] = map(torch.from_numpy, converted(sent_planes, sent, kept))

    dtype = getattr(torch, kept)
    pool = in_memory(order, torch.zeros(2, 9, 16, 4, head_dim).to(dtype)).to(kernel_device)
    blocks, there = torch.tensor([7, 2, 5], device=kernel_device), torch.from_numpy(slot).to(kernel_device)
    line = copy_kernels.line_to_convert(pool.data_ptr(), blocks.data_ptr(), there.data_ptr(), held)
    table = torch.tensor([line], device=kernel_device)
    copy_kernels.launch_converting(table, pool, getattr(torch, sent), held.dense_size, into_pool=True)

    position = torch.arange(5, 42)
    places = slice(None), torch.tensor([7, 2, 5])[position // 16], position % 16, slice(0, 3)
    expected = torch.zeros(pool.shape, dtype=dtype)
    expected[places] = right.view(dtype)[:, :, 1:]
    assert torch.equal(pool.cpu().float(), expected.float()), "nothing else moves"


@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kept", "head_dim"), [("bfloat16", 16), ("float32", 24)])
def test_kernel_that_gathers_in_fp8(kernel_device: str, order: str, kept: str, head_dim: int) -> None:
    """Against the torch code: the same bits. The pool has heads 2 to 5 of 8, and the slice has 3 and 4."""
    part, dtype = CacheArray(ATTENTION, "kv", 2, 8, head_dim, FP8), getattr(torch, kept)
    held = window(Piece(0, 3, 2, 5, 37), part, (2, 6))
    pool = torch.randn(2, 9, 16, 4, head_dim).to(dtype)
    pool[1, 2, 3, 1] = 0
    position = torch.arange(5, 42)
    heads = pool[:, torch.tensor([7, 2, 5])[position // 16], position % 16, 1:3].contiguous()
    expected = np.concatenate([x.flatten() for x in converted([as_bytes(heads).numpy()], kept, FP8)])

    pool = in_memory(order, pool).to(kernel_device)
    blocks = torch.tensor([7, 2, 5], device=kernel_device)
    dense = torch.zeros(part.bytes_of(2, 37), dtype=torch.uint8, device=kernel_device)
    line = copy_kernels.line_to_convert(pool.data_ptr(), blocks.data_ptr(), dense.data_ptr(), held)
    table = torch.tensor([line], device=kernel_device)
    copy_kernels.launch_converting(table, pool, torch.float8_e4m3fn, held.dense_size, into_pool=False)
    assert np.array_equal(dense.cpu().numpy(), expected)
