"""Blocks to the memory or the disk of the host and back, on the CPU, by the kernels in the interpreter, and
on GPUs."""

import errno
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.kv_names.cache_kinds import ATTENTION, LATENT, STATE, CacheArray, CacheKind, Window
from baton.kv_transfer.arena import Arena, channel_pair
from baton.kv_transfer.endpoint import other_ranks
from baton.kv_transfer.endpoint.other_ranks import TIERS, Line, OtherRanks
from baton.kv_transfer.endpoint.rank_copier import RankCopier
from baton.kv_transfer.endpoint.ranked_store import RankedStore
from baton.kv_transfer.layout import FP8, KVLayout
from baton.kv_transfer.stores import CacheCells, CellStore, cuda_store, disk_store
from baton.kv_transfer.stores.cuda_store import CellLines, CudaStore
from baton.kv_transfer.stores.disk_store import DiskStore
from baton.kv_transfer.stores.host_store import CpuStore, open_host_store
from baton.kv_transfer.transport import PagedKV
from tests.layouts import kv_layout, paged
from tests.within import WITHIN

from . import cuda_on_cpu
from .ranks import ORDERS, in_memory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCKS, BLOCK = 12, 16


def of_kv(
    dtype: str, device: str, order: str = next(iter(ORDERS)), kind: CacheKind = ATTENTION
) -> CacheCells:
    """Bits of any kind: they are moved, not computed with. `order`: of the dimensions in memory."""
    heads, rows = (1, 1) if kind == LATENT else (2, 2)
    layout = kv_layout(3, heads, 8, dtype, kind=kind)
    element = getattr(torch, dtype)
    shape = (rows, BLOCKS, BLOCK, heads, 8 * element.itemsize)
    bits = [torch.randint(0, 255, shape, dtype=torch.uint8) for _ in range(3)]
    values = [in_memory(order, x.view(element)).to(device) for x in bits]
    scales = [torch.rand(2, BLOCKS, 2, BLOCK, device=device) for _ in range(3)] if dtype == FP8 else []
    return CacheCells(paged(values, BLOCK, layout, device, scales=scales))


def with_states(device: str) -> CacheCells:
    """The states of a model. Heads of one array are so large that kernels cut them."""
    arrays = (
        CacheArray(STATE, "conv", 3, 4, 8, "bfloat16"),
        CacheArray(STATE, "ssm", 1, 2, 16384, "float32"),
    )
    layout = kv_layout(3, 2, 8, "bfloat16", states=arrays, state_layers=(0, 2))
    kv = torch.zeros(2, BLOCKS, BLOCK, 2, 8, dtype=torch.bfloat16, device=device)
    states = [
        [
            torch.randn(BLOCKS, each.rows, each.heads, each.head_dim, device=device).to(
                getattr(torch, each.dtype)
            )
            for _ in (layout.layers[-1] if layout.has_states else ())
        ]
        for each in arrays
    ]
    return CacheCells(paged([kv], BLOCK, layout, device, others=states), of_states=True)


def content(cells: CacheCells, number: int) -> list[torch.Tensor]:
    """The bytes of a cell."""
    pools = [pool for plane in cells.planes for pool in plane.values()]
    kept = [pool[:, number].clone(memory_format=torch.contiguous_format) for pool in pools]
    return [x.view(torch.uint8).cpu() for x in kept]


def damage(store: CellStore, kv: CacheCells, place: int) -> None:
    """Changes a byte of a place."""
    if isinstance(store, DiskStore):
        at = place * kv.cell_bytes + 7
        [byte] = os.pread(store._file.fileno(), 1, at)
        os.pwrite(store._file.fileno(), bytes([byte ^ 1]), at)
    else:
        store.memory(place)[7] ^= 1  # type: ignore[attr-defined]


def ended(store: CellStore, count: int) -> list[bool]:
    whole, deadline = store.ended(), time.monotonic() + WITHIN
    while len(whole) < count:
        assert time.monotonic() < deadline
        whole += store.ended()
    return whole


def copy(store: CellStore, pairs: list[tuple[int, int]], *, is_load: bool) -> None:
    """As without windows."""
    store.copy(pairs, is_load=is_load, window_cells=[cell for cell, _ in pairs])


@pytest.fixture(params=["host", "disk"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[CacheCells, int], CellStore]:
    if request.param == "host":
        return lambda kv, places: open_host_store(kv, places)
    return lambda kv, places: DiskStore(kv, places, str(tmp_path))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "order"), [*zip(("float32", "bfloat16", FP8), ORDERS, strict=False)])
