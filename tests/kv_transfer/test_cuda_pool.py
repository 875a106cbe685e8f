"""`CudaPool` without a GPU, against `HostPool`: the same slices leave the same numbers in the pool."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baton.kv_names.cache_kinds import ATTENTION, HEAD_STATE, STATE, CacheArray, CacheKind, Unit, Window
from baton.kv_transfer import staging
from baton.kv_transfer.arena import Arena
from baton.kv_transfer.cuda_memory import ExportedMemory, PeerDeviceMemory, Slots
from baton.kv_transfer.device import copy_kernels, cuda_pool
from baton.kv_transfer.device.copy_kernels import Pages
from baton.kv_transfer.device.cuda_pool import CudaPool
from baton.kv_transfer.device.host_pool import HostPool, prepare
from baton.kv_transfer.device.pool import Pool, Remainder, tensor_planes
from baton.kv_transfer.endpoint.orders import Ready
from baton.kv_transfer.endpoint.outgoing import OutgoingPrefill, OutgoingTransfer, Slicing
from baton.kv_transfer.layout import FP8, Dtypes, KVLayout, Piece, cut, slice_bytes
from baton.kv_transfer.protocol.credits import SenderSlots
from baton.kv_transfer.slices import EXPORTED, Slice
from baton.kv_transfer.transport import PagedKV
from tests.layouts import kv_layout, paged

from . import cuda_on_cpu
from .ranks import ORDERS, in_memory, positions

BLOCKS, TOKENS, SLOTS, SLOT_BYTES = 6, 41, 16, 4096
CONV, SSM = (
    CacheArray(STATE, "conv", 1, 4, 6, "bfloat16"),
    CacheArray(HEAD_STATE, "ssm", 2, 4, 160, "float32"),
)
THERE, HERE = [5, 0, 3, 1], [2, 4, 0, 5]
PLAIN = Dtypes("bfloat16", "float32")
DTYPES = [
    (PLAIN, PLAIN),
    (Dtypes(FP8, "float16"), Dtypes(FP8, "float16")),
    (PLAIN, Dtypes(FP8, "bfloat16")),
    (Dtypes(FP8, "bfloat16"), Dtypes("float32", "float32")),
    (PLAIN, Dtypes("bfloat16", "float16")),
]


@pytest.fixture(autouse=True)
def emulated(kernel_device: str, exact_casts: None) -> Iterator[None]:
    if kernel_device != "cpu":
        pytest.skip("the same is tested on the GPU")
    with pytest.MonkeyPatch.context() as patch:
        cuda_on_cpu.use(patch)
        patch.setattr(staging, "EXPORTED_SLOT_BYTES", 2 * SLOT_BYTES)
        patch.setattr(copy_kernels, "PROGRAMS", 3)  # each moves several tiles
        yield


def cache(dtypes: Dtypes, block_size: int, seed: int, order: str | None = None) -> PagedKV:
    """A KV cache with random bytes: two layers of KV, one of states. `order`: of the KV in memory."""
    dtype, all_states = dtypes.kv, (CONV, replace(SSM, dtype=dtypes.states))
    layout = kv_layout(3, 4, 8, dtype, all_states, (1,))
    torch.manual_seed(seed)
    layers = [torch.randn(2, BLOCKS, block_size, 4, 8).to(getattr(torch, dtype)) for _ in range(2)]
    scales = [torch.rand(2, BLOCKS, 4, block_size) for _ in layers] if dtype == FP8 else []
    states = [
        [torch.randn(3, state.rows, state.heads, state.head_dim).to(getattr(torch, state.dtype))]
        for state in all_states
    ]
    if order is not None:
        layers = [in_memory(order, x) for x in layers]
    return paged(layers, block_size, layout, "cpu", scales=scales, others=states)


def rank_of_two(kv: PagedKV, rank: int) -> PagedKV:
    """The same cache with the heads of a rank."""
    heads = slice(2 * rank, 2 * rank + 2)
    planes = []
    for array, of_array in zip(kv.layout.arrays, tensor_planes(kv), strict=True):
        dim = 3 if array.per_token else 2
        kept = [[x.movedim(dim, 0)[heads].movedim(0, dim).clone() for x in p.values()] for p in of_array]
        planes.append(kept)
    return replace(kv, planes=planes, rank=rank, ranks=2)


def everything(kv: PagedKV) -> list[torch.Tensor]:
    return [layer.float() for of_array in tensor_planes(kv) for x in of_array for layer in x.values()]


def layers_of(kv: PagedKV) -> list[torch.Tensor]:
    """The values of the first array."""
    return list(tensor_planes(kv)[0][0].values())


def pieces(layout: KVLayout, most: int) -> list[Piece]:
    found = [p for i in (0, 2) for h in ((0, 3), (3, 4)) for p in cut(layout, i, (7, TOKENS), h, most)]
    found += cut(layout, 1, (0, TOKENS), (0, 4), 300, 1)
    return found + [p for h in ((0, 3), (3, 4)) for p in cut(layout, 1, (0, TOKENS), h, SLOT_BYTES, 2)]


def travelling(piece: Piece, layout: KVLayout, **place: Any) -> Slice:
    """A slice in the dtypes of this layout."""
    return Slice(piece, dtype=layout.arrays[piece.array].dtype, **place)


def over(pool: Pool, event: Any) -> bool:
    """Waits until the event has passed."""
    return any(pool.passed(event) for _ in range(cuda_on_cpu.LOOKS))


def moved(
    make: Callable[[PagedKV, Arena], Pool], sent: Dtypes, kept: Dtypes, order: str | None = None
) -> PagedKV:
    """The receiver's cache after a transfer through an arena."""
    source, target, arena = (
        cache(sent, 16, 1, order),
        cache(kept, 32, 2, order),
        Arena.create(SLOTS, SLOT_BYTES),
    )
    sender, receiver = make(source, arena), make(target, arena)
    tables = sender.table(THERE, TOKENS, 2), receiver.table(HERE, TOKENS, 1)
    layout = source.layout.sent_as(sent.sent_to(kept))
    for few in batches(source.layout, 2048):
        of_each = [[travelling(x, layout, slot=slot, table=table) for slot, x in few] for table in tables]
        event, sums = sender.gather(of_each[0])
        assert over(sender, event)
        for item, checksum in zip(of_each[1], sums(), strict=True):
            item.sum, item.verified = checksum, not checksum
        event, outcome = receiver.scatter(of_each[1])
        assert over(receiver, event)
        assert not any(outcome())
    return target


