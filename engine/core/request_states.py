"""The slots of the states of requests, and the copies of states that they begin with and leave. Pure."""

from collections.abc import Mapping

from baton.engine.core.cells import Cells
from baton.engine.core.elastic import Budget
from baton.engine.core.live_request import LiveRequest, Phase, States
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.state_copies import Copy, CopyLease, Save, Wanted
from baton.engine.core.step_builder import Schedule


class RequestStates:
    """Gives and takes back slots, of a model with state layers."""

    def __init__(
        self,
        pool: Cells[bytes],
        block_size: int,
        cache: PrefixCache | None,
        budget: Budget | None,
    ) -> None:
        """`cache`: None if there is no prefix cache. `budget`: None if the pools keep their sizes."""
        self._budget = budget
        self._pool = pool
        self._block_size = block_size
        self._cache = cache
        self._copies = None if cache is None else cache.copies

    def lend(self, live: LiveRequest, num_hits: int) -> CopyLease | None:
        """The copy behind the first `num_hits` cached blocks of a request, if the device has it and the
        request begins with it."""
        if self._copies is None or not num_hits or live.phase is Phase.RESERVED:
            return None
        assert live.names is not None, "hits are found by names"
        if (name := live.names.blocks[num_hits - 1]) not in self._copies:
            return None
        self._copies.use(name)
        return self._copies.lend(name)

    def take(self, live: LiveRequest, copy: CopyLease | None, branch: int) -> None:
        """Gives the request a slot. It begins with the copy. `branch`: as in `Wanted`."""
        [slot], _ = self._pool.take(1)
        live.states = States(slot, branch=branch)
        live.states.copy = copy
        live.states.begins_with = None if copy is None else copy.slot

    def begin_with(self, live: LiveRequest, name: bytes) -> None:
        """The request begins with this cached copy."""
        assert live.states is not None, "it has blocks"
        assert self._copies is not None, "the copy is cached"
        self.forget_restore(live)
        self._copies.use(name)
        live.states.copy = copy = self._copies.lend(name)
        live.states.begins_with = None if copy is None else copy.slot

    def publish(self, live: LiveRequest, computed: int) -> None:
        """Offers the copies among the first `computed` positions to the prefix cache, or keeps the last one
        for the end of the answer. The blocks before them are offered already."""
        states = live.states
        assert states is not None, "it has blocks"
        while states.copies and states.copies[0].position <= computed:
            copy = states.copies.pop(0)
            if not copy.of_answer:
                self._publish_copy(live, copy)
                continue
            assert self._cache is not None
            assert self._copies is not None
            assert live.names is not None, "the block before the copy has a name"
            if states.of_answer is not None:
                self._copies.release(states.of_answer.slot)
            states.of_answer = copy
            self._cache.keep_states(live.names, copy.position, copy.slot)

    def _publish_copy(self, live: LiveRequest, copy: Copy) -> None:
        assert self._cache is not None
        assert live.names is not None, "the block before the copy has a name"
        self._cache.publish_states(live.names, copy.position, copy.slot)

    def free(self, live: LiveRequest) -> None:
        """Takes back all slots of the request, if it has some. The cache gets the last copy of its answer."""
        if (states := live.states) is None:
            return
        self.forget_restore(live)
        self.choose(live, newest=True)
        self._pool.end(states.slot)
        self._release_copies(states)
        if states.of_answer is not None:
            self._publish_copy(live, states.of_answer)
        live.states = None

    def forget_copies(self, live: LiveRequest) -> None:
        """Gives back the copies of its states that have no name yet."""
        if (states := live.states) is None:
            return
        self._release_copies(states)
        if states.of_answer is not None:
            assert self._copies is not None
            self._copies.release(states.of_answer.slot)
            states.of_answer = None

    def _release_copies(self, states: States) -> None:
        for copy in states.copies:
            assert self._copies is not None
            self._copies.release(copy.slot)
        states.copies.clear()

    # States of drafts

    def keep(self, live: LiveRequest) -> bool:
        """Lets the next step compute with a copy of the states, for which there must be a slot."""
        if not self._pool.free:
            return False
        states = live.states
        assert states is not None, "it has blocks"
        states.begins_with = states.kept = states.slot
        [states.slot], _ = self._pool.take(1)
        return True

    def choose(self, live: LiveRequest, *, newest: bool) -> None:
        """Ends what `keep` began: the request goes on with the copy, or with what was kept."""
        if (states := live.states) is not None and states.kept is not None:
            copy, kept = states.slot, states.kept
            states.slot, unused = (copy, kept) if newest else (kept, copy)
            self._pool.end(unused)
            states.kept = None

    def most_drafts(self, live: LiveRequest, chunk: range) -> int:
        """Drafts behind a chunk, so that no copy of the states is taken after one of them."""
        if self._copies is None:
            return len(live.token_ids)
        return self._copies.next_position(_wanted(live), chunk.start, len(live.token_ids)) - chunk.stop - 1

    # Copies of states

    def allocate_copy(self) -> int | None:
        """As `StateCopies.allocate`, with memory of blocks if there is some."""
        copies = self._copies
        assert copies is not None, "the cache has copies"
        if self._budget is not None and not copies.unused:
            self._budget.grow_copies()
        return copies.allocate()

    def until_copy(self, live: LiveRequest, count: int) -> int:
        """`count` tokens, or fewer, so that the next chunk of a request ends where a copy is taken."""
        if self._copies is None or count == 1:
            return count
        start = live.num_computed
        return self._copies.cut(_wanted(live), start, start + count, len(live.token_ids)) - start

    def forget_restore(self, live: LiveRequest) -> None:
        """The states of a request come from elsewhere, and not from a copy. Or it has ended."""
        if (states := live.states) is not None:
            states.begins_with = None
            if states.copy is not None:
                states.copy.end()
                states.copy = None

    def take_restores(self, schedule: Schedule) -> list[tuple[int, int]]:
        """(from, to): the slots of states to copy before the step, which is launched now. The step takes the
        leases on the copies, and has leases on its requests. So both slots stay until it is over."""
        restores: list[tuple[int, int]] = []
        for live in schedule.chunks:
            if (states := live.states) is not None and states.begins_with is not None:
                restores.append((states.begins_with, states.slot))
                states.begins_with = None
                if states.copy is not None:
                    schedule.copies.append(states.copy)
                    states.copy = None
        return restores

    def saves(self, chunks: Mapping[LiveRequest, range]) -> list[Save]:
        """The copies of states that the step of these chunks makes, which is launched now. None at the end of
        a range before another one: other workers write states into the slot while that step computes."""
        saves: list[Save] = []
        copies = self._copies
        if copies is None or self._cache is None:
            return saves
        size = self._block_size
        for live, chunk in chunks.items():
            if chunk.start // size == chunk.stop // size or live.private:
                continue  # as most decodes: no block ends in it, and so no copy is taken
            wanted = _wanted(live)
            positions = [*copies.positions(wanted, chunk.start, chunk.stop, len(live.token_ids))]
            last = live.shared.range_stop if live.shared.ranges else None
            for position in [each for each in positions if each != last][-copies.most_written :]:
                if position <= live.num_known:
                    name = self._cache.names_of(live).blocks[position // size - 1]
                    if name in copies:
                        copies.use(name)
                        continue
                assert live.states is not None, "copies are those of states"
                written, of_answer = live.states.copies, copies.is_of_answer(wanted, position)
                if len(written) >= copies.most_written:
                    slot = written.pop(0).slot
                else:
                    slot = None if of_answer and not copies.may_write_answer else self.allocate_copy()
                if slot is not None:
                    written.append(Copy(position, slot, of_answer))
                    saves.append(Save(live.states.slot, position, slot))
        return saves


def _wanted(live: LiveRequest) -> Wanted:
    assert live.states is not None, "it has blocks"
    return Wanted(live.num_cached, live.states.branch, live.decodes and not live.handover)