def test_blocks_come_back_bit_for_bit_and_into_any_block(
    open_store: Callable[[CacheCells, int], CellStore], device: str, dtype: str, order: str
) -> None:
    kv = of_kv(dtype, device, order)
    check_copies(kv, open_store(kv, 5))


def test_blocks_with_latents_come_back(open_store: Callable[[CacheCells, int], CellStore]) -> None:
    kv = of_kv("bfloat16", "cpu", kind=LATENT)
    check_copies(kv, open_store(kv, 5))


@pytest.mark.parametrize("device", DEVICES)
def test_states_come_back(open_store: Callable[[CacheCells, int], CellStore], device: str) -> None:
    check_copies(cells := with_states(device), open_store(cells, 5))


def check_copies(kv: CacheCells, store: CellStore) -> None:
    """Blocks go to a store and come back. The store has five places."""
    before = [content(kv, block) for block in range(BLOCKS)]
    saves = [(3, 4), (7, 0), (1, 2)]
    copy(store, saves, is_load=False)
    assert ended(store, 3) == [True] * 3
    loads = [(9, 0), (3, 2), (10, 4)]
    copy(store, loads, is_load=True)
    assert ended(store, 3) == [True] * 3
    saved = {place: before[block] for block, place in saves}
    expected = dict(enumerate(before)) | {block: saved[place] for block, place in loads}
    for block in range(BLOCKS):
        for ours, right in zip(content(kv, block), expected[block], strict=True):
            assert torch.equal(ours, right), block
    store.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_place_with_other_bytes_is_not_whole(device: str) -> None:
    kv = of_kv("bfloat16", device)
    check_damage(kv, open_host_store(kv, 4))


def check_damage(kv: CacheCells, store: CellStore) -> None:
    """A byte of a block in the store is changed."""
    copy(store, [(1, 0), (2, 1), (3, 2)], is_load=False)
    assert ended(store, 3) == [True] * 3
    damage(store, kv, place=1)
    copy(store, [(4, 0), (5, 1), (6, 2)], is_load=True)
    assert ended(store, 3) == [True, False, True]
    store.close()


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_disk_lost_is_not_whole(device: str, tmp_path: Path) -> None:
    """One byte of the first block was changed, and the end of the last block is missing."""
    kv = of_kv("bfloat16", device)
    store = DiskStore(kv, 8, str(tmp_path))
    copy(store, [(1, 0), (2, 1), (3, 2)], is_load=False)
    assert ended(store, 3) == [True] * 3
    damage(store, kv, place=0)
    os.ftruncate(store._file.fileno(), 3 * kv.cell_bytes - 1)
    right = content(kv, 2)
    copy(store, [(4, 0), (5, 1), (6, 2)], is_load=True)
    assert ended(store, 3) == [False, True, False]
    assert all(map(torch.equal, content(kv, 5), right))
    copy(store, [(3, 2)], is_load=False)
    assert ended(store, 1) == [True], "a torn place is written anew"
    copy(store, [(6, 2)], is_load=True)
    assert ended(store, 1) == [True]
    store.close()


def test_a_disk_that_fills_keeps_what_it_has_and_takes_blocks_again(tmp_path: Path) -> None:
    """The limit of the size of a file stands for the size of the disk."""
    kv = of_kv("bfloat16", "cpu")
    store = DiskStore(kv, 6, str(tmp_path))
    size = store._size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + size // 2, limits[1]))
    try:
        copy(store, [(1, 0), (2, 2), (3, 1), (4, 3)], is_load=False)
        assert ended(store, 4) == [True, False, True, False], "one does not fit, one has no room at all"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    expected = [content(kv, block) for block in (1, 3)]
    copy(store, [(2, 2), (4, 3)], is_load=False)
    assert ended(store, 2) == [True, True]
    expected += [content(kv, block) for block in (2, 4)]
    copy(store, [(8, 0), (9, 1), (10, 2), (7, 3)], is_load=True)
    assert ended(store, 4) == [True] * 4
    for block, rights in zip((8, 9, 10, 7), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(content(kv, block), rights, strict=True))
    store.close()


def test_a_full_disk_ends_the_save(tmp_path: Path) -> None:
    kv = of_kv("bfloat16", "cpu")
    store = DiskStore(kv, 8, str(tmp_path))
    assert not list(tmp_path.iterdir()), "the file has no name, so no other process opens it"
    opened = {int(link.name): os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()}
    [fd] = [fd for fd, path in opened.items() if path.startswith(str(tmp_path))]
    assert os.fstat(fd).st_mode & 0o077 == 0
    with open("/dev/full", "r+b", buffering=0) as full:
        os.dup2(full.fileno(), fd)
    copy(store, [(1, 0), (2, 1)], is_load=False)
    assert ended(store, 2) == [False, False]
    copy(store, [(5, 0)], is_load=True)
    assert ended(store, 1) == [False], "the device has other bytes there"
    assert store.room
    store.close()


