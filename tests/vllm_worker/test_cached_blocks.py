"""vLLM's events about its prefix cache, as routers hear of them."""

import random
from typing import Any

import msgspec
import pytest

from baton.kv_names import ImageSpan, Tier, extend_names, prompt_hints, salted, with_adapter
from baton.kv_names.cache_kinds import Window
from baton.vllm_worker.cached_blocks import CachedBlocks, identifier, with_numbers
from baton.vllm_worker.metadata import BlockTable

ROOT = b"r" * 32


class Cache:
    """vLLM's side. A block is named by a number."""

    def __init__(self, block_size: int, *tables: BlockTable) -> None:
        self._size = block_size
        self._blocks = CachedBlocks(ROOT, 1, tables)

    def _publish(self, **event: Any) -> dict[int, Tier | None]:
        batch = msgspec.msgpack.encode([0.0, [event], None])
        changed = self._blocks.changed(batch)
        return {} if changed is None else changed.tiers

    def store(
        self, hashes: list[int], parent: int | None, tokens: list[int], **more: Any
    ) -> dict[int, Tier | None]:
        return self._publish(
            type="BlockStored", block_hashes=hashes, parent_block_hash=parent, token_ids=tokens,
            block_size=self._size, **more,
        )  # fmt: skip

    @property
    def blocks_of(self) -> Any:
        return self._blocks.blocks_of

    def remove(self, *hashes: int, **more: Any) -> dict[int, Tier | None]:
        return self._publish(type="BlockRemoved", block_hashes=hashes, **more)

    def clear(self) -> dict[int, Tier | None]:
        return self._publish(type="AllBlocksCleared")


