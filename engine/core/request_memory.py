"""What requests hold: blocks of KV, and a state slot if the model has state layers. Pure."""

from array import array
from collections.abc import Callable, Sequence

from engine.core.block_pool import BlockPool
from engine.core.live_request import LiveRequest, Phase
from engine.core.prefix_cache import PrefixCache
from engine.core.prefix_names import PrefixNames
from engine.core.state_pool import StatePool


class RequestMemory:
    """Gives and takes back what a request holds. Its first blocks may come from the prefix cache."""

    def __init__(
        self, pool: BlockPool, states: StatePool | None, cache: PrefixCache | None, block_size: int
    ) -> None:
        """`states`: of a model with state layers. `cache`: None if there is no prefix cache."""
        self._pool = pool
        self._states = states
        self._cache = cache
        self._block_size = block_size
        self.watermark = max(1, pool.num_blocks // 100)
        """Blocks that an admission leaves free, so that running requests can grow."""

    # How much

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def need(self, num_tokens: int, hits: Sequence[int]) -> int:
        """Free blocks that `take` takes."""
        return self.blocks_for(num_tokens) - len(hits) + self._pool.unreferenced(hits)

    def known(self, live: LiveRequest) -> int:
        """Blocks that the pool or the host tier has of the beginning of a request."""
        if self._cache is None:
            return 0
        return self._cache.known(self._names(live, self._cache).blocks[: self._usable(live)])

    def hits(self, live: LiveRequest) -> list[int]:
        """Cached blocks of the pool that the request begins with."""
        if self._cache is None:
            return []
        return self._pool.lookup(self._names(live, self._cache).blocks[: self._usable(live)])

    def grows(self, live: LiveRequest) -> bool:
        """Whether the request needs one more block for its next token."""
        return len(live.blocks) * self._block_size <= live.num_computed and not live.ends_with_pending

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
        own = self._pool.allocate(self.blocks_for(num_tokens) - len(hits))
        live.blocks = array("i", [*hits, *own])
        if self._states is not None:
            live.state_slot = self._states.allocate()
        live.num_cached = len(hits) * self._block_size
        live.num_published = len(hits)
        if self._cache is not None:
            self._cache.used(self._names(live, self._cache).blocks[: len(hits)])
            self._cache.queries += len(live.token_ids)
            self._cache.hits += live.num_cached

    def load(self, live: LiveRequest, ended: Callable[[bool], None]) -> bool:
        """Loads what the host tier has of a request, behind the blocks that it took from the cache. False:
        nothing, or computing it takes less time.

        `ended` is called when nothing writes to the blocks any more. True: the request has the KV, unless it
        was dropped. False: a block was damaged, which the tier has forgotten."""
        cache = self._cache
        if cache is None or cache.host_tier is None:
            return False
        tier, names = cache.host_tier, self._names(live, cache)
        usable = names.blocks[: self._usable(live)]
        first, stop = live.num_published, cache.known(usable)
        if not tier.pays(sum(name in tier for name in usable[first:stop])):
            return False
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

        tier.load(wanted, landed)
        return True

    def publish(self, live: LiveRequest, computed: int) -> None:
        """Offers full blocks among the first `computed` positions to the prefix cache."""
        full = computed // self._block_size
        if self._cache is not None and full > live.num_published:
            self._cache.publish(self._names(live, self._cache), live.blocks, live.num_published, full)
            live.num_published = full

    def free(self, live: LiveRequest) -> None:
        if self._states is not None and live.blocks:
            self._states.release(live.state_slot)
        self._pool.release(live.blocks)
        del live.blocks[:]

    def _usable(self, live: LiveRequest) -> int:
        """How many blocks of a request may come from the prefix cache. A prefill always computes the
        positions whose logits it needs: the last one, and those for log probabilities of the prompt."""
        usable = len(live.token_ids)
        if live.phase is not Phase.RESERVED:
            usable = live.num_scored if live.num_scored < live.scores_to else usable - 1
        return usable // self._block_size

    def _names(self, live: LiveRequest, cache: PrefixCache) -> PrefixNames:
        """The names of all full blocks with known tokens."""
        if live.names is None:
            live.names = cache.names(live.request)
        live.names.extend(live.token_ids, live.num_known)
        return live.names