def pulled(
    sent: Dtypes, kept: Dtypes, damage: Callable[[Slots], None], *, adopts: bool = False
) -> tuple[PagedKV, list[bool]]:
    """The same through exported memory, and which slices were right. `damage` comes after a first gather.
    `adopts`: the memory is that of another process."""
    source, target = cache(sent, 16, 1), cache(kept, 32, 2)
    sender = CudaPool(source, Arena.create(SLOTS, SLOT_BYTES))
    receiver = CudaPool(target, Arena.create(SLOTS, SLOT_BYTES))
    if adopts:
        export = ExportedMemory(SLOTS, staging.EXPORTED_SLOT_BYTES, os.urandom(16)).export
        sender.adopt(export)
    else:
        export = sender.export()
    layout = source.layout.sent_as(sent.sent_to(kept))
    memory = receiver.open(export, layout.dtypes)
    tables, whole = (sender.table(THERE, TOKENS, 2), receiver.table(HERE, TOKENS, 1)), []
    for generation, few in enumerate(batches(source.layout, SLOT_BYTES + 512), 1):
        batch = [
            travelling(piece, layout, slot=slot, table=tables[0], memory=EXPORTED, sum=generation)
            for slot, piece in few
        ]
        assert over(sender, sender.gather(batch)[0])
        if generation == 1:
            damage(PeerDeviceMemory(export))
        event, outcome = receiver.scatter(
            [travelling(piece, layout, there=slot, table=tables[1], sum=generation) for slot, piece in few],
            memory,
        )
        assert over(receiver, event)
        whole += [remainder == 0 for remainder in outcome()]
    return target, whole


def batches(layout: KVLayout, most: int) -> list[list[tuple[int, Piece]]]:
    """Slices of at most so many bytes with their slots, of which some are neighbours."""
    cuts = pieces(layout, most)
    return [list(zip((7, 3, 4, 5, 9, 11, 12), cuts[i : i + 7], strict=False)) for i in range(0, len(cuts), 7)]


def nothing(_: Slots) -> None:
    pass


