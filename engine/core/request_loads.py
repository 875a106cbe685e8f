"""Loads of requests from the tiers below the device: what pays, and where it goes. Pure."""

from collections.abc import Callable, Sequence

from baton.engine.core.block_pool import BlockPool
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.prefix_names import PrefixNames
from baton.engine.core.request_memory import RequestMemory


class RequestLoads:
    """Fills blocks that a request has taken with what the tiers of the prefix cache have."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, memory: RequestMemory) -> None:
        self._pool = pool
        self._cache = cache
        self._memory = memory
        self._windows = pool.windows
        self._block_size = pool.block_size

    def load(self, live: LiveRequest, ended: Callable[[bool], None]) -> bool:
        """Loads what the tiers have of a request, behind the blocks that it took from the cache. False:
        nothing, or computing it takes less time.

        `ended` is called when nothing writes to the blocks any more. True: the request has the KV, unless it
        was dropped. False: a block was damaged, which the tier has forgotten."""
        cache = self._cache
        if not cache.offload:
            return False
        names, usable = cache.names_of(live), self._memory.usable(live, cache)
        first = live.num_published
        begin = cache.usable(usable[:first], on_device=True, loads=False)
        stop = self._loadable(live, usable)
        if stop == begin:
            return False
        states = None
        if (of_requests := self._memory.states) is not None:
            name, slot = usable[stop - 1], None
            if (tier := cache.states_tier_of(name)) is None:
                of_requests.begin_with(live, name)
            elif tier.pays(1, self._seconds(live, begin, stop)):
                slot = of_requests.allocate_copy()
            if tier is not None and slot is None:
                self._begin_at(live, names, begin)
                return False
            states = None if slot is None else (name, slot)
        cache.used(usable[first:stop])
        wanted = self._wanted(live, usable[:stop], first)

        def landed(intact: bool) -> None:
            has_kv = intact and live.phase is not Phase.GONE
            if has_kv:
                cache.hits += (stop - first) * self._block_size
                live.num_published, live.num_cached = stop, stop * self._block_size
                if of_requests is not None and states is not None:
                    of_requests.begin_with(live, states[0])
            ended(intact)

        cache.load(wanted, landed, states)
        return True

    def _has(self, names: Sequence[bytes], index: int, stop: int) -> int | None:
        """The block of the pool with this index, as a request reads it that begins behind `stop` blocks.
        None: it must be loaded."""
        if (cached := self._pool.find(names[index])) is None:
            return None
        windows = self._windows
        is_read = windows is not None and index >= windows.first(stop * self._block_size)
        return None if is_read and not self._pool.has_window(cached) else cached

    def _wanted(self, live: LiveRequest, names: Sequence[bytes], first: int) -> list[tuple[bytes, int]]:
        """What a request must load to begin behind the blocks with these names, of which it has `first`."""
        if (windows := self._windows) is not None:
            windows.leave(live.held.windows, live.blocks, live.held.windows.stop)
        wanted: list[tuple[bytes, int]] = []
        for index in range(first, len(names)):
            # The pool may have blocks again behind those that it lacks.
            if (cached := self._has(names, index, len(names))) is not None:
                self._pool.end(live.blocks[index])
                self._pool.share([cached])
                live.blocks[index] = cached
            else:
                wanted.append((names[index], live.blocks[index]))
        if windows is not None:
            begin = windows.first(len(names) * self._block_size)
            windows.begin(live.held.windows, live.blocks, begin, len(names))
        return wanted

    def _loadable(self, live: LiveRequest, usable: Sequence[bytes]) -> int:
        """How many blocks the request begins with, once what pays of its blocks is loaded."""
        cache = self._cache
        first, stop = live.num_published, cache.usable(usable[: cache.known(usable)])
        tiers = [
            cache.tier_of(name) if self._has(usable, index, stop) is None else None
            for index, name in enumerate(usable[first:stop], first)
        ]
        for tier in dict.fromkeys(filter(None, tiers)):
            start, count = first + tiers.index(tier), tiers.count(tier)
            if not tier.pays(count, self._seconds(live, start, start + count)):
                stop = min(stop, start)
        return cache.usable(usable[:stop])

    def _seconds(self, live: LiveRequest, start: int, stop: int) -> float:
        """Seconds by which the prompt is computed sooner with the blocks from `start` to `stop`."""
        size = self._block_size
        return self._cache.prompt_seconds(
            (stop - start) * size, len(live.token_ids) - stop * size, start * size
        )

    def _begin_at(self, live: LiveRequest, names: PrefixNames, begin: int) -> None:
        """The request gives back cached blocks from this one on: it has no states after them. There is room,
        since `need` did not count them."""
        states = self._memory.states
        assert states is not None, "the model has states"
        stop = live.num_published
        behind = live.blocks[stop:]
        self._pool.end(*reversed(live.blocks[begin:stop]))
        self._memory.provide(stop - begin)
        del live.blocks[begin:]
        self._pool.extend(live.held, stop - begin)
        live.blocks.extend(behind)
        self._cache.hits -= (stop - begin) * self._block_size
        live.num_published, live.num_cached = begin, begin * self._block_size
        if begin:
            states.begin_with(live, names.blocks[begin - 1])
