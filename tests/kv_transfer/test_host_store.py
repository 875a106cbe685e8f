"""Blocks to the memory of the host and back, on the CPU, by the kernels in the interpreter, and on GPUs."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from kv_transfer.arena import channel_pair
from kv_transfer.host_store import HostStore, open_host_store
from kv_transfer.layout import FP8, KVLayout
from kv_transfer.ranked_store import RankedStore, StoreServer
from kv_transfer.transport import PagedKV

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCKS, BLOCK = 12, 16


def paged(dtype: str, device: str, layers: int = 3) -> PagedKV:
    """Bits of any kind: they are moved, not computed with."""
    layout = KVLayout(layers, 2, 8, dtype)
    element = getattr(torch, dtype)
    shape = (2, BLOCKS, BLOCK, 2, 8 * element.itemsize)
    values = [torch.randint(0, 255, shape, dtype=torch.uint8).view(element).to(device) for _ in range(layers)]
    scales = [torch.rand(2, BLOCKS, 2, BLOCK, device=device) for _ in range(layers)] if dtype == FP8 else []
    return PagedKV(values, BLOCK, layout, device, scales=scales)


def content(kv: PagedKV, block: int) -> list[torch.Tensor]:
    return [t[:, block].contiguous().view(torch.uint8).cpu() for t in (*kv.layers, *kv.scales)]


def ended(store: HostStore, count: int) -> list[bool]:
    whole, deadline = store.ended(), time.monotonic() + 20
    while len(whole) < count:
        assert time.monotonic() < deadline
        whole += store.ended()
    return whole


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", FP8])
def test_blocks_come_back_bit_for_bit_and_into_any_block(device: str, dtype: str) -> None:
    kv = paged(dtype, device)
    store = open_host_store(kv, 5, lambda: None)
    before = [content(kv, block) for block in range(BLOCKS)]
    saves = [(3, 4), (7, 0), (1, 2)]
    store.save(saves)
    assert ended(store, 3) == [True] * 3
    loads = [(9, 0), (3, 2), (10, 4)]
    store.load(loads)
    assert ended(store, 3) == [True] * 3
    saved = {place: before[block] for block, place in saves}
    expected = dict(enumerate(before)) | {block: saved[place] for block, place in loads}
    for block in range(BLOCKS):
        for ours, right in zip(content(kv, block), expected[block], strict=True):
            assert torch.equal(ours, right), block
    store.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_place_with_other_bytes_is_not_whole(device: str) -> None:
    kv = paged("bfloat16", device)
    store = open_host_store(kv, 4, lambda: None)
    store.save([(1, 0), (2, 1), (3, 2)])
    assert ended(store, 3) == [True] * 3
    memory = store._memory  # type: ignore[attr-defined]
    memory.reshape(4, -1)[1, 100] ^= 1
    store.load([(4, 0), (5, 1), (6, 2)])
    assert ended(store, 3) == [True, False, True]
    store.close()


@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
def test_the_kernels_move_whole_blocks_with_their_checksums(kernel_device: str, dtype: str) -> None:
    from kv_transfer.cuda_store import BlockLines

    kv = paged(dtype, kernel_device)
    lines = BlockLines(kv)
    assert lines.block_bytes == kv.layout.bytes_per_token * BLOCK
    stride = lines.block_bytes + 64
    dense = torch.zeros(3 * stride, dtype=torch.uint8, device=kernel_device)

    def copy(blocks: list[int], *, into_pool: bool) -> list[int]:
        words = np.empty(lines.words(len(blocks)), dtype=np.int64)
        table = torch.empty(len(words), dtype=torch.int64, device=kernel_device)
        lines.fill(words, table.data_ptr(), blocks, dense.data_ptr(), stride)
        table.copy_(torch.from_numpy(words))
        lines.launch(table, len(blocks), into_pool=into_pool)
        return table[len(blocks) : 2 * len(blocks)].tolist()

    before = [content(kv, block) for block in (4, 0, 11)]
    saved = copy([4, 0, 11], into_pool=False)
    assert len({*saved}) == 3
    assert copy([5, 6, 7], into_pool=True) == saved
    for block, right in zip((5, 6, 7), before, strict=True):
        assert all(map(torch.equal, content(kv, block), right))
    dense[stride + 17] ^= 1
    again = copy([5, 6, 7], into_pool=True)
    assert [found == sum_ for found, sum_ in zip(again, saved, strict=True)] == [True, False, True]


def test_a_block_is_whole_if_it_is_whole_on_all_ranks() -> None:
    kvs = [paged("float32", "cpu") for _ in range(3)]
    stores = [open_host_store(kv, 4, lambda: None) for kv in kvs]
    pairs = [channel_pair() for _ in kvs[1:]]
    for store, (_, theirs) in zip(stores[1:], pairs, strict=True):
        StoreServer(store, theirs)
    ranked = RankedStore(stores[0], [ours for ours, _ in pairs])
    before = [[content(kv, block) for block in (3, 5)] for kv in kvs]
    ranked.save([(3, 0), (5, 2)])
    assert ended(ranked, 2) == [True, True]
    stores[2]._memory[2, 7] ^= 1  # type: ignore[attr-defined]
    ranked.load([(8, 0), (9, 2)])
    assert ended(ranked, 2) == [True, False]
    for kv, right in zip(kvs, before, strict=True):
        assert all(map(torch.equal, content(kv, 8), right[0]))
    ranked.close()
