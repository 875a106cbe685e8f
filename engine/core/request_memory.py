"""What requests hold: blocks of KV, and a state slot if the model has state layers. Pure."""

from array import array
from collections.abc import Callable, Mapping, Sequence

from baton.content import CHUNK_TOKENS
from baton.engine.core.block_pool import BlockPool, StatePool
from baton.engine.core.live_request import LiveRequest, Phase, States
from baton.engine.core.offload_tier import OffloadTier
from baton.engine.core.prefix_cache import PrefixCache, PrefixNames
from baton.engine.core.state_copies import Save
from baton.engine.core.step_builder import Schedule


class RequestMemory:
    """Gives and takes back what a request holds. Its first blocks may come from the prefix cache."""

    def __init__(self, pool: BlockPool, states: StatePool | None, cache: PrefixCache | None) -> None:
        """`states`: of a model with state layers. `cache`: None if there is no prefix cache."""
        self._pool = pool
        self._states = states
        self._cache = cache
        self._copies = None if cache is None else cache.copies
        self._block_size = pool.block_size
        self.watermark = max(1, pool.num_blocks // 100)
        """Blocks that an admission leaves free, so that running requests can grow."""

    # How much

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def need(self, num_tokens: int, hits: Sequence[int]) -> int:
        """Free blocks that `take` takes."""
        return self.blocks_for(num_tokens) - len(hits) + self._pool.unreferenced(hits)

    def known(self, live: LiveRequest) -> int:
        """Blocks that any tier has of the beginning of a request."""
        if self._cache is None:
            return 0
        names = self._usable(live, self._cache)
        return self._cache.usable(names[: self._cache.known(names)])

    def hits(self, live: LiveRequest, before: int | None = None) -> list[int]:
        """Cached blocks of the pool that the request begins with. The states of a reservation come from a
        prefill worker, so it needs no copy of them. Of a part of a prompt, other workers need the states that
        the model has at `before`, so its positions are computed from an earlier one on."""
        if self._cache is None:
            return []
        names = self._usable(live, self._cache)
        if before is not None and self._states is not None:
            names = names[: (before - 1) // self._block_size]
        blocks = self._pool.lookup(names)
        if live.phase is Phase.RESERVED:
            return blocks
        return blocks[: self._cache.usable(names[: len(blocks)])]

    def lacks(self, live: LiveRequest) -> int:
        """Blocks that the request needs for its next token, wherever the steps under way end."""
        if live.ends_with_pending:
            return 0
        return max(0, (live.num_computed + live.slack) // self._block_size + 1 - len(live.blocks))

    def has_room_for(self, live: LiveRequest, tokens: int) -> bool:
        """Gives a request blocks for so many tokens behind its next one, if they are spare."""
        lacking = self.blocks_for(len(live.token_ids) + tokens) - len(live.blocks)
        if lacking > 0:
            if self._pool.free - lacking < self.watermark:
                return False
            live.blocks.extend(self._pool.allocate(lacking))
        return True

    @property
    def headroom(self) -> int:
        """Blocks that an admission leaves free: the watermark. None while no request holds a block, since a
        request that needs the whole pool could otherwise never run."""
        return 0 if self._pool.free == self._pool.num_blocks else self.watermark

    # Giving and taking back

    def take(self, live: LiveRequest, num_tokens: int, hits: Sequence[int]) -> None:
        """Gives the request blocks for the tokens, and a state slot. The first blocks are `hits`, those of
        the method of this name."""
        self._pool.share(hits)
        known, remnant = self._adopt(live, hits)
        own = self._pool.allocate(self.blocks_for(num_tokens) - len(hits) - len(remnant))
        live.blocks = array("i", [*hits, *remnant, *own])
        if self._states is not None:
            live.states = States(self._states.allocate())
            if self._copies is not None and hits and live.phase is not Phase.RESERVED:
                assert live.names is not None, "hits are found by names"
                name = live.names.blocks[len(hits) - 1]
                self._copies.use(name)
                live.states.copy = copy = self._copies.lend(name)
                live.states.begins_with = None if copy is None else copy.slot
        live.num_cached = known
        live.num_verified = 0
        live.num_published = len(hits)
        if self._cache is not None:
            self._cache.used(self._names(live, self._cache).blocks[: len(hits)])
            self._cache.queries += len(live.token_ids)
            self._cache.hits += live.num_cached

    def _adopt(self, live: LiveRequest, hits: Sequence[int]) -> tuple[int, list[int]]:
        """The positions that are cached, and a remnant with the last ones of them, if there is one behind the
        cached blocks. A reservation needs none: its KV comes from another worker."""
        if self._cache is None or self._states is not None or live.phase is Phase.RESERVED:
            return len(hits) * self._block_size, []
        names, limit = self._names(live, self._cache), self._usable_tokens(live)
        end, name = self._cache.remnant(names, live.token_ids, len(hits), limit)
        return end, [] if name is None else [self._pool.adopt(name)]

    def _remnant(self, live: LiveRequest) -> tuple[int, bytes] | None:
        """The block of a request that full chunks end in, if it is not full, and the name of these chunks."""
        end = live.num_verified // CHUNK_TOKENS * CHUNK_TOKENS
        if self._cache is None or self._states is not None or not end % self._block_size:
            return None
        index = end // self._block_size
        if index != live.num_verified // self._block_size:
            return None  # no chunk ends in the last block
        return live.blocks[index], self._names(live, self._cache).of_chunk(live.token_ids, end)

    def load(self, live: LiveRequest, ended: Callable[[bool], None]) -> bool:
        """Loads what the tiers below have of a request, behind the blocks that it took from the cache. False:
        nothing, or computing it takes less time.

        `ended` is called when nothing writes to the blocks any more. True: the request has the KV, unless it
        was dropped. False: a block was damaged, which the tier has forgotten."""
        cache = self._cache
        if cache is None or not cache.offload:
            return False
        names, usable = self._names(live, cache), self._usable(live, cache)
        first, stop = live.num_published, cache.known(usable)
        pays: dict[OffloadTier, bool] = {}
        for index in range(first, stop):
            tier = None if self._pool.lookup([usable[index]]) else cache.tier_of(usable[index])
            if tier is not None and not pays.setdefault(tier, tier.pays()):
                stop = index
                break
        if first == stop:
            return False
        cache.used(usable[first:stop])
        wanted: list[tuple[bytes, int]] = []
        for index in range(first, stop):
            # The pool may have blocks again behind those that it lacks.
            if cached := self._pool.lookup([usable[index]]):
                self._pool.release([live.blocks[index]])
                self._pool.share(cached)
                live.blocks[index] = cached[0]
            else:
                wanted.append((usable[index], live.blocks[index]))

        def landed(whole: bool) -> None:
            if whole and live.phase is not Phase.GONE:
                cache.publish(names, live.blocks, first, stop)
                cache.hits += (stop - first) * self._block_size
                live.num_published, live.num_cached = stop, stop * self._block_size
            ended(whole)

        cache.load(wanted, landed)
        return True

    def publish(self, live: LiveRequest, computed: int) -> None:
        """Offers full blocks among the first `computed` positions to the prefix cache. The logits computed
        from their KV were finite, so other requests may share it."""
        live.num_verified = computed
        full = computed // self._block_size
        if self._cache is not None and full > live.num_published:
            self._cache.publish(self._names(live, self._cache), live.blocks, live.num_published, full)
            live.num_published = full
        while live.states is not None and live.states.copies and live.states.copies[0][0] <= computed:
            position, slot = live.states.copies.pop(0)
            assert self._cache is not None
            assert live.names is not None, "the block before the copy has a name"
            self._cache.publish_states(live.names, position, slot)

    def free(self, live: LiveRequest) -> None:
        if (states := live.states) is not None:
            assert self._states is not None
            self.forget_restore(live)
            self.choose_states(live, newest=True)
            self._states.release(states.slot)
            for _, slot in states.copies:
                assert self._copies is not None
                self._copies.release(slot)
            live.states = None
        remnant = self._remnant(live)
        self._pool.release(live.blocks, remnant)
        if remnant is not None and self._cache is not None:
            end = live.num_verified // CHUNK_TOKENS * CHUNK_TOKENS
            self._cache.remnant_kept(self._names(live, self._cache), end)
        live.num_verified = 0
        del live.blocks[:]

    # States of drafts

    def keep_states(self, live: LiveRequest) -> bool:
        """Lets the next step compute with a copy of the states, for which there must be a slot."""
        assert self._states is not None
        if not self._states.free:
            return False
        states = live.states
        assert states is not None, "it has blocks"
        states.begins_with = states.kept = states.slot
        states.slot = self._states.allocate()
        return True

    def choose_states(self, live: LiveRequest, *, newest: bool) -> None:
        """Ends what `keep_states` began: the request goes on with the copy, or with what was kept."""
        if (states := live.states) is not None and states.kept is not None:
            assert self._states is not None
            copy, kept = states.slot, states.kept
            states.slot, unused = (copy, kept) if newest else (kept, copy)
            self._states.release(unused)
            states.kept = None

    def most_drafts(self, live: LiveRequest, chunk: range) -> int:
        """Drafts behind a chunk, so that no copy of the states is taken after one of them."""
        if self._copies is None:
            return len(live.token_ids)
        return self._copies.next_position(live.num_cached, chunk.start, len(live.token_ids)) - chunk.stop - 1

    # Copies of states

    def until_copy(self, live: LiveRequest, count: int) -> int:
        """`count` tokens, or fewer, so that the next chunk of a request ends where a copy is taken."""
        if self._copies is None or count == 1:
            return count
        start = live.num_computed
        return self._copies.cut(live.num_cached, start, start + count, len(live.token_ids)) - start

    def forget_restore(self, live: LiveRequest) -> None:
        """The states of a request come from elsewhere, and not from a copy. Or it has ended."""
        if (states := live.states) is not None:
            states.begins_with = None
            if states.copy is not None:
                states.copy.end()
                states.copy = None

    def take_restores(self, plan: Schedule) -> list[tuple[int, int]]:
        """(from, to): the slots of states to copy before the step, which is launched now. The step takes the
        leases on the copies, and has leases on its requests. So both slots stay until it is over."""
        restores: list[tuple[int, int]] = []
        for live in plan.chunks:
            if (states := live.states) is not None and states.begins_with is not None:
                restores.append((states.begins_with, states.slot))
                states.begins_with = None
                if states.copy is not None:
                    plan.copies.append(states.copy)
                    states.copy = None
        return restores

    def saves(self, chunks: Mapping[LiveRequest, range]) -> list[Save]:
        """The copies of states that the step of these chunks makes, which is launched now. None at the end of
        a range before another one: other workers write states into the slot while that step computes."""
        saves: list[Save] = []
        copies = self._copies
        if copies is None or self._cache is None:
            return saves
        for live, chunk in chunks.items():
            positions = [*copies.positions(live.num_cached, chunk.start, chunk.stop, len(live.token_ids))]
            last = live.shared.range_stop if live.shared is not None and live.shared.ranges else None
            for position in [each for each in positions if each != last][-copies.most_written :]:
                if position <= live.num_known:
                    name = self._names(live, self._cache).blocks[position // self._block_size - 1]
                    if name in copies:
                        copies.use(name)
                        continue
                assert live.states is not None, "copies are those of states"
                written = live.states.copies
                slot = written.pop(0)[1] if len(written) >= copies.most_written else copies.allocate()
                if slot is not None:
                    written.append((position, slot))
                    saves.append(Save(live.states.slot, position, slot))
        return saves

    def _usable(self, live: LiveRequest, cache: PrefixCache) -> list[bytes]:
        """The names of the blocks of a request that may come from the prefix cache."""
        return self._names(live, cache).blocks[: self._usable_tokens(live) // self._block_size]

    def _usable_tokens(self, live: LiveRequest) -> int:
        """How many positions of a request may come from the prefix cache. A prefill always computes the
        positions whose logits it needs: the last one, and those for log probabilities of the prompt."""
        if live.phase is Phase.RESERVED:
            return len(live.token_ids)
        return live.num_scored if live.num_scored < live.asked.scores_to else len(live.token_ids) - 1

    def _names(self, live: LiveRequest, cache: PrefixCache) -> PrefixNames:
        """The names of all full blocks with known tokens."""
        if live.names is None:
            live.names = cache.names(live.request)
        live.names.extend(live.token_ids, live.num_known)
        return live.names