@pytest.mark.cases(1)
@pytest.mark.parametrize(("sent", "kept"), DTYPES)
def test_the_pool_gets_the_numbers_that_it_gets_on_a_host(sent: Dtypes, kept: Dtypes) -> None:
    right = everything(moved(HostPool, sent, kept))
    through_exported, whole = pulled(sent, kept, nothing)
    assert all(whole)
    found = [moved(CudaPool, sent, kept, order) for order in ORDERS]
    found += [moved(HostPool, sent, kept, order) for order in ORDERS]
    for ours in (*found, through_exported):
        for tensor, expected in zip(everything(ours), right, strict=True):
            assert torch.equal(tensor, expected)


def test_a_token_is_looked_at_after_its_copy() -> None:
    """The look waits for the current stream only."""
    cuda_on_cpu.be_late(range(9))
    pool = CudaPool(cache(PLAIN, 16, 1), Arena.create(SLOTS, SLOT_BYTES))
    export = ExportedMemory(SLOTS, staging.EXPORTED_SLOT_BYTES, os.urandom(16)).export
    pool.adopt(export)
    pool.open(export, PLAIN)


@pytest.mark.cases(1)
@pytest.mark.parametrize("late", [*range(7)])
@pytest.mark.parametrize(("sent", "kept"), DTYPES[::2])
def test_any_stream_may_be_late(sent: Dtypes, kept: Dtypes, late: int) -> None:
    """Streams of the sender's pool (1 to 3), of the receiver's (4 to 6), or that of the steps. The host waits
    for nothing until all is launched."""
    source, target = cache(sent, 16, 1), cache(kept, 32, 2)
    pools = [CudaPool(kv, Arena.create(SLOTS, SLOT_BYTES)) for kv in (source, target)]
    sender, receiver = pools
    tables = sender.table(THERE, TOKENS, 2), receiver.table(HERE, TOKENS, 1)
    layout = source.layout.sent_as(sent.sent_to(kept))
    memory = receiver.open(sender.export(), layout.dtypes)
    cuda_on_cpu.be_late([late])
    few = list(enumerate(pieces(source.layout, SLOT_BYTES)[: staging.LANDINGS + 3]))
    kv = layers_of(source)[0]
    computed = torch.randn(kv.shape).to(kv.dtype)
    cuda_on_cpu.launch(lambda: kv.copy_(computed))
    after = [sender.record()]
    written = [
        sender.gather([travelling(piece, layout, slot=slot, table=tables[0], memory=EXPORTED, sum=1)], after)
        for slot, piece in few
    ]
    assert all(over(sender, event) for event, _ in written)
    pulls = [
        receiver.scatter([travelling(piece, layout, there=slot, table=tables[1], sum=1)], memory)
        for slot, piece in few
    ]
    assert all(over(receiver, event) for event, _ in pulls)
    assert [remainder for _, outcome in pulls for remainder in outcome()] == [0] * len(pulls)
    torch.cuda.synchronize()
    expected, host = cache(kept, 32, 2), Arena.create(SLOTS, SLOT_BYTES)
    ours, theirs = HostPool(source, host), HostPool(expected, host)
    there, here = ours.table(THERE, TOKENS, 2), theirs.table(HERE, TOKENS, 1)
    for slot, piece in few:
        ours.gather([travelling(piece, layout, slot=slot, table=there)])
        theirs.scatter([travelling(piece, layout, slot=slot, table=here)])
    assert all(map(torch.equal, everything(target), everything(expected)))


@pytest.mark.parametrize("late", [1, 2])
def test_a_copy_through_the_arena_may_be_late(late: int) -> None:
    """Of a pool that both gathers and scatters, whose slots are used again."""
    cuda_on_cpu.be_late([late])
    right = everything(moved(HostPool, PLAIN, PLAIN))
    found = everything(moved(CudaPool, PLAIN, PLAIN))
    assert all(map(torch.equal, found, right))


def test_an_arena_that_cannot_be_pinned_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(
        ValueError, match=r"--advanced.kv-slots.* 16 slots of 4096 bytes: cannot pin 65536 bytes"
    ):
        CudaPool(cache(PLAIN, 16, 1), Arena.create(SLOTS, SLOT_BYTES))


def test_a_standby_has_pinned_its_arena_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(cuda_pool, "pin", lambda memory: pinned.append(memory.numel()))
    arena = Arena.create(SLOTS, SLOT_BYTES)
    prepare(arena, "cpu")
    assert pinned == []
    prepare(arena, "cuda")
    assert pinned == [SLOTS * SLOT_BYTES]
    CudaPool(cache(PLAIN, 16, 1), arena)
    assert len(pinned) == 1


