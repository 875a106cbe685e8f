"""Copies when engines have several ranks: from the caches of some, through slots, into those of others."""

import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
import xxhash
from msgspec.structs import replace

from baton.kv_transfer.arena import Arena, ArenaEnd, channel_pair
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.device import host_pool
from baton.kv_transfer.device.host_pool import HostPool, open_pool
from baton.kv_transfer.device.pool import Event, Pool
from baton.kv_transfer.endpoint.other_ranks import RECEIVING, SENDING, Line, OtherRanks
from baton.kv_transfer.endpoint.ranked_pool import RankedMemory, RankedPool, RankedTable, open_ranks
from baton.kv_transfer.layout import KVLayout, cut
from baton.kv_transfer.peer_memory import PeerMemory, Unreachable
from baton.kv_transfer.protocol.local_messages import Copied, FromRank, Opened, ToRank
from baton.kv_transfer.slices import Slice
from tests.kv_transfer.conformance.conftest import SummingPool
from tests.layouts import kv_layout, paged
from tests.stand_in import stand_in
from tests.within import WITHIN

from .ranks import Ranks, mapped

BLOCKS = 40
SLOT = 4096


def layout_of(heads: int) -> KVLayout:
    return kv_layout(num_layers=2, num_kv_heads=heads, head_dim=8, dtype="float32")


def until_passed(pool: Pool, event: Event) -> None:
    deadline = time.monotonic() + WITHIN
    while event is not None and not pool.passed(event):
        assert time.monotonic() < deadline, "copies never end"
        time.sleep(0.0002)


class Group(Ranks):
    """The two ranks of one engine, without a transfer process."""

    def __init__(self) -> None:
        arena = Arena.create(128, SLOT)
        layers = [torch.randn(2, BLOCKS, 16, 4, 8) for _ in range(2)]
        sends, receives = (mapped(ArenaEnd(channel_pair()[0], arena)) for _ in range(2))
        super().__init__(layers, [], 16, layout_of(4), 2, sends, receives)
        self.line = Line(self.channels, SENDING)
        self.gathers = RankedPool(open_pool(self.kv, sends.arena), self.kv, self.line)
        self.scatters = open_ranks(self.kv, receives.arena, self.channels, RECEIVING)

    def close(self) -> None:
        self.gathers.close()
        self.scatters.close()
        super().close()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.close()


def test_a_rank_gathers_a_layer_only_when_it_has_written_it(until: Any, group: Group) -> None:
    table = group.gathers.table([3], 10)
    batch, ready = [], []
    for layer in range(2):
        group.layer_done_on_rank_0()
        ready.append(group.gathers.record())
        piece = next(cut(layout_of(4), layer, (0, 10), (2, 4), SLOT))
        batch.append(Slice(piece, slot=layer, table=table))
    done, _ = group.gathers.gather(batch, ready)
    time.sleep(0.01)
    assert not group.gathers.passed(done)
    filled = [group.sending.arena.slot(slot) for slot in range(2)]
    assert not any(map(any, filled))
    group.copiers[0].layer_done(0)
    until(lambda: any(filled[0]), "the first layer, which waits for no other")
    assert not any(filled[1])
    group.copiers[0].layer_done(1)
    until_passed(group.gathers, done)
    assert any(filled[1])


def test_a_rank_makes_one_table_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a GPU's host as long as a gather, and nothing hides what the last layer waits for."""
    made: list[tuple[str, Sequence[int]]] = []
    table = HostPool.table

    def noted(pool: HostPool, block_ids: Sequence[int], *args: int) -> tuple[Sequence[int], int]:
        made.append((threading.current_thread().name, block_ids))
        return table(pool, block_ids, *args)

    monkeypatch.setattr(HostPool, "table", noted)
    with closing(Group()) as group:
        for is_gather, pool in ((True, group.gathers), (False, group.scatters)):
            made.clear()
            there = pool.table([3, 5], 20)
            for layer in range(2):
                [piece] = cut(layout_of(4), layer, (0, 20), (2, 4), SLOT)
                staged = [Slice(piece, table=there)]
                until_passed(pool, (pool.gather if is_gather else pool.scatter)(staged)[0])
            assert made == [("MainThread", [3, 5]), ("rank copies", (3, 5))]


