"""The chunks that routers see as cached, compared with the blocks that the engine finds in its cache."""

import random

import pytest

from baton.engine.api.request import EngineRequest, Hooks
from baton.kv_names import CHUNK_TOKENS, Tier, prompt_hints
from baton.worker.engine_process.cached_chunks import CachedChunks
from tests.engine.scheduling import ROOT, make


def hints(prompt: list[int], salt: bytes = b"") -> list[int]:
    """The chunks of a prompt, as routers know them."""
    return prompt_hints(prompt, ROOT, salt)


class Worker:
    """The scheduler of a prefill engine without a model, and a router that gets all its cache events."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.observer = CachedChunks()
        self.scheduler = make(
            num_blocks,
            8,
            4096,
            prefix_cache=True,
            block_size=block_size,
            hooks=Hooks(cache_changed=lambda change: self.observer.read([change])),
        )
        self.known: set[int] = set()
        self._ids = iter(range(1 << 30))

    def prefill(self, *prompts: list[int], salt: bytes = b"") -> list[int]:
        """Prefills all prompts at the same time. Returns the number of cached tokens of each."""
        lives = []
        for prompt in prompts:
            request = EngineRequest(next(self._ids).to_bytes(4), prompt, cache_salt=salt)
            lives.append(self.scheduler.lives.add(request, handover=True))
        while any(live.num_left for live in lives):
            schedule = self.scheduler.schedule()
            self.scheduler.launched(schedule)
            schedule.end_leases()
            for live, positions in schedule.chunks.items():
                if live.num_left == 0:
                    self.scheduler.lives.memory.publish(live, positions.stop)
        for live in lives:
            self.scheduler.lives.hold(live)
            self.scheduler.lives.drop(live)
        self.receive_changes()
        return [live.num_cached for live in lives]

    def receive_changes(self) -> None:
        assert self.scheduler.lives.cache is not None
        self.scheduler.lives.cache.settle()
        if (changed := self.observer.take()) is not None:
            assert {*changed.tiers.values()} <= {Tier.DEVICE, None}
            self.known |= changed.tiers.keys()
            self.known -= {chunk for chunk, tier in changed.tiers.items() if tier is None}

    def estimate(self, prompt: list[int]) -> int:
        """Returns the number of leading chunks of `prompt` that the router sees as cached."""
        found = [chunk in self.known for chunk in hints(prompt)]
        return (*found, False).index(False)


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


@pytest.mark.parametrize(
    ("block_size", "prompt", "chunks"),
    [
        (16, 63, 0),
        (16, 64, 1),
        (16, 130, 2),
        (64, 127, 1),
        (64, 128, 2),
        (128, 127, 0),
        (128, 128, 2),
        (128, 200, 2),  # the third ends in a block that is not full
        (128, 256, 4),
        (48, 63, 0),
        (48, 96, 1),
    ],
)
def test_a_chunk_counts_while_the_full_block_with_its_last_token_is_cached(block_size, prompt, chunks):
    worker = Worker(block_size, 64)
    worker.prefill(text(prompt))
    assert worker.known == {*hints(text(prompt))[:chunks]}


def test_a_chunk_that_two_different_blocks_share_stays_until_both_are_evicted():
    worker = Worker(128, 3)
    one, other = [text(64) + text(64, seed) for seed in (1, 2)]
    worker.prefill(one)
    worker.prefill(other)
    assert len(worker.known) == 3
    worker.prefill(text(2 * 128, 3))  # evicts one of the two
    assert hints(one)[0] in worker.known
    worker.prefill(text(3 * 128, 4))
    assert hints(one)[0] not in worker.known


def test_chunks_with_different_salts_differ():
    worker = Worker(16, 64)
    for salt in (b"", b"a", b"b"):
        assert worker.prefill(text(200), salt=salt) == [0]
        assert worker.known >= {*hints(text(200), salt)}
    assert len(worker.known) == 9


@pytest.mark.cases(1)
@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
def test_the_estimate_of_a_router_matches_the_tokens_that_the_engine_finds(block_size: int):
    """Conversations grow and branch, one prefill after the other, in a pool that is far too small."""
    rng = random.Random(block_size)
    worker = Worker(block_size, 4096 // block_size)
    conversations = [text(rng.randrange(20, 400), seed) for seed in range(6)]
    hits = 0
    for step in range(400):
        prompt = rng.choice(conversations)
        if len(prompt) > 1500 or rng.random() < 0.1:
            prompt = prompt[: rng.randrange(1, len(prompt))]
        prompt = [*prompt, *text(rng.randrange(1, 200), 1000 + step)]
        conversations[rng.randrange(6)] = prompt
        estimate = worker.estimate(prompt) * CHUNK_TOKENS
        [cached] = worker.prefill(prompt)
        hits += cached > 0
        # The estimate of a router (`ChunkIndex.overlap`), rounded to the blocks of this worker.
        usable = min(estimate, len(prompt) - 1) // block_size * block_size
        in_full_blocks = cached // block_size * block_size  # routers do not see a remnant
        assert usable <= in_full_blocks < usable + max(CHUNK_TOKENS, block_size)
        if block_size % CHUNK_TOKENS == 0:
            assert in_full_blocks == usable
            assert cached % CHUNK_TOKENS == 0
    assert hits > 100


def test_after_every_block_is_evicted_no_chunk_counts_as_cached():
    """This includes prefixes that were computed at the same time, of which only one block was published."""
    rng = random.Random(1)
    worker = Worker(16, 200)
    for _ in range(60):
        shared = text(rng.randrange(1, 300), rng.randrange(5))
        worker.prefill(*([*shared, *text(rng.randrange(1, 100), rng.randrange(9))] for _ in range(3)))
    assert worker.known
    pool = worker.scheduler.lives.pool
    pool.release(pool.hold(pool.num_blocks))
    worker.receive_changes()
    assert not worker.known
