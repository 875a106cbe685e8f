"""Blocks of vLLM's cache that other workers read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from baton.kv_names.cache_kinds import Window
from baton.vllm_worker.metadata import BlockTable
from baton.vllm_worker.pins import Pins
from tests.vllm_worker.played import played

pytestmark = pytest.mark.all


ATTENTION = BlockTable(16)
WINDOW = BlockTable(16, window=Window(33, tile=1))
"""A token reads the two blocks before it."""
STATES = BlockTable(16, states=True)


class Pool:
    """vLLM's: 40 blocks. Of each group some are cached under their numbers, 0, 10 or 20 higher."""

    def __init__(self, *cached: Sequence[int]) -> None:
        self.held = [0] * 40
        self.freed: list[int] = []
        blocks = {
            (group, bytes([i])): SimpleNamespace(block_id=i + 10 * group)
            for group, numbers in enumerate(cached)
            for i in numbers
        }

        def get_cached_block(block_hash: bytes, groups: list[int]) -> list[Any] | None:
            found = [blocks.get((group, block_hash)) for group in groups]
            return None if None in found else found

        self.real = played(
            "vllm/v1/core/block_pool.py", "BlockPool",
            num_gpu_blocks=40, get_cached_block=get_cached_block, touch=self._touch, free_blocks=self._free,
        )  # fmt: skip

    def _touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            self.held[block.block_id] += 1

    def _free(self, blocks: Any) -> None:
        for block in blocks:
            self.held[block.block_id] -= 1
            self.freed.append(block.block_id)


def test_blocks_are_kept_until_nothing_reads_them() -> None:
    pool = Pool(range(4))
    pins = Pins(pool.real, [ATTENTION])
    names = [bytes([i]) for i in (1, 2, 3, 9, 0)]
    assert pins.add("a", names, 0) == [[1, 2, 3]], "up to the first that is not cached"
    assert pins.add("b", names[:1], 0) == [[1]]
    assert pins.add("c", names[3:], 0) == [[]]
    assert [name in pins for name in "abcd"] == [True, True, True, False], "the connector holds them"
    pins.end("a")
    assert pool.freed == [3, 2, 1], "the end of a prefix is evicted first"
    assert pool.held[1] == 1
    for name in "bcd":
        pins.end(name)
    assert not any(pool.held)
    assert not any(name in pins for name in "abc")


def test_a_part_of_the_pool_may_be_pinned() -> None:
    """Requests need the rest."""
    pool = Pool(range(40))
    pins, names = Pins(pool.real, [ATTENTION]), [bytes([i]) for i in range(40)]
    assert pins.add("a", names[:8], 0) == [[*range(8)]]
    assert pins.add("b", names[8:], 0) == [[8, 9]]
    assert pins.add("c", names, 0) == [[]]
    pins.end("a")
    [found] = pins.add("d", names, 0)
    assert len(found) == 8


@pytest.mark.parametrize(
    ("cached", "first", "found"),
    [
        ([range(3), range(3), range(3)], 4, [[0, 1, 2], [0, 11, 12], [0, 0, 22]]),
        ([range(3), [1, 2], [2]], 0, [[0, 1, 2], [0, 11, 12], [0, 0, 22]]),
        ([range(2), [1, 2], [2]], 0, [[], [], []]),
        ([range(3), [2], [2]], 0, [[], [], []]),
        ([range(3), [1, 2], [0, 1]], 0, [[], [], []]),
    ],
    ids=["all", "what is read", "no block", "no window", "no state"],
)
def test_windows_and_states_are_those_at_the_end(
    cached: list[Sequence[int]], first: int, found: list[list[int]]
) -> None:
    """No worker goes on elsewhere. 0 is vLLM's null block, too."""
    pool = Pool(*cached)
    pins = Pins(pool.real, [ATTENTION, WINDOW, STATES])
    assert pins.add("a", [bytes([i]) for i in range(3)], first) == found
    assert sum(pool.held) == sum(map(len, found)) - (3 if found[0] else 0)
    pins.end("a")
    assert not any(pool.held)