def test_each_rank_sums_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slices of both ranks, in any order: `sum` is that of the rank that gathered it, and a rank says
    whether what it scattered has that sum."""
    monkeypatch.setattr(host_pool, "HostPool", SummingPool)
    with closing(Group()) as group:
        there = group.gathers.table([3], 10)
        cuts = [
            cut(layout_of(4), layer, (0, 10), heads, SLOT) for layer in (0, 1) for heads in ((2, 4), (0, 2))
        ]
        batch = [Slice(piece, slot=9 - i, table=there) for i, [piece] in enumerate(cuts)]
        gathered, sums = group.gathers.gather(batch)
        until_passed(group.gathers, gathered)
        found = sums()
        slots = [bytes(group.sending.arena.slot(s.slot)[: 2 * 10 * 2 * 8 * 4]) for s in batch]
        assert found == [xxhash.xxh3_64_intdigest(data) for data in slots]
        assert len({*found}) == len(batch)
        for damaged in range(len(batch)):
            wrong = [checksum ^ (i == damaged) for i, checksum in enumerate(found)]
            arrived = [
                replace(s, table=group.scatters.table([5], 10), sum=checksum, verified=False)
                for s, checksum in zip(batch, wrong, strict=True)
            ]
            scattered, outcome = group.scatters.scatter(arrived)
            until_passed(group.scatters, scattered)
            assert [left != 0 for left in outcome()] == [i == damaged for i in range(len(batch))]


@pytest.mark.parametrize(
    ("remainders", "right"),
    [
        ([5, 5, -5, -5], True),
        ([5, 5, -4, -4], False),  # a wrong word
        ([5, 6, -5, -5], False),  # ranks with the same heads read different words
        ([0, 0, 0, 0], True),
        ([5, 5, None, -5], False),  # another generation
    ],
)
def test_a_slice_is_right_if_the_rests_of_its_ranks_add_up(remainders: list[int | None], right: bool) -> None:
    """Of four ranks, two have head 0, and two head 1."""
    modulo = [remainder if remainder is None else remainder % (1 << 64) for remainder in remainders]
    layout, layers = layout_of(2), [torch.empty(0)]
    pulled = lambda batch, memory: (None, lambda: modulo[:1])  # noqa: E731
    own = stand_in(Pool, gather_most=1, scatter=pulled, passed=lambda event: True)
    ends = [channel_pair() for _ in range(3)]
    line = Line(OtherRanks([end for end, _ in ends]), RECEIVING)
    pool = RankedPool(own, paged(layers, 16, layout, "cpu", 0, 4), line)
    table, memory = RankedTable(None, [0], 0), RankedMemory(own, 1, line, {})
    [piece] = cut(layout, 0, (0, 3), (0, 2), SLOT)
    event, outcome = pool.scatter([Slice(piece, table=table, sum=1)], memory)
    assert not pool.passed(event)
    for (_, end), remainder in zip(ends, modulo[1:], strict=True):
        Channel(end, ToRank).send(FromRank(RECEIVING, Copied(1, {0: remainder} if remainder != 0 else {})))
    until_passed(pool, event)
    assert (outcome() == [0]) is right
    assert not any(line.found)
    for end in itertools.chain(*ends):
        end.close()


def test_an_answer_about_memory_that_was_closed_meanwhile_is_dropped() -> None:
    own = stand_in(Pool, gather_most=1, open=lambda export, dtype: stand_in(PeerMemory, close=lambda: None))
    export: Any = None
    near, far = channel_pair()
    with near, far:
        layout, layers = layout_of(2), [torch.empty(0)]
        line = Line(OtherRanks([near]), RECEIVING)
        pool = RankedPool(own, paged(layers, 16, layout, "cpu", 0, 2), line)
        closed, memory, unreachable = (pool.open(export, None) for _ in range(3))
        closed.close()
        assert not pool.opened(memory)
        answers = (Opened(number, number < 3, "why") for number in (1, 2, 3))
        Channel(far, ToRank).send(*(FromRank(RECEIVING, answer) for answer in answers))
        assert pool.opened(memory)
        with pytest.raises(Unreachable, match="rank 1: why"):
            pool.opened(unreachable)
        unreachable.close()


def test_a_rank_reports_all_copies_to_a_rank_0_that_reads_late(
    monkeypatch: pytest.MonkeyPatch, group: Group
) -> None:
    """Its reports then have no room in the channel for a while."""
    monkeypatch.setattr(group.line, "silence", WITHIN)
    group.others[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that there is
    table, done = group.gathers.table([3], 10), None
    [piece] = cut(layout_of(4), 0, (0, 10), (2, 4), SLOT)
    for slot in range(64):
        done, _ = group.gathers.gather([Slice(piece, slot=slot, table=table)])
    until_passed(group.gathers, done)


def test_a_rank_that_hangs_or_dies_is_an_error(monkeypatch: pytest.MonkeyPatch, group: Group) -> None:
    monkeypatch.setattr(group.line, "silence", 0.01)
    piece = next(cut(layout_of(4), 0, (0, 10), (2, 4), SLOT))
    group.layer_done_on_rank_0()
    ready = group.gathers.record()
    done, _ = group.gathers.gather([Slice(piece, table=group.gathers.table([3], 10))], [ready])
    time.sleep(0.02)
    with pytest.raises(RuntimeError, match="rank 1 has not copied"):
        group.gathers.passed(done)
    group.others[0].shutdown(2)
    with pytest.raises(ChannelClosed):
        group.gathers.passed(done)
