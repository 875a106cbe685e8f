"""The blocks of KV of requests, and the names under which the prefix cache may have them. Pure."""

from collections.abc import Collection, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from baton.engine.core.block_pool import BlockPool, Held
from baton.engine.core.cells import Cells
from baton.engine.core.elastic import Amounts, Budget
from baton.engine.core.live_request import WHOLE, LiveRequest, Phase, SharedPrompt
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.request_states import RequestStates
from baton.engine.core.step_builder import Schedule
from baton.engine.core.window_blocks import WindowBlocks, WindowSpan
from baton.kv_names import CHUNK_TOKENS


class Verdict(Enum):
    TAKE = auto()
    WAIT = auto()
    """Memory moves for it, over the next steps."""
    REFUSE = auto()
    """Others must end first."""


class Wants(NamedTuple):
    """What a request must find at the same time."""

    tokens: int
    hits: Sequence[int]
    """Cached blocks that it would begin with."""
    kept: int
    """Blocks that stay free for others."""
    slots: int
    windows: int


class Admission(NamedTuple):
    verdict: Verdict
    hits: Sequence[int] = ()
    """The cached blocks that it begins with."""


REFUSED = Admission(Verdict.REFUSE)


class RequestMemory:
    """Gives and takes back what a request holds. Its first blocks may come from the prefix cache."""

    def __init__(
        self,
        pool: BlockPool,
        states: Cells[bytes] | None,
        cache: PrefixCache | None,
        budget: Budget | None = None,
    ) -> None:
        """`states`: of a model with state layers. `cache`: None if there is no prefix cache. `budget`: None
        if the pools keep their sizes."""
        self.states = None if states is None else RequestStates(states, pool.block_size, cache, budget)
        """None: the model has no state layers."""
        self._pool = pool
        self._states = states
        self._cache = cache
        self._budget = budget
        self._windows = pool.windows
        self._block_size = pool.block_size
        self._cells = [cells for cells in (pool, states, pool.windows) if cells is not None]
        self.watermark = max(1, pool.num_blocks // 100)
        """Blocks that an admission leaves free, so that running requests can grow."""

    # How much

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def need(self, num_tokens: int, hits: Sequence[int]) -> int:
        """Free blocks that `take` takes."""
        return self.blocks_for(num_tokens) - len(hits) + self._pool.unreferenced(hits)

    def window_need(self, num_tokens: int, shared: SharedPrompt = WHOLE) -> int:
        """Window blocks that `take` is promised, at most."""
        if self._windows is None:
            return 0
        most = self._windows.need(self.blocks_for(num_tokens))
        return most + sum(self._kept_at(shared, 0, most, self._windows).values())

    def _kept_at(self, shared: SharedPrompt, cached: int, most: int, windows: WindowBlocks) -> dict[int, int]:
        """Beside what steps read from the first range on that is not `cached`, a part of a prompt keeps what
        layers with windows read before these positions. The values: window blocks that are promised for it,
        `most` for a range that begins there."""
        uncached = [each.start for each in shared.ranges if each.stop > cached]
        kept = dict.fromkeys(uncached[1:], most)
        for position in shared.read_by_others(windows.windows):
            kept[position] = min(most, self.blocks_for(position) - windows.first(position))
        return kept

    def known(self, live: LiveRequest) -> int:
        """Blocks that any tier has of the beginning of a request."""
        if self._cache is None:
            return 0
        names = self.usable(live, self._cache)
        return self._cache.usable(names[: self._cache.known(names)])

    def hits(self, live: LiveRequest, *, on_device: bool = True) -> list[int]:
        """Cached blocks of the pool that the request begins with, as in `PrefixCache.usable`. The states of a
        reservation come from a prefill worker, so it needs no copy of them. Of a part of a prompt, other
        workers need the states after its first range, so its positions are computed from an earlier one on.
        They also read its cached blocks, so far as their windows reach."""
        if self._cache is None:
            return []
        now = self._cache.changes, on_device, live.phase, len(live.token_ids), live.num_scored
        if live.found[0] != now:  # the queue is looked at several times a step
            live.found = now, self._look_up(live, self._cache, on_device=on_device)
        return live.found[1]

    def _look_up(self, live: LiveRequest, cache: PrefixCache, *, on_device: bool) -> list[int]:
        names, shared = self.usable(live, cache), live.shared
        if shared is not WHOLE:
            if shared.ranges and self.states is not None:
                names = names[: (shared.ranges[0].stop - 1) // self._block_size]
            for position in shared.read_by_others(cache.windows):
                names = names[: cache.usable_before(names, position)]
        blocks = self._pool.lookup(names)
        if live.phase is Phase.RESERVED:
            return blocks[: cache.usable_before(names[: len(blocks)], len(live.token_ids))]
        return blocks[: cache.usable(names[: len(blocks)], on_device=on_device, loads=False)]

    def lacks(self, live: LiveRequest) -> int:
        """Blocks that the request needs for its next token, wherever the steps under way end."""
        if live.ends_with_pending:
            return 0
        return max(0, (live.num_computed + live.slack) // self._block_size + 1 - len(live.held.table))

    def lacks_windows(self, live: LiveRequest, lacking: int) -> int:
        """Window blocks that the request must be promised to have so many blocks more."""
        if self._windows is None:
            return 0
        return max(0, self._windows.need(len(live.held.table) + lacking) - live.held.windows.promised)

    def grow(self, live: LiveRequest, lacking: int, keep: int = 0) -> bool:
        """Gives a request so many blocks more, if `keep` blocks are free after that. False: they are not, or
        there are too few window blocks."""
        lacks_windows = self.lacks_windows(live, lacking)
        if keep and self._pool.free - lacking < keep:
            return False
        kept = self.kept_windows if keep and lacks_windows else 0
        if not self.has_room(lacking + keep, 0, lacks_windows + kept):
            return False
        if keep and not self.is_at_once(lacking, 0, lacks_windows):
            return False
        self.provide(lacking, windows=lacks_windows)
        if self._windows is not None and lacks_windows:
            self._windows.promise(live.held.windows, live.held.windows.promised + lacks_windows)
        self._pool.extend(live.held, lacking)
        return True

    def can_grow(self, running: Sequence[LiveRequest], *, one_block: bool) -> bool:
        """Whether all these requests can grow by what they lack, and chunks of prompts find window blocks.
        Memory moves so that they can. `one_block`: a request grows by at most one block in a step."""
        free, windows = self._pool.free, self._windows
        if windows is not None:
            if not windows.unowed:
                return False
            free = min(free, windows.grantable)
        if one_block and len(running) <= free:
            return True
        lacking = [self.lacks(live) for live in running]
        blocks, needs = sum(lacking), sum(map(self.lacks_windows, running, lacking))
        if not self.has_room(blocks, 0, needs):
            return False
        if windows is not None:
            self.provide(blocks, windows=needs)  # one after the other, they might take it from each other
        return True

    def has_room_for(self, live: LiveRequest, tokens: int) -> bool:
        """Gives a request blocks for so many tokens behind its next one, if they are spare."""
        lacking = self.blocks_for(len(live.token_ids) + tokens) - len(live.held.table)
        if lacking > 0 and not self.grow(live, lacking, self.watermark):
            return False
        if self._windows is not None and self._windows.reachable(live.held.windows) < len(live.held.table):
            return False
        self.reach(live, len(live.held.table) * self._block_size)
        return True

    def end_windows(self, live: LiveRequest, *, goes_on: bool) -> None:
        """Nothing reads the KV of a request any more, in layers with windows. `goes_on`: but later steps."""
        if self._windows is not None:
            for span in live.window_spans[goes_on:]:
                self._windows.close(span, live.held.table)
            live.shared.spans.clear()
            live.shared.passed.clear()

    def begin_range(self, live: LiveRequest, start: int) -> None:
        """Steps of a part of a prompt go on with the range that begins there."""
        if (span := live.shared.spans.pop(start, None)) is not None:
            live.shared.passed.append((live.num_computed, live.held.windows))
            live.held.windows = span

    @property
    def kept_windows(self) -> int:
        """Window blocks that an admission leaves free, as `headroom`."""
        windows = self._windows
        return 0 if windows is None or not windows.promised else max(1, windows.present // 100)

    def within_windows(self, live: LiveRequest, count: int) -> int:
        """`count` tokens, or fewer: those of the next chunk that find window blocks."""
        if self._windows is None:
            return count
        return min(count, self._windows.reachable(live.held.windows) * self._block_size - live.num_computed)

    def reach(self, live: LiveRequest, stop: int) -> None:
        """A step computes positions of a request up to this one."""
        if self._windows is not None:
            self._windows.reach(live.held.windows, live.held.table, self.blocks_for(stop))

    def landed(self, schedule: Schedule) -> None:
        """A step has landed: what its requests read no more of layers with windows is free."""
        if (windows := self._windows) is None:
            return
        for live, chunk in schedule.chunks.items():
            if live.held.table:  # a decode may compute its token again, if a draft after it is wrong
                while (passed := live.shared.passed) and passed[0][0] <= chunk.stop:
                    windows.close(passed.popleft()[1], live.held.table)
                position = chunk.stop if live in schedule.prompts else chunk.start
                windows.pass_to(live.held.windows, live.held.table, position)

    def extend(self, live: LiveRequest, num_tokens: int) -> bool:
        """Extends a reservation to so many tokens, and one more. False: no room."""
        if not self.grow(live, max(0, self.blocks_for(num_tokens + 1) - len(live.held.table))):
            return False
        if self._windows is not None:
            self._windows.pass_to(live.held.windows, live.held.table, num_tokens)
        self.reach(live, num_tokens + 1)
        return True

    @property
    def headroom(self) -> int:
        """Blocks that an admission leaves free: the watermark. None while no request holds a block, since a
        request that needs the whole pool could otherwise never run."""
        return self.watermark if self._pool.held else 0

    def has_room(
        self,
        blocks: int,
        slots: int,
        windows: int = 0,
        hits: Collection[int] = (),
        *,
        free_blocks: int | None = None,
        released: Sequence[LiveRequest] = (),
    ) -> bool:
        """Whether so many free blocks, slots for so many requests, and window blocks can be had at the same
        time, and the cached blocks `hits`. `free_blocks`: instead of what is free now. `released`: requests
        whose slots and window blocks count as free. A model without states needs no slot."""
        free_blocks = self._pool.free if free_blocks is None else free_blocks
        free_slots = free_windows = 0
        if self._states is None:
            slots = 0
        else:
            free_slots = self._states.free + len(released)
        if self._windows is None:
            windows = 0
        else:
            promised = sum(span.promised for live in released for span in live.window_spans)
            free_windows = self._windows.grantable + promised
        if blocks <= free_blocks and slots <= free_slots and windows <= free_windows:
            return True
        free = Amounts(free_blocks, free_slots, free_windows)
        return self._budget is not None and self._budget.has_room(
            Amounts(blocks, slots, windows), hits, free=free
        )

    def _amounts(self, blocks: int, slots: int, windows: int) -> Amounts:
        """Without what the model does not have."""
        return Amounts(blocks, 0 if self._states is None else slots, 0 if self._windows is None else windows)

    def is_at_once(
        self,
        blocks: int,
        slots: int,
        windows: int = 0,
        hits: Collection[int] = (),
        *,
        waits: bool = False,
    ) -> bool:
        """Whether what `has_room` is there without moves that take too long (`Budget.may_provide`)."""
        if self._budget is None:
            return True
        return self._budget.may_provide(self._amounts(blocks, slots, windows), hits, waits=waits)

    def admit(self, wants: Wants) -> Admission:
        """The one decision whether a request may have its memory. It leaves cached blocks out if the memory
        of these, or of what is behind them, must become that of others."""
        slots, windows = wants.slots, wants.windows + self.kept_windows
        for hits in (wants.hits,) if self._budget is None or not wants.hits else (wants.hits, ()):
            needs = self.need(wants.tokens, hits) + wants.kept, slots, windows, hits
            if self.has_room(*needs):
                at_once = self.is_at_once(*needs, waits=True)
                return Admission(Verdict.TAKE if at_once else Verdict.WAIT, hits)
        return REFUSED

    @property
    def moves(self) -> int:
        """It grows whenever `hits` or `admit` may answer otherwise, if there is no budget."""
        return sum([cells.moves for cells in self._cells], 0 if self._cache is None else self._cache.changes)

    # Giving and taking back

    def take(self, live: LiveRequest, num_tokens: int, hits: Sequence[int]) -> None:
        """Gives the request blocks for the tokens, and a state slot, for which `admit` has found room. The
        first blocks are `hits`."""
        held = live.held = self._pool.hold(hits=hits)
        lacking, copy = self.blocks_for(num_tokens) - len(hits), None
        if self.states is not None:
            copy = self.states.lend(live, len(hits))
        promised = {} if self._windows is None else self._begin_windows(live, num_tokens, hits)
        # Which takes no memory of these hits, nor of the copy.
        self.provide(lacking, slots=1, windows=sum(promised.values()))
        for span, count in promised.items():
            assert self._windows is not None
            self._windows.promise(span, count)
        known = self._adopt(live, hits)
        if self.states is not None:
            self.states.take(live, copy, self._branch(live, len(hits)))
        self._pool.extend(held, len(hits) + lacking - len(held.table))
        live.num_cached = known
        if self._windows is not None:
            self._reach_windows(live)
        if self._cache is not None and live.shared is not WHOLE:
            live.thin = [*self._thin_of_part(live, self._cache)]
        live.num_verified = 0
        live.num_published = len(hits)
        if self._cache is not None:
            self._cache.used(self._cache.names_of(live).blocks[: len(hits)])
            self._cache.queries += len(live.token_ids)
            self._cache.hits += live.num_cached

    def _next(self, live: LiveRequest, cached: int) -> int:
        """The position that a step computes first. What is read before it, and not `cached`, comes from other
        workers."""
        if live.phase is Phase.RESERVED:
            return len(live.token_ids)
        return max(cached, next((each.start for each in live.shared.ranges if each.stop > cached), 0))

    def _begin_windows(
        self, live: LiveRequest, num_tokens: int, hits: Sequence[int]
    ) -> dict[WindowSpan, int]:
        """Keeps what the request reads of these cached blocks in layers with windows. Returns what each span
        is to be promised."""
        windows, cached = self._windows, len(hits) * self._block_size
        assert windows is not None, "layers with windows have blocks of their own"
        most = windows.need(self.blocks_for(num_tokens))
        promised, spans = {live.held.windows: most}, {self._next(live, cached): live.held.windows}
        for position, count in self._kept_at(live.shared, cached, most, windows).items():
            spans[position] = live.shared.spans[position] = WindowSpan()
            promised[spans[position]] = count
        for position, span in spans.items():
            stop = min(len(hits), self.blocks_for(position))
            windows.begin(span, hits, windows.first(position), stop)
        return promised

    def _reach_windows(self, live: LiveRequest) -> None:
        """Gives the request window blocks for what it begins with, and for what comes."""
        windows, cached, held = self._windows, live.num_cached, live.held
        assert windows is not None, "layers with windows have blocks of their own"
        position = self._next(live, cached)
        windows.leave(held.windows, held.table, windows.first(position))
        stop = len(held.table) if live.phase is Phase.RESERVED else self.blocks_for(position)
        windows.reach(held.windows, held.table, stop)
        for position, span in live.shared.spans.items():
            windows.reach(span, held.table, min(len(held.table), self.blocks_for(position)))

    def _thin_of_part(self, live: LiveRequest, cache: PrefixCache) -> Iterator[range]:
        """The blocks of a part of a prompt of which other workers send only what its ranges read."""
        end = live.num_cached
        for each in live.shared.ranges:
            if each.start > end:
                yield range(end // self._block_size, cache.thin_before(each.start))
            end = max(end, each.stop)

    def provide(self, blocks: int, slots: int = 0, windows: int = 0) -> None:
        """So many blocks, slots and window blocks are free then. There is room for them. The memory of what
        nothing holds may become theirs."""
        if self._budget is not None:
            self._budget.provide(self._amounts(blocks, slots, windows))

    def _branch(self, live: LiveRequest, hits: int) -> int:
        """As in `Wanted`: the end of what any tier has of the request, past the `hits`."""
        if self._cache is None or live.phase is Phase.RESERVED:
            return 0
        known = self._cache.known(self.usable(live, self._cache))
        return known * self._block_size if known > hits else 0

    def _adopt(self, live: LiveRequest, hits: Sequence[int]) -> int:
        """The positions that are cached. The request adopts a remnant with the last ones of them, if there is
        one behind the cached blocks. A reservation needs none: its KV comes from another worker."""
        if self._cache is None or self.states is not None or live.phase is Phase.RESERVED:
            return len(hits) * self._block_size
        names, limit = self._cache.names_of(live), self._usable_tokens(live)
        end, name = self._cache.remnant(names, live.token_ids, len(hits), limit)
        if name is not None:
            live.held.table.append(self._pool.adopt(name))
        return end

    def _remnant(self, live: LiveRequest) -> tuple[int, bytes] | None:
        """The block of a request that full chunks end in, if it is not full, and the name of these chunks."""
        end = live.num_verified // CHUNK_TOKENS * CHUNK_TOKENS
        if self._cache is None or self.states is not None or live.private or not end % self._block_size:
            return None
        index = end // self._block_size
        if index != live.num_verified // self._block_size or any(index in each for each in live.thin):
            return None  # no chunk ends in the last block, or the block is thin
        if not self._pool.has_window(live.held.table[index]):
            return None
        return live.held.table[index], self._cache.names_of(live).of_chunk(live.token_ids, end)

    def publish(self, live: LiveRequest, computed: int) -> None:
        """Offers full blocks among the first `computed` positions to the prefix cache. The logits computed
        from their KV were finite, so other requests may share it."""
        live.num_verified = computed
        if live.private:
            return
        full = computed // self._block_size
        if self._cache is not None and full > live.num_published:
            names = self._cache.names_of(live)
            self._cache.publish(names, live.held.table, live.num_published, full, thin=live.thin)
            live.num_published = full
        if self.states is not None:
            self.states.publish(live, computed)

    def make_private(self, live: LiveRequest) -> None:
        """The weights change, and the request goes on with the KV that it has. Blocks that have names keep
        these, which are of the weights before. No other one gets a name, and nor do copies of its states. No
        step is under way."""
        live.private = True
        if self.states is not None:
            self.states.forget_copies(live)

    def came(self, live: LiveRequest) -> None:
        """The KV of all its tokens came from another worker, behind its cached blocks."""
        if self._cache is not None:
            live.thin = [range(self._cache.thin_before(len(live.token_ids)))]

    def free(self, live: LiveRequest) -> None:
        if self.states is not None:
            self.states.free(live)
        remnant = self._remnant(live)
        self.end_windows(live, goes_on=True)
        # The other worker has thin blocks before this one: these are whole here only.
        first_whole = 0 if self._cache is None else self._cache.thin_before(live.num_verified)
        self._pool.release(live.held, remnant, copied=live.handed_over, first_copied=first_whole)
        if remnant is not None and self._cache is not None:
            end = live.num_verified // CHUNK_TOKENS * CHUNK_TOKENS
            self._cache.remnant_kept(self._cache.names_of(live), end)
        live.num_verified, live.thin, live.held = 0, (), Held()

    def usable(self, live: LiveRequest, cache: PrefixCache) -> list[bytes]:
        """The names of the blocks of a request that may come from the prefix cache."""
        return cache.names_of(live).blocks[: self._usable_tokens(live) // self._block_size]

    def _usable_tokens(self, live: LiveRequest) -> int:
        """How many positions of a request may come from the prefix cache. A prefill always computes the
        positions whose logits it needs: the last one, and those for log probabilities of the prompt."""
        if live.phase is Phase.RESERVED:
            return len(live.token_ids)
        return live.num_scored if live.num_scored < live.asked.scores_to else len(live.token_ids) - 1
