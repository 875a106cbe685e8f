"""The block pool under random operations, compared with a simple model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from baton.engine.core.block_pool import BlockPool, Held

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Requests allocate, publish, share and release. The model is a table of each request's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 16)
        self.holders: dict[int, Held] = {}  # by request
        self.content: dict[int, bytes] = {}  # block → name of its latest content
        self.remnants: dict[bytes, int] = {}  # by name, the blocks that nothing got since
        self.requests = 0

    tables = Bundle("tables")

    def held(self) -> set[int]:
        return {block for held in self.holders.values() for block in held.table}

    @rule(target=tables, count=st.integers(0, 6), hits=st.integers(0, 4), family=st.integers(0, 2))
    def start(self, count: int, hits: int, family: int) -> int:
        chain = [bytes([family, depth]) for depth in range(hits)]
        cached = self.pool.lookup(chain)
        assert [self.content[block] for block in cached] == chain[: len(cached)]
        self.requests += 1
        self.holders[self.requests] = Held()
        if count + self.pool.unreferenced(cached) <= self.pool.free:
            free = self.pool.free
            held = self.pool.hold(count, cached)
            fresh = held.table[len(cached) :]
            assert self.pool.free == free - count - len(set(cached) - self.held())
            assert not set(fresh) & (self.held() | set(cached)), "a block got a second owner"
            for block in fresh:
                self.content.pop(block, None)
            self.remnants = {name: block for name, block in self.remnants.items() if block not in fresh}
            self.holders[self.requests] = held
        return self.requests

    @rule(table=tables, family=st.integers(0, 2), depth=st.integers(0, 3))
    def publish(self, table: int, family: int, depth: int) -> None:
        blocks = self.holders[table].table
        if depth < len(blocks) and blocks[depth] not in self.content:
            known = self.pool.lookup([bytes([family, depth])])
            self.pool.publish(blocks[depth], bytes([family, depth]))
            if not known:
                self.content[blocks[depth]] = bytes([family, depth])

    @rule(
        table=consumes(tables),
        remnant=st.sampled_from([None, b"a", b"b"]),
        copied=st.sampled_from([None, True, False]),
    )
    def release(self, table: int, remnant: bytes | None, copied: bool | None) -> None:
        held = self.holders.pop(table)
        private = [block for block in held.table if block not in self.content]
        if remnant is None or not private:
            self.pool.release(held, copied=copied)
        else:
            self.pool.release(held, (private[-1], remnant), copied=copied)
            self.remnants.setdefault(remnant, private[-1])

    @rule(blocks=st.none() | st.sets(st.integers(0, NUM_BLOCKS - 1)))
    def only_here(self, blocks: set[int] | None) -> None:
        self.pool.only_here(blocks)

    @rule(target=tables, name=st.sampled_from([b"a", b"b"]))
    def adopt(self, name: bytes) -> int:
        assert self.pool.has_remnant(name) is (name in self.remnants)
        self.requests += 1
        self.holders[self.requests] = Held()
        if name in self.remnants:
            block = self.pool.adopt(name)
            assert block == self.remnants.pop(name)
            assert block not in self.held()
            self.holders[self.requests].table.append(block)
        return self.requests

    @precondition(lambda self: self.pool.free < NUM_BLOCKS)
    @rule()
    def too_many(self) -> None:
        with pytest.raises(AssertionError):
            self.pool.hold(self.pool.free + 1)

    @invariant()
    def accounts_are_right(self) -> None:
        self.pool.assert_consistent()
        assert self.pool.free == NUM_BLOCKS - len(self.held())

    def teardown(self) -> None:
        for held in self.holders.values():
            self.pool.release(held)
        self.pool.assert_whole()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40)


def test_evicts_the_least_recently_used_and_the_end_of_a_prefix_before_its_beginning() -> None:
    pool = BlockPool(4, 16)
    old, new = [b"old0", b"old1"], [b"new0", b"new1"]
    for chain in (old, new):
        held = pool.hold(2)
        for block, name in zip(held.table, chain, strict=True):
            pool.publish(block, name)
        pool.release(held)
    pool.hold(1)
    assert len(pool.lookup(old)) == 1
    assert len(pool.lookup(new)) == 2
    pool.hold(2)
    assert pool.lookup(old) == []
    assert len(pool.lookup(new)) == 1


def test_remnants_are_given_out_before_cached_blocks_the_oldest_first() -> None:
    pool = BlockPool(3, 16)
    handles = [pool.hold(1) for _ in range(3)]
    [cached, old, new] = [block for held in handles for block in held.table]
    pool.publish(cached, b"cached")
    for held, remnant in zip(handles, (None, (old, b"old"), (new, b"new")), strict=True):
        pool.release(held, remnant)
    assert pool.free == 3
    assert [[*pool.next_evicted(most)] for most in (2, 3)] == [[], [(cached, b"cached")]]
    assert [*pool.hold(1).table] == [old]
    assert not pool.has_remnant(b"old")
    assert pool.adopt(b"new") == new
    assert pool.lookup([b"cached"]) == [cached]


def test_copies_are_evicted_first_until_no_other_worker_has_them() -> None:
    """A block that is used here after a handover is no copy."""
    pool = BlockPool(8, 16)
    blocks = {name: pool.hold(1) for name in (b"a", b"b", b"c", b"d", b"e", b"f")}
    for name, block in blocks.items():
        pool.publish(block.table[0], name)
        pool.release(block, copied=name in (b"c", b"d", b"e", b"f"))
    pool.release(pool.hold(hits=blocks[b"d"].table), copied=False)  # used here
    pool.release(pool.hold(hits=blocks[b"f"].table))  # another request read it: it is a copy as before
    pool.only_here(blocks[b"e"].table + blocks[b"a"].table)
    order = [b"c", b"f", b"a", b"b", b"d", b"e"]
    assert [name for _, name in pool.next_evicted(8)] == order
    assert (pool.free, pool.spare) == (8, 2 + 2), "two blocks were never used, and two are copies"
    pool.hold(8)
    assert pool.evicted == order
    pool.assert_consistent()
    pool = BlockPool(4, 16)
    held = pool.hold(4)
    for block in held.table:
        pool.publish(block, bytes([block]))
    pool.release(held, copied=True, first_copied=3)
    assert pool.spare == 1, "the other worker lacks a part of the rest"
