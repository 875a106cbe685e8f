"""Gather and scatter between paged pools and arena slots, on the CPU and (marked gpu) on side streams."""

import itertools
import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.device.host_pool import open_pool
from baton.kv_transfer.device.pool import Pool
from baton.kv_transfer.layout import KVLayout, cut
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.staging import GATHER_BYTES, SCATTER_BYTES, SLACK, at_once, coalesce, landing_bytes
from tests.layouts import kv_layout, paged
from tests.within import WITHIN

from . import ranks
from .ranks import in_memory

ORDERS = list(ranks.ORDERS)[:3]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def passed(pool: Pool, event: Any) -> None:
    deadline = time.monotonic() + WITHIN
    while event is not None and not pool.passed(event):
        assert time.monotonic() < deadline, "an event never passed"


def cache(layout: KVLayout, blocks: int, block_size: int, device: str) -> list[torch.Tensor]:
    shape = (2, blocks, block_size, layout.arrays[0].heads, layout.arrays[0].head_dim)
    dtype = getattr(torch, layout.dtypes.kv)
    return [torch.randn(shape).to(dtype).to(device) for _ in range(layout.num_layers)]


def dense(tensor: torch.Tensor, table: list[int], start: int, stop: int) -> torch.Tensor:
    block_size = tensor.shape[2]
    rows = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(start, stop)])
    return tensor.cpu().flatten(1, 2)[:, rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "from_order", "to_order"),
    [("float32", *ORDERS[:2]), ("bfloat16", *ORDERS[1:]), ("float16", ORDERS[2], ORDERS[0])],
)
@pytest.mark.parametrize(("from_block", "to_block"), [(16, 16), (16, 128), (128, 64), (3, 16)])
@pytest.mark.parametrize("heads", [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 4)]])
def test_from_pool_to_pool(
    device: str, dtype: str, from_order: str, to_order: str, from_block: int, to_block: int, heads: Any
) -> None:
    """Bit for bit, whatever the block sizes, the order of dimensions in memory, and however the heads are
    divided; nothing else moves."""
    layout = kv_layout(2, 4, 8, dtype)
    arena = Arena.create(8, 8192)
    n, start = 250, 37
    source = [in_memory(from_order, x) for x in cache(layout, 100, from_block, device)]
    target = [in_memory(to_order, x) for x in cache(layout, 100, to_block, device)]
    before = [t.cpu().clone() for t in target]
    sender = open_pool(paged(source, from_block, layout, device), arena)
    # An arena is pinned by one pool: on CUDA the receiver has one of its own.
    other = Arena.create(8, 8192) if device == "cuda" else arena
    receiver = open_pool(paged(target, to_block, layout, device), other)
    there = random.sample(range(100), -(-n // from_block))
    here = random.sample(range(100), -(-n // to_block))
    tables = sender.table(there, n), receiver.table(here, n)
    pieces = [p for layer in range(2) for h in heads for p in cut(layout, layer, (start, n), h, 8192)]
    for i in range(0, len(pieces), 8):
        few = [Slice(p, slot=slot, table=tables[0]) for slot, p in enumerate(pieces[i : i + 8])]
        for some in filter(None, (few[:3], few[3:])):
            passed(sender, sender.gather(some)[0])
        if other is not arena:
            other.memory[:] = arena.memory
        batch = [Slice(p, slot=slot, table=tables[1]) for slot, p in enumerate(pieces[i : i + 8])]
        passed(receiver, receiver.scatter(batch)[0])
    for layer in range(2):
        assert torch.equal(dense(source[layer], there, start, n), dense(target[layer], here, start, n))
        rest = [b for b in range(100) if b not in here]
        assert torch.equal(target[layer].cpu()[:, rest], before[layer][:, rest])
        assert torch.equal(dense(target[layer], here, 0, start), dense(before[layer], here, 0, start))
    for pool in {sender, receiver}:
        pool.close()


def test_a_pool_of_another_shape_is_refused() -> None:
    layout, arena = kv_layout(1, 4, 8, "float32"), Arena.create(4, 4096)
    for bad in (
        torch.zeros(2, 4, 16, 3, 8),
        torch.zeros(2, 4, 8, 4, 8),
        torch.zeros(2, 4, 16, 4, 8).double(),
    ):
        with pytest.raises(AssertionError):
            open_pool(paged([bad], 16, layout, "cpu"), arena)


@given(
    used=st.dictionaries(st.integers(0, 40), st.integers(1, 1 << 20), min_size=1, max_size=20),
)
@settings(deadline=None)
def test_few_copies_cover_every_slot_and_no_other(used: dict[int, int]) -> None:
    slot_bytes = 1 << 20
    slots = sorted(used.items())
    copies, offsets = coalesce([(slot * slot_bytes, size) for slot, size in slots], slot_bytes)
    for (slot, size), offset in zip(slots, offsets, strict=True):
        (copy,) = [c for c in copies if c[0] <= slot * slot_bytes < c[0] + c[2]]
        assert offset - copy[1] == slot * slot_bytes - copy[0]
        assert slot * slot_bytes + size <= copy[0] + copy[2]
        assert offset % 16 == 0
    for at, _, size in copies:  # what is written in vain is in slots of this batch
        assert all(x // slot_bytes in used for x in range(at, at + size, slot_bytes))
    ends = sorted((there, there + size) for _, there, size in copies)
    assert ends[-1][1] <= len(slots) * (slot_bytes + SLACK)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends))


def test_full_neighbours_are_one_copy() -> None:
    assert coalesce([(2000, 1000), (3000, 990), (5000, 10)], 1000)[0] == [(2000, 0, 1990), (5000, 2000, 10)]


def test_slices_in_large_slots_are_copied_in_smaller_batches() -> None:
    """So the next step of a transfer need not wait until hundreds of megabytes are copied."""
    for slot_bytes, gathered, scattered in (
        (2 << 20, 8, 16), (16 << 20, 8, 16), (32 << 20, 4, 8), (256 << 20, 1, 1)
    ):  # fmt: skip
        assert at_once(16, GATHER_BYTES, slot_bytes) == gathered
        assert at_once(16, SCATTER_BYTES, slot_bytes) == scattered
        assert landing_bytes(slot_bytes) <= max(SCATTER_BYTES, slot_bytes) + scattered * SLACK