def test_a_disk_with_too_little_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="are free"):
        DiskStore(of_kv("bfloat16", "cpu"), 1 << 40, str(tmp_path))


def test_more_blocks_than_slots_go_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads and saves at the same time, through two slots, with reads that end in any order."""
    kv = of_kv("bfloat16", "cpu")
    monkeypatch.setattr(disk_store, "STAGING_BYTES", 2 * kv.cell_bytes)
    store = DiskStore(kv, 8, str(tmp_path))
    right = [content(kv, block) for block in range(BLOCKS)]
    for place in range(6):
        assert store.room
        copy(store, [(place, place)], is_load=False)
        assert ended(store, 1) == [True]
    copy(store, [(6, 0)], is_load=True)
    copy(store, [(11, 7)], is_load=False)
    assert not store.room
    assert ended(store, 2) == [True, True]
    copy(store, [(7, 7), (8, 5)], is_load=True)
    assert ended(store, 2) == [True, True]
    for block, before in ((6, 0), (7, 11), (8, 5)):
        assert all(map(torch.equal, content(kv, block), right[before]))
    store.close()


@pytest.mark.parametrize("kind", ["host", "disk", "device"])
def test_layers_with_windows_have_cells_of_their_own(
    kind: str, kernel_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Gemma 3, more layers have a window than have none."""
    kept = CacheArray(ATTENTION, "kv", 2, 2, 8, "bfloat16")
    windowed = replace(kept, window=Window(20))
    layout = KVLayout.of([[windowed], [kept], [windowed]])
    planes = [
        [[torch.randn(2, n, BLOCK, 2, 8).bfloat16() for _ in range(layers)]]
        for layers, n in ((2, 4), (1, BLOCKS))
    ]
    cells = CacheCells(PagedKV(planes, BLOCK, layout, "cpu"))
    if kind == "device":
        if kernel_device != "cpu":
            pytest.skip("the same is tested without a GPU")
        cuda_on_cpu.use(monkeypatch)
        store: CellStore = CudaStore(cells, 3)
    else:
        store = CpuStore(cells, 3) if kind == "host" else DiskStore(cells, 3, str(tmp_path))
    windows, (full,) = (of_array[0] for of_array in planes)
    before = full[:, 7].clone(), [window[:, 2].clone() for window in windows], full[:, 9].clone()
    store.copy([(7, 1), (9, 2)], is_load=False, window_cells=[2, 0])
    assert ended(store, 2) == [True] * 2
    store.copy([(3, 1), (4, 2)], is_load=True, window_cells=[3, 0])
    assert ended(store, 2) == [True] * 2
    assert torch.equal(full[:, 3], before[0])
    assert all(torch.equal(window[:, 3], x) for window, x in zip(windows, before[1], strict=True))
    assert torch.equal(full[:, 4], before[2])
    store.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("dtype", "order"), [*zip(("float32", "bfloat16", FP8), ORDERS, strict=False)])