def test_a_slice_that_is_wrong_or_late_is_found() -> None:
    def bend(memory: Slots) -> None:
        ctypes.memset(memory.slot(3) + 7, 0xA5, 1)

    def use_again(memory: Slots) -> None:
        ctypes.memset(memory.mark(9), 9, 1)

    for damage, wrong in ((bend, 1), (use_again, 4)):
        _, whole = pulled(PLAIN, PLAIN, damage, adopts=damage is bend)
        assert [i for i, right in enumerate(whole) if not right] == [wrong]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("sent", "kept"), DTYPES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slice_that_changed_in_the_arena_is_found(sent: Dtypes, kept: Dtypes, ranks: int) -> None:
    """One bit of it, or two words that changed places. The sums of its ranks add up to that of the sender."""
    source, target = cache(sent, 16, 1), cache(kept, 32, 2)
    layout, arena = source.layout.sent_as(sent.sent_to(kept)), Arena.create(SLOTS, SLOT_BYTES)
    sender, whole = CudaPool(source, arena), [target]
    if ranks == 2:
        whole = [rank_of_two(target, rank) for rank in (0, 1)]
    receivers = [CudaPool(each, arena) for each in whole]

    def is_right(piece: Piece, checksum: int) -> bool:
        left = 0
        for receiver in receivers:
            held = receiver._kernels.window(piece)
            if min(held.count, held.heads) > 0:
                table = receiver.table(HERE, TOKENS, 1)
                item = travelling(piece, layout, slot=3, table=table, sum=checksum, verified=False)
                event, outcome = receiver.scatter([item])
                assert over(receiver, event)
                left += outcome()[0] or 0
        return left % (1 << 64) == 0

    for piece in pieces(source.layout, 2048)[::5]:
        event, sums = sender.gather([travelling(piece, layout, slot=3, table=sender.table(THERE, TOKENS, 2))])
        assert over(sender, event)
        [checksum] = sums()
        words = np.frombuffer(arena.slot(3), dtype=np.uint32)[: slice_bytes(layout, piece) // 4]
        assert is_right(piece, checksum)
        words[-1] ^= 1 << 9
        assert not is_right(piece, checksum)
        words[-1] ^= 1 << 9
        other = next(i for i in range(len(words)) if words[i] != words[-1])
        words[[other, -1]] = words[[-1, other]]
        assert not is_right(piece, checksum)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("sent", "kept"), DTYPES)
