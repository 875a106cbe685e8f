"""Copies when engines have several ranks: from the caches of some, through slots, into those of others."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from kv_transfer import ranks as ranks_module
from kv_transfer.arena import Arena, ArenaEnd, channel_pair
from kv_transfer.channel import ChannelClosed
from kv_transfer.device import Event, Pool, Staged
from kv_transfer.layout import KVLayout, cut, heads_of
from kv_transfer.ranks import RankCopier, open_ranks
from kv_transfer.transport import PagedKV

LAYOUT = KVLayout(num_layers=2, num_kv_heads=4, head_dim=8, dtype="float32")
BLOCKS = 40


def until_passed(pool: Pool, event: Event) -> None:
    deadline = time.monotonic() + 20
    while event is not None and not pool.passed(event):
        assert time.monotonic() < deadline, "copies never end"
        time.sleep(0.0002)


def mapped(end: ArenaEnd) -> ArenaEnd:
    """With a mapping of its own, as in another process: a GPU pins each once."""
    arena = end.arena
    return replace(end, arena=Arena(os.dup(arena.fd), arena.num_slots, arena.slot_bytes))


class Group:
    """The ranks of one engine. Those from 1 on are threads here."""

    def __init__(
        self, size: int, block_size: int, arena: Arena, layers: list[torch.Tensor], device: str
    ) -> None:
        """`layers`: the cache with all heads."""
        self.layers_ready = 0
        heads = [heads_of(LAYOUT, rank, size) for rank in range(size)]
        self.caches = [[x[..., first:last, :].contiguous() for x in layers] for first, last in heads]
        kv = [
            PagedKV(cache, block_size, LAYOUT, device, rank, size, lambda: self.layers_ready)
            for rank, cache in enumerate(self.caches)
        ]
        sending, receiving = (ArenaEnd(channel_pair()[0], arena).of_ranks(size) for _ in range(2))
        self.gathers, self.scatters = (open_ranks(kv[0], mapped(end)) for end, _ in (sending, receiving))
        self.others = sending[1]
        ends = zip(kv[1:], sending[1], receiving[1], strict=True)
        self.copiers = [RankCopier(cache, mapped(out), mapped(into)) for cache, out, into in ends]

    def close(self) -> None:
        self.gathers.close()
        self.scatters.close()


@contextmanager
def groups(*sizes: tuple[int, int], device: str = "cpu") -> Iterator[list[Group]]:
    """Groups of so many ranks with blocks of so many positions, which share an arena."""
    arena = Arena.create(64, 4096)
    made = []
    for size, block in sizes:
        layers = [torch.randn(2, BLOCKS, block, 4, 8, device=device) for _ in range(LAYOUT.num_layers)]
        made.append(Group(size, block, arena, layers, device))
    if device == "cuda":
        torch.cuda.synchronize()  # copies run on streams of their own
    yield made
    for group in made:
        group.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sender", [1, 2, 4, 8])
@pytest.mark.parametrize("receiver", [1, 2, 4, 8])
def test_from_group_to_group(sender: int, receiver: int, device: str) -> None:
    """Bit for bit, for heads that one rank or several ranks hold, and for different block sizes."""
    n, start = 250, 37
    here, there = (random.sample(range(BLOCKS), -(-n // block)) for block in (16, 32))
    with groups((sender, 16), (receiver, 32), device=device) as (source, target):
        tables = source.gathers.table(here, n), target.scatters.table(there, n)
        heads = sorted({heads_of(LAYOUT, rank, sender) for rank in range(sender)})
        pieces = [p for layer in range(2) for h in heads for p in cut(LAYOUT, layer, (start, n), h, 4096)]
        slots = random.sample(range(64), len(pieces))
        gathered = source.gathers.gather(
            [Staged(p, slot, tables[0]) for p, slot in zip(pieces, slots, strict=True)]
        )
        until_passed(source.gathers, gathered)
        scattered = target.scatters.scatter(
            [Staged(p, slot, tables[1]) for p, slot in zip(pieces, slots, strict=True)]
        )
        until_passed(target.scatters, scattered[1])
        rows = [
            torch.tensor([table[p // block] * block + p % block for p in range(start, n)])
            for table, block in ((here, 16), (there, 32))
        ]
        for layer in range(2):
            for head in range(4):
                copies = [
                    cache[layer].flatten(1, 2)[:, at, head - first]
                    for group, at, size in ((source, rows[0], sender), (target, rows[1], receiver))
                    for rank, cache in enumerate(group.caches)
                    for first, last in [heads_of(LAYOUT, rank, size)]
                    if first <= head < last
                ]
                assert all(torch.equal(copies[0], other) for other in copies[1:])


def test_a_rank_gathers_a_layer_only_when_it_has_written_it() -> None:
    with groups((2, 16)) as (group,):
        group.layers_ready = 1  # rank 0 is ahead
        ready = group.gathers.record()
        piece = next(cut(LAYOUT, 0, (0, 10), (2, 4), 4096))
        done = group.gathers.gather([Staged(piece, 0, group.gathers.table([3], 10))], [ready])
        time.sleep(0.01)
        assert not group.gathers.passed(done)
        group.copiers[0].layer_done(0)
        until_passed(group.gathers, done)


def test_a_rank_that_hangs_or_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "SILENCE", 0.01)
    with groups((2, 16)) as (group,):
        piece = next(cut(LAYOUT, 0, (0, 10), (2, 4), 4096))
        group.layers_ready = 1
        ready = group.gathers.record()
        done = group.gathers.gather([Staged(piece, 0, group.gathers.table([3], 10))], [ready])
        time.sleep(0.02)
        with pytest.raises(RuntimeError, match="rank 1 has not copied KV"):
            group.gathers.passed(done)
        group.others[0].channel.shutdown(2)
        with pytest.raises(ChannelClosed):
            group.gathers.passed(done)
