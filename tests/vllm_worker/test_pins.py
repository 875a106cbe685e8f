"""Blocks of vLLM's cache that other workers read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.vllm_worker.pins import Pins
from tests.vllm_worker.played import played

pytestmark = pytest.mark.all


class Pool:
    """vLLM's: 40 blocks, the first of which are cached under their numbers."""

    def __init__(self, cached: int) -> None:
        self.held = [0] * 40
        self.freed: list[int] = []
        blocks = {bytes([i]): SimpleNamespace(block_id=i) for i in range(cached)}

        def get_cached_block(block_hash: bytes, groups: list[int]) -> list[Any] | None:
            assert groups == [0]
            return [blocks[block_hash]] if block_hash in blocks else None

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
    pool = Pool(cached=4)
    pins = Pins(pool.real)
    names = [bytes([i]) for i in (1, 2, 3, 9, 0)]
    assert pins.add("a", names) == [1, 2, 3], "up to the first that is not cached"
    assert pins.add("b", names[:1]) == [1]
    assert pins.add("c", names[3:]) == []
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
    pool = Pool(cached=40)
    pins, names = Pins(pool.real), [bytes([i]) for i in range(40)]
    assert pins.add("a", names[:8]) == [*range(8)]
    assert pins.add("b", names[8:]) == [8, 9]
    assert pins.add("c", names) == []
    pins.end("a")
    assert len(pins.add("d", names)) == 8