def test_ranks_read_each_byte_once_and_their_sums_add_up(
    sent: Dtypes, kept: Dtypes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of two ranks, from a worker of one. What is converted is read by both."""
    launch, read = copy_kernels.launch, 0

    def counted(table: torch.Tensor, pages: Pages, *args: Any, into_pool: bool, **kwargs: Any) -> None:
        def count() -> None:
            nonlocal read
            read += 4 * pages.rows * int((table[:, 4] * table[:, 6]).sum()) if into_pool else 0

        cuda_on_cpu.launch(count)
        launch(table, pages, *args, into_pool=into_pool, **kwargs)

    source, whole_target = cache(sent, 16, 1), cache(kept, 32, 2)
    sender = CudaPool(source, Arena.create(SLOTS, SLOT_BYTES))
    targets = [rank_of_two(whole_target, rank) for rank in (0, 1)]
    ranks = [CudaPool(target, Arena.create(SLOTS, SLOT_BYTES)) for target in targets]
    export, layout = sender.export(), source.layout.sent_as(sent.sent_to(kept))
    memories = [rank.open(export, layout.dtypes) for rank in ranks]
    there, here = sender.table(THERE, TOKENS, 2), [rank.table(HERE, TOKENS, 1) for rank in ranks]
    monkeypatch.setattr(copy_kernels, "launch", counted)
    in_all = 0
    for generation, few in enumerate(batches(source.layout, SLOT_BYTES + 512), 1):
        sender.gather(
            [
                travelling(piece, layout, slot=slot, table=there, memory=EXPORTED, sum=generation)
                for slot, piece in few
            ]
        )
        in_all += sum(slice_bytes(layout, piece) for _, piece in few)
        remainders = dict.fromkeys(few, 0)
        for rank, memory, table in zip(ranks, memories, here, strict=True):
            windows = [rank._kernels.window(piece) for _, piece in few]
            mine = [item for item, held in zip(few, windows, strict=True) if min(held.count, held.heads) > 0]
            staged = [
                travelling(piece, layout, there=slot, table=table, sum=generation) for slot, piece in mine
            ]
            for item, remainder in zip(mine, rank.scatter(staged, memory)[1](), strict=True):
                assert remainder is not None
                remainders[item] += remainder
        assert not any(remainder % (1 << 64) for remainder in remainders.values())
    if kept == layout.dtypes:
        assert read == in_all
    right = moved(HostPool, sent, kept)
    for rank, target in enumerate(targets):
        for tensor, expected in zip(everything(target), everything(rank_of_two(right, rank)), strict=True):
            assert torch.equal(tensor, expected)


def test_a_wrong_byte_is_in_the_rest_of_the_rank_that_reads_it() -> None:
    source = cache(PLAIN, 16, 1)
    sender = CudaPool(source, Arena.create(SLOTS, SLOT_BYTES))
    ranks = [CudaPool(rank_of_two(source, rank), Arena.create(SLOTS, SLOT_BYTES)) for rank in (0, 1)]
    export, piece = sender.export(), Piece(0, 0, 4, 0, 5)
    sender.gather([Slice(piece, slot=3, table=sender.table(THERE, TOKENS, 2), memory=EXPORTED, sum=1)])

    def remainders() -> list[Remainder]:
        return [
            remainder
            for rank in ranks
            for remainder in rank.scatter(
                [Slice(piece, there=3, table=rank.table(HERE, TOKENS, 1), sum=1)],
                rank.open(export, PLAIN),
            )[1]()
        ]

    first, second = remainders()
    assert first
    assert (first + (second or 0)) % (1 << 64) == 0
    ctypes.memset(PeerDeviceMemory(export).slot(3) + 2 * 16, 0xA5, 1)  # of head 2
    assert remainders()[0] == first
    assert remainders()[1] != second


@pytest.mark.parametrize("make", [HostPool, CudaPool], ids=["host", "gpu"])
def test_an_entry_of_the_registry_makes_a_kind(
    make: Callable[[PagedKV, Arena], Pool],
) -> None:
    """One vector of each token, which has no heads to share: each of two ranks gets all of it."""
    layout = kv_layout(2, 1, 24, "bfloat16", kind=CacheKind("vector", Unit.TOKEN, copied=True))
    found = layout.fingerprint, layout.bytes_per_token
    assert found == ("kv12 layers=2 vector.kv=1x1x24:bfloat16", 2 * 24 * 2)

    def of_rank(rank: int, ranks: int, block_size: int) -> PagedKV:
        layers = [torch.randn(1, BLOCKS, block_size, 1, 24).bfloat16() for _ in range(2)]
        return paged(layers, block_size, layout, "cpu", rank, ranks)

    arena = Arena.create(SLOTS, SLOT_BYTES)
    source, targets = of_rank(0, 1, 16), [of_rank(rank, 2, 32) for rank in (0, 1)]
    slices = Slicing(layout, ranks=1)
    account = SenderSlots(SLOTS).account(1)
    ranges = ((7, TOKENS),)
    reads = slices.reads(ranges, ())
    transfer = OutgoingTransfer(b"", OutgoingPrefill(b""), account, layout, 1024, False, ranges, reads)
    for layer in (0, 1):
        slices.add(transfer, Ready(b"", layer, 0, TOKENS, None))
    assert transfer.bytes == (TOKENS - 7) * layout.bytes_per_token
    sent = [s.piece for s, _ in transfer.pending]
    sender = make(source, arena)
    sender.gather([Slice(x, slot=i, table=sender.table(THERE, TOKENS)) for i, x in enumerate(sent)])
    for target in targets:
        receiver = make(target, arena)
        before = [x.clone() for x in layers_of(target)]
        receiver.scatter([Slice(x, slot=i, table=receiver.table(HERE, TOKENS)) for i, x in enumerate(sent)])
        for layer in (0, 1):
            there, here = positions(THERE, 16, 7, TOKENS), positions(HERE, 32, 7, TOKENS)
            expected = before[layer].flatten(1, 2)
            expected[:, here] = layers_of(source)[layer].flatten(1, 2)[:, there]
            assert torch.equal(layers_of(target)[layer].flatten(1, 2), expected)


def of_windows(block_size: int, window_blocks: list[int]) -> PagedKV:
    """A layer with a window, of two window blocks and one that stands for none, and a layer without."""
    kept = CacheArray(ATTENTION, "kv", 2, 4, 8, "bfloat16")
    windowed = replace(kept, window=Window(20, tile=1))
    sizes = {kept: BLOCKS, windowed: 3}
    layout = KVLayout.of([[kept], [windowed]])
    planes = [[[torch.randn(2, sizes[x], block_size, 4, 8).bfloat16()]] for x in layout.arrays]
    return PagedKV(planes, block_size, layout, "cpu", window_blocks=np.array(window_blocks, dtype=np.int32))


@pytest.mark.parametrize("make", [HostPool, CudaPool], ids=["host", "device"])
def test_layers_with_windows_have_blocks_of_their_own(make: Callable[[PagedKV, Arena], Pool]) -> None:
    """The engine gives them some while the request is computed, and others to the last positions."""
    source, target = of_windows(16, [0] * BLOCKS), of_windows(32, [0, 0, 0, 0, 2, 0])
    arena = Arena.create(SLOTS, SLOT_BYTES)
    sender, receiver = make(source, arena), make(target, arena)
    tables = sender.table(THERE, TOKENS), receiver.table(HERE, TOKENS)
    assert source.window_blocks is not None
    for block, window_block, chunk in ((3, 1, (32, 40)), (1, 2, (48, 56))):
        source.window_blocks[block] = window_block
        for layer in (0, 1):
            piece = Piece(layer, 0, 4, chunk[0], chunk[1] - chunk[0], layer)
            sender.gather([Slice(piece, table=tables[0])])
            receiver.scatter([Slice(piece, table=tables[1])])
    (there, in_window), (here, kept) = (
        [tensor_planes(kv)[layer][0][layer].flatten(1, 2) for layer in (0, 1)] for kv in (source, target)
    )
    for at, block in ((0, 3), (16, 1)):
        assert torch.equal(here[:, 32 * 4 + at :][:, :8], there[:, 16 * block :][:, :8])
    for at, block in ((0, 1), (16, 2)):
        assert torch.equal(kept[:, 32 * 2 + at :][:, :8], in_window[:, 16 * block :][:, :8])


def test_a_long_prompt_has_one_table_of_window_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets them chunk by chunk."""
    kept, on_device = list[bool](), CudaPool._on_device

    def noted(pool: CudaPool, numbers: Sequence[int], into: torch.Tensor | None) -> torch.Tensor:
        kept.append(into is not None)
        return on_device(pool, numbers, into)

    source = of_windows(16, [0] * BLOCKS)
    pool = CudaPool(source, Arena.create(SLOTS, SLOT_BYTES))
    monkeypatch.setattr(CudaPool, "_on_device", noted)
    table = pool.table(THERE, TOKENS)
    assert source.window_blocks is not None
    for index, block in enumerate(THERE):
        source.window_blocks[block] = 1 + index % 2
        pool.gather([Slice(Piece(1, 0, 4, 16 * index, 8, 1), table=table)])
    assert kept == [False, False, *[True] * (len(THERE) - 1)]


@pytest.mark.parametrize(
    ("frees_windows", "kept_at", "next_positions", "serves"),
    [
        (True, (), (TOKENS,), True),
        (True, (), (), False),
        (False, (), (), True),
        (False, (TOKENS // 2, TOKENS), (TOKENS,), True),
        (False, (TOKENS // 2, TOKENS), (TOKENS // 2,), True),
        (False, (TOKENS // 2,), (TOKENS,), False),
        (False, (TOKENS // 2,), (), False),
    ],
)
def test_what_was_freed_is_not_sent(
    frees_windows: bool, kept_at: tuple[int, ...], next_positions: tuple[int, ...], serves: bool
) -> None:
    layout, ranges = of_windows(16, [0] * BLOCKS).layout, ((0, TOKENS),)
    slicing = Slicing(layout, 1, frees_windows=frees_windows)
    prefill = OutgoingPrefill(b"", num_tokens=TOKENS, next_positions=kept_at)
    account, reads = SenderSlots(SLOTS).account(1), slicing.reads(ranges, next_positions)
    transfer = OutgoingTransfer(b"", prefill, account, layout, SLOT_BYTES, False, ranges, reads)
    assert slicing.can_serve(transfer) is serves