def test_the_store_of_a_gpu_without_one(
    kernel_device: str, dtype: str, order: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_device != "cpu":
        pytest.skip("the same is tested on the GPU")
    cuda_on_cpu.use(monkeypatch)
    cuda_on_cpu.be_late(range(9) if late else ())
    kv = of_kv(dtype, "cpu", order)
    assert CellLines(kv).cell_bytes == kv.kv.layout.bytes_per_token * BLOCK
    for cells in (kv, with_states("cpu")):
        check_copies(cells, CudaStore(cells, 5))
        check_damage(cells, CudaStore(cells, 4))


@pytest.mark.parametrize("parts", [5, 2, 0])
def test_memory_is_pinned_when_it_is_needed(
    parts: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or as much of it as the driver pins: a place for each of so many parts."""
    if kernel_device != "cpu":
        pytest.skip("pins are counted on the CPU")
    cuda_on_cpu.use(monkeypatch)
    pinned: list[torch.Tensor] = []

    def pin(part: torch.Tensor) -> None:
        if len(pinned) == parts:
            raise RuntimeError("out of memory")
        pinned.append(part)

    monkeypatch.setattr(cuda_store, "pin", pin)
    monkeypatch.setattr(cuda_store, "unpin", lambda part: pinned.pop())
    for name in ("PINNED_BYTES", "AHEAD_BYTES"):
        monkeypatch.setattr(cuda_store, name, 1)
    kv = of_kv("float32", "cpu")
    store = CudaStore(kv, 5)
    assert store.ready == len(pinned) == min(1, parts), "the kernels were compiled with a place"
    for used, expected in ((0, 1), (1, 2), (2, 3), (9, 5)):
        store.expect(used)
        deadline = time.monotonic() + WITHIN
        while store.ready < min(expected, parts, store.num_places):
            assert time.monotonic() < deadline
        assert store.ready == len(pinned) <= expected
    if store._pinning.ident is not None:
        deadline = time.monotonic() + WITHIN
        while store.num_places != parts:
            assert time.monotonic() < deadline
    assert (store.ready, store.num_places) == (parts, parts)
    assert len(caplog.messages) == (parts < 5), caplog.messages
    if parts == 5:
        check_copies(kv, store)
    else:
        store.close()
    assert not pinned


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory(mmap.mmap):
        def madvise(self, option: int, *span: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, "Invalid argument")
            super().madvise(option, *span)

    monkeypatch.setattr(mmap, "mmap", Memory)
    with cuda_store._huge_pages(2 * mmap.PAGESIZE) as memory:
        memory[-1] = 7
        assert memory[-1] == 7


def test_a_rank_pins_what_the_first_rank_orders(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel_device != "cpu":
        pytest.skip("the same is tested on the GPU")
    cuda_on_cpu.use(monkeypatch)
    monkeypatch.setattr(cuda_store, "PINNED_BYTES", 1)
    kv = of_kv("float32", "cpu")
    store, rank0 = CudaStore(kv, 5), CpuStore(of_kv("float32", "cpu"), 5)
    assert store.ready == 1
    ranks = other_ranks_of({0: store})
    check_copies(kv, RankedStore(rank0, Line(ranks, TIERS)))
    assert store.ready == 5
    ranks.close()
    for thread in threading.enumerate():
        if thread.name == "rank copies":
            thread.join(WITHIN)  # before there is no stand-in for a GPU any more


def other_ranks_of(*tiers: dict[int, CellStore]) -> OtherRanks:
    """The tiers of each other rank, in a thread."""
    pairs, unused = [channel_pair() for _ in tiers], Arena.create(1, 4096)
    for stores, (_, theirs) in zip(tiers, pairs, strict=True):
        RankCopier(of_kv("float32", "cpu").kv, theirs, unused, unused, tiers=stores)
    return OtherRanks([ours for ours, _ in pairs])


def test_a_block_is_whole_if_it_is_whole_on_all_ranks(
    open_store: Callable[[CacheCells, int], CellStore],
) -> None:
    kvs = [of_kv("float32", "cpu") for _ in range(3)]
    stores = [open_store(kv, 4) for kv in kvs]
    ranks = other_ranks_of(*({3: CpuStore(of_kv("float32", "cpu"), 1), 7: store} for store in stores[1:]))
    ranked = RankedStore(stores[0], Line(ranks, TIERS + 7))
    before = [[content(kv, block) for block in (3, 5)] for kv in kvs]
    copy(ranked, [(3, 0), (5, 2)], is_load=False)
    assert ended(ranked, 2) == [True, True]
    damage(stores[2], kvs[2], place=2)
    copy(ranked, [(8, 0), (9, 2)], is_load=True)
    assert ended(ranked, 2) == [True, False]
    for kv, right in zip(kvs, before, strict=True):
        assert all(map(torch.equal, content(kv, 8), right[0]))
    ranks.close()
    ranked.close()


class Stalled(CpuStore):
    """Its copies do not end."""

    def ended(self) -> list[bool]:
        return []


def test_another_rank_hangs_if_its_copies_are_due_and_not_if_those_here_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(other_ranks, "time", SimpleNamespace(monotonic=lambda: now))
    for own, other in ((Stalled, CpuStore), (CpuStore, Stalled)):
        now, ranks = 0.0, other_ranks_of({1: other(of_kv("float32", "cpu"), 2)})
        line = Line(ranks, TIERS + 1)
        ranked = RankedStore(own(of_kv("float32", "cpu"), 2), line)
        copy(ranked, [(3, 0)], is_load=False)
        while other is CpuStore and not line.over([1]):
            ranked.ended()
        now = 11.0
        with pytest.raises(RuntimeError, match=r"rank 1 .* 10 s") if other is Stalled else nullcontext():
            assert ranked.ended() == []
        ranks.close()
        ranked.close()


@pytest.mark.parametrize("store", [CpuStore, CudaStore])
def test_more_memory_than_a_host_can_have(store: Callable[[CacheCells, int], CellStore]) -> None:
    """The worker then has no host tier."""
    with pytest.raises(MemoryError):
        store(of_kv("float32", "cpu"), 1 << 40)
