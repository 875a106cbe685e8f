"""Copies of states, which the prefix cache keeps for models with state layers. Pure bookkeeping.

A request can begin with cached blocks only if the cache also has its states at the end of these blocks. A
state cannot be cut to fewer tokens. So a copy serves exactly its own position. A request gets copies

- at each multiple of an interval,
- where its prompt leaves cached blocks that have no states at their end: other prompts may leave them there,
- at the last block boundary of its prompt,
- at the last multiple of `ANSWER_TOKENS` of its answer: the next turn of a chat begins there. The request
  keeps that copy to itself until it ends, and each later one takes its place.

The scan of a prompt copies the states on its way if a scanned chunk ends there. Else a step ends there, and
they are copied right after it.

A copy is a place of `Cells`. It has the name of the last block before its position. A step, a transfer or a
load writes it, and then names it.

Copies are evicted in an order of their own, and blocks in theirs, as in SGLang's cache for hybrid models. A
copy is also dropped when the cache drops the block before its position. The tiers below the device keep what
is evicted (`offload_tier`). No request waits for a slot: without one there is no copy.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from baton.engine.core.cells import Cells
from baton.engine.core.units import Units
from baton.kv_names import CHUNK_TOKENS

END_TOKENS = 512
"""The end of a prompt, or of what it shares, gets a copy only this many tokens past the copy before it. Fewer
tokens take a step about as long as one."""
ANSWER_TOKENS = CHUNK_TOKENS
"""Positions between two copies of the states of a request that decodes. Other workers know no others."""


class Wanted(NamedTuple):
    """What the positions of the copies of a request depend on."""

    begun: int
    """It began with the copy at this position. 0: with none."""
    branch: int = 0
    """Where its prompt leaves cached blocks, past `begun`. 0: it does not."""
    decodes: bool = False


class Save(NamedTuple):
    """A copy that a step makes."""

    state_slot: int
    """Of the request."""
    position: int
    to: int


class Copy(NamedTuple):
    """A copy that a request has and the cache does not."""

    position: int
    slot: int
    of_answer: bool


class CopyLease:
    """Nothing writes to a copy, in `slot`, until `end`."""

    __slots__ = ("_give_back", "slot")

    def __init__(self, slot: int, give_back: Callable[[int], None]) -> None:
        self.slot = slot
        self._give_back: Callable[[int], None] | None = give_back

    def end(self) -> None:
        give_back, self._give_back = self._give_back, None
        assert give_back is not None, "a lease ends once"
        give_back(self.slot)


class StateCopies(Cells[bytes]):
    """Owns the slots of copies, and says at which positions requests get them."""

    def __init__(
        self,
        first_slot: int,
        count: int,
        interval: int,
        block_size: int,
        chunk_tokens: int,
        units: Units | None = None,
    ) -> None:
        """The slots are `count` in a row. Positions between two copies: `interval`, rounded up to blocks.
        `chunk_tokens`: as `Kernels.chunk_tokens`. `units`: those of slots that have memory. None: all
        have."""
        super().__init__(Units.fixed(count, first_slot) if units is None else units)
        self._chunk_tokens = chunk_tokens
        self._interval = -(-interval // block_size) * block_size
        self._answer_interval = -(-ANSWER_TOKENS // block_size) * block_size
        self._block_size = block_size
        self._writing = 0

    @property
    def most_written(self) -> int:
        """Slots that one request may write at a time, so that a long prompt leaves room for others."""
        return max(1, self.present // 4)

    def next_position(self, wanted: Wanted, computed: int, tokens: int) -> int:
        """The first position after `computed` at which a request with so many tokens gets a copy."""
        at_interval = (computed // self._interval + 1) * self._interval
        if wanted.decodes:
            return min(at_interval, (computed // self._answer_interval + 1) * self._answer_interval)
        before = wanted.begun
        for end in (wanted.branch, (tokens - 1) // self._block_size * self._block_size):
            if end - max(before, end // self._interval * self._interval) >= END_TOKENS:
                if computed < end < at_interval:
                    return end
                before = end
        return at_interval

    def is_of_answer(self, wanted: Wanted, position: int) -> bool:
        """Whether the copy here is only for what comes after the answer."""
        return wanted.decodes and position % self._interval > 0

    def positions(self, wanted: Wanted, start: int, stop: int, tokens: int) -> Iterator[int]:
        """The positions at which the chunk [start, stop) of a request gets copies. The first one that the
        scan cannot copy at is the last one here: the chunk has to end there."""
        position = self.next_position(wanted, start, tokens)
        while position <= stop:
            yield position
            if (position - start) % self._chunk_tokens:
                return
            position = self.next_position(wanted, position, tokens)

    def cut(self, wanted: Wanted, start: int, stop: int, tokens: int) -> int:
        """`stop`, or the position before it where the chunk has to end."""
        *_, last = 0, *self.positions(wanted, start, stop, tokens)
        return last if last and (last - start) % self._chunk_tokens else stop

    # Slots

    def allocate(self) -> int | None:
        """Returns a slot for a step to write, and evicts a copy where needed. None: steps are writing to all
        slots."""
        if not self.free:
            return None
        [slot], _ = self.take(1)  # tiers have seen coming what it evicts
        self._writing += 1
        return slot

    @property
    def may_write_answer(self) -> bool:
        """Whether one more slot leaves at least half of them to what is cached."""
        return self._writing < self.present // 2

    def name(self, slot: int, name: bytes) -> bool:
        """A slot of `allocate` has the states of this name, which are verified. False: another one has them
        already, and the slot is free."""
        is_new = self.publish(slot, name)
        self.release(slot)
        return is_new

    def release(self, slot: int) -> None:
        """Nothing writes to a slot of `allocate` any more."""
        self._writing -= 1
        self.end(slot)

    def lend(self, name: bytes) -> CopyLease | None:
        """A lease on a cached copy, which may be forgotten meanwhile. None: there is no such copy."""
        if (slot := self.find(name)) is None:
            return None
        self.share([slot])
        return CopyLease(slot, self.end)

    def assert_whole(self) -> None:
        super().assert_whole()
        assert not self._writing, "a copy was left behind"