PROMPT = list(range(1000, 1256))
HINTS = prompt_hints(PROMPT, ROOT, b"")
CACHED, GONE = Tier.DEVICE, None


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_chunks_come_with_the_block_in_which_they_end(size: int) -> None:
    """Each block is an event, as in decoding."""
    cache, seen = Cache(size), dict[int, Tier | None]()
    for i in range(256 // size):
        tokens = PROMPT[i * size : (i + 1) * size]
        seen |= cache.store([i], i - 1 if i else None, tokens)
        assert list(seen) == HINTS[: (i + 1) * size // 64]
    assert set(seen.values()) == {CACHED}
    last = 256 // size - 1
    assert set(cache.remove(last)) == set(HINTS[-max(1, size // 64) :])


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_blocks_are_found_by_their_chunks(size: int) -> None:
    cache, names = Cache(size), list[bytes]()
    extend_names(names, PROMPT, 256, salted(ROOT, b""))
    blocks = list(range(1, 1 + 256 // size))
    half = len(blocks) // 2
    cache.store(blocks[:half], None, PROMPT[:128])
    cache.store(blocks[half:], blocks[half - 1], PROMPT[128:])
    assert cache.blocks_of(names, 0) == blocks
    assert cache.blocks_of([*names[:3], bytes(16)], 0) == blocks[: -(-192 // size)], "up to what it lacks"
    assert cache.blocks_of(names[1:], 1) == blocks[64 // size :]
    assert cache.blocks_of(names[1:], 1 << 40) == [], "a peer may be wrong about the position"
    assert cache.blocks_of([bytes(16)], 0) == []
    cache.remove(blocks[0])
    assert cache.blocks_of(names, 0) == [], "its beginning was evicted"
    cache.remove(*blocks[1:])
    assert cache.blocks_of(names[2:], 2) == []


@pytest.mark.parametrize("parent", [None, bytes(24) + (7).to_bytes(8)])
def test_subscribers_see_hashes_as_numbers(parent: bytes | None) -> None:
    stored = {"type": "BlockStored", "block_hashes": [bytes(range(32))], "parent_block_hash": parent}
    batch = [1.5, [stored, {"type": "AllBlocksCleared"}], 0]
    seen = msgspec.msgpack.decode(with_numbers(msgspec.msgpack.encode(batch)))
    told = {"block_hashes": [int.from_bytes(range(24, 32))], "parent_block_hash": parent and 7}
    assert seen == [1.5, [stored | told, {"type": "AllBlocksCleared"}], 0]


def test_all_blocks_of_a_prompt_in_one_event_and_a_continuation() -> None:
    cache = Cache(32)
    assert cache.store([1, 2, 3], None, PROMPT[:96]) == {HINTS[0]: CACHED}
    assert cache.store([4], 3, PROMPT[96:128]) == {HINTS[1]: CACHED}
    other = [*PROMPT[:96], *range(32)]
    assert cache.store([5], 3, other[96:]) == {prompt_hints(other, ROOT, b"")[1]: CACHED}
    assert cache.remove(4, 3) == {HINTS[1]: GONE}
    assert cache.store([6, 7], 3, PROMPT[96:160]) == {}, "its beginning was evicted"
    assert set(cache.clear()) == {HINTS[0], prompt_hints(other, ROOT, b"")[1]}


def test_only_blocks_of_one_group_count() -> None:
    """vLLM 0.32 publishes states so: the last block has a hash, and all of them have tokens."""
    cache = Cache(64)
    assert cache.store([2], None, PROMPT[:128], group_idx=0) == {}
    assert list(cache.store([1, 2], None, PROMPT[:128], group_idx=1)) == HINTS[:2]
    assert cache.remove(2, group_idx=0) == {}
    assert cache.remove(2, group_idx=1) == {HINTS[1]: GONE}


WINDOW = BlockTable(64, window=Window(66, tile=1))
"""A token reads the two blocks before it."""
STATES = BlockTable(64, states=True)


def test_blocks_count_up_to_the_last_one_behind_which_windows_and_states_are_cached() -> None:
    cache = Cache(64, WINDOW, BlockTable(64), STATES)
    assert cache.store([1, 2, 3, 4], None, PROMPT, group_idx=1) == {}
    assert cache.store([2, 3], 1, PROMPT[:192], group_idx=0) == {}, "without states"
    assert list(cache.store([2], 1, PROMPT[:128], group_idx=2)) == [], "without its first window"
    assert set(cache.store([3], 2, PROMPT[:192], group_idx=2)) == set(HINTS[:3])
    assert cache.store([4], 3, PROMPT[192:], group_idx=2) == {}, "without its window"
    assert cache.store([4], 3, PROMPT[192:], group_idx=0) == {HINTS[3]: CACHED}
    assert cache.remove(3, group_idx=2) == {}, "what follows is usable"
    assert cache.remove(4, group_idx=0) == dict.fromkeys(HINTS[:4], GONE)
    assert set(cache.store([4], 3, PROMPT[192:], group_idx=0)) == set(HINTS[:4])
    assert cache.remove(4, group_idx=1) == dict.fromkeys(HINTS[:4], GONE)


def test_a_prompt_shorter_than_the_window_has_it_from_its_first_block_on() -> None:
    cache = Cache(64, WINDOW, BlockTable(64))
    cache.store([1], None, PROMPT[:64], group_idx=1)
    assert cache.store([1], None, PROMPT[:64], group_idx=0) == {HINTS[0]: CACHED}


def test_copies_of_a_state_are_counted() -> None:
    cache = Cache(64, STATES, BlockTable(64))
    for _ in range(2):
        cache.store([1], None, PROMPT[:64], group_idx=1)
        cache.store([1], None, PROMPT[:64], group_idx=0)
    assert cache.remove(1, group_idx=0) == {}
    assert cache.remove(1, group_idx=0) == {HINTS[0]: GONE}
    cache.store([1], None, PROMPT[:64], group_idx=0)
    assert cache.clear() == {HINTS[0]: GONE}
    assert cache.store([1], None, PROMPT[:64], group_idx=1) == {}, "its state is gone, too"


def test_what_was_stored_before_a_clear_in_the_same_step_is_gone() -> None:
    blocks = CachedBlocks(ROOT, 0, (BlockTable(64), STATES))
    full: dict[str, Any] = {"type": "BlockStored", "group_idx": 0, "block_hashes": [1], "block_size": 64}
    full |= {"token_ids": PROMPT[:64], "parent_block_hash": None}
    state = full | {"group_idx": 1}
    batches = [full, state, {"type": "AllBlocksCleared"}], [full, state], [state | {"type": "BlockRemoved"}]
    changes = [blocks.changed(msgspec.msgpack.encode([0.0, batch, None])) for batch in batches]
    assert [each and each.tiers for each in changes] == [{HINTS[0]: tier} for tier in (GONE, CACHED, GONE)]


@pytest.mark.parametrize("seed", range(20))
def test_what_counts_is_what_leads_to_a_usable_block(seed: int) -> None:
    """Blocks of a tree come and go in any order."""
    rng, shown = random.Random(seed), dict[int, bool]()
    tables = STATES, BlockTable(64)
    blocks = CachedBlocks(ROOT, 1, tables)
    parents = {i: rng.choice([None, *range(i)]) for i in range(12)}
    tokens = {i: [i * 64 + j for j in range(64)] for i in parents}
    names: dict[int, int] = {}
    for i in parents:
        path, at = list[int](), i
        while at is not None:
            path, at = [*tokens[at], *path], parents[at]
        names[prompt_hints(path, ROOT, b"")[-1]] = i
    full, states = set[int](), set[int]()
    for _ in range(200):
        i, group = rng.randrange(12), rng.randrange(2)
        kept = full if group else states
        known = parents[i] is None or parents[i] in full
        event: dict[str, Any] = {"group_idx": group, "block_hashes": [i]}
        if i in kept:
            kept.remove(i)
            event |= {"type": "BlockRemoved"}
        elif known and (group or i in full):
            kept.add(i)
            event |= {"type": "BlockStored", "token_ids": tokens[i], "block_size": 64}
            event |= {"parent_block_hash": parents[i]}
        else:
            continue
        changed = blocks.changed(msgspec.msgpack.encode([0.0, [event], None]))
        for name, tier in ({} if changed is None else changed.tiers).items():
            shown[names[name]] = tier is not None
        children = {each: [x for x in full if parents[x] == each] for each in full}

        def counts(each: int, children: dict[int, list[int]] = children) -> bool:
            return each in states or any(counts(child) for child in children[each])

        assert {each for each, is_there in shown.items() if is_there} == {x for x in full if counts(x)}


def test_blocks_behind_a_window_have_no_hash() -> None:
    cache = Cache(64)
    assert cache.store([3], None, PROMPT[:192], group_idx=1, extra_keys=[None]) == {}
    assert cache.store([], None, PROMPT[:64], group_idx=1, extra_keys=[]) == {}
    assert cache.store([4], 3, PROMPT[192:], group_idx=1) == {}


def test_a_block_that_several_requests_computed_is_cached_until_all_copies_are_gone() -> None:
    """vLLM says BlockStored and BlockRemoved of each copy, all with one hash (vLLM 0.26 to 0.32,
    `BlockPool.cache_full_blocks` and `_maybe_evict_cached_block`)."""
    cache = Cache(64)
    stored = [cache.store([1], None, PROMPT[:64]) for _ in range(3)]
    assert stored == [{HINTS[0]: CACHED}, {}, {}]
    assert cache.remove(1) == cache.remove(1) == {}, "another one is cached"
    assert cache.store([2], 1, PROMPT[64:128]) == {HINTS[1]: CACHED}, "what follows is known"
    assert cache.remove(2, 1) == {HINTS[1]: GONE, HINTS[0]: GONE}
    assert cache.remove(1) == {}
    for _ in range(2):
        cache.store([1], None, PROMPT[:64])
    assert cache.clear() == {HINTS[0]: GONE}, "all copies"
    cache.store([1], None, PROMPT[:64])
    assert cache.remove(1) == {HINTS[0]: GONE}


def test_prompts_of_another_salt_have_other_names() -> None:
    cache = Cache(64)
    salted = prompt_hints(PROMPT, ROOT, b"salt")
    found = cache.store([1, 2], None, PROMPT[:128], extra_keys=[[b"salt".hex()], None])
    assert list(found) == salted[:2]
    salt = with_adapter(b"salt", b"a" * 16)
    keys = [["name of the adapter", salt.hex()], ["name of the adapter"]]
    found = cache.store([3, 4], None, PROMPT[:128], extra_keys=keys)
    assert list(found) == prompt_hints(PROMPT, ROOT, salt)[:2]


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("adapter", ["", "adapter:"])
def test_images_name_the_chunks_that_they_are_in(size: int, adapter: str) -> None:
    """One within a block, one that begins and ends in a block of others, and one in two chunks."""
    spans = [
        ImageSpan(start, stop, bytes([i]) * 32)
        for i, (start, stop) in enumerate([(3, 9), (20, 55), (60, 140)])
    ]
    salt = "ab" * 16
    keys: list[list[Any] | None] = []
    for begin in range(0, len(PROMPT), size):
        within = [x for x in spans if x.start < begin + size and x.stop > begin]
        named: list[Any] = [
            *(["lora"] if adapter else []),
            *((adapter + identifier(x), x.start - begin) for x in within),
        ]
        keys.append([*named, *([salt] if not begin else [])] or None)
    expected = prompt_hints(PROMPT, ROOT, bytes.fromhex(salt), spans)
    assert not {*expected} & {*prompt_hints(PROMPT, ROOT, bytes.fromhex(salt))}
    at_once, one_by_one = Cache(size), Cache(size)
    blocks = list(range(len(keys)))
    assert list(at_once.store(blocks, None, PROMPT, extra_keys=keys)) == expected
    found: list[int] = []
    for i, key in enumerate(keys):
        tokens = PROMPT[i * size : (i + 1) * size]
        found += one_by_one.store([i], i - 1 if i else None, tokens, extra_keys=[key])
    assert found == expected


def test_an_image_without_a_salt() -> None:
    cache, span = Cache(64), ImageSpan(3, 9, bytes(32))
    keys = [[(identifier(span), 3)]]
    assert cache.store([1], None, PROMPT[:64], extra_keys=keys) == {
        prompt_hints(PROMPT[:64], ROOT, b"", [span])[0]: CACHED
    }
