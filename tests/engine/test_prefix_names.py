"""The names of a request's blocks: independent of the block size, and no token is hashed twice."""

import random

import pytest

from baton.engine.core.prefix_names import PrefixNames
from baton.kv_names import CHUNK_TOKENS, extend_names, salted

TOKENS = random.Random(0).choices(range(50000), k=1000)


class Read(list[int]):
    """Counts how often each token is read in a slice."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.times = [0] * len(tokens)

    def __getitem__(self, key):
        for position in range(len(self))[key]:
            self.times[position] += 1
        return super().__getitem__(key)


def named(block_size: int, tokens: list[int], step: int = 1000) -> PrefixNames:
    names = PrefixNames(b"root", b"salt", block_size)
    for count in range(step, len(tokens) + step, step):
        names.extend(tokens, min(count, len(tokens)))
    return names


@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 96, 128])
def test_a_block_has_the_name_of_the_prefix_that_it_ends(block_size):
    one = named(1, TOKENS)
    names = named(block_size, TOKENS, step=7)
    assert len(names.blocks) == len(TOKENS) // block_size
    assert names.blocks == one.blocks[block_size - 1 :: block_size]
    assert len({*one.blocks}) == len(TOKENS)
    chunks: list[bytes] = []
    extend_names(chunks, TOKENS, len(TOKENS), salted(b"root", b"salt"))
    ends = [name for block in names.cached(range(len(names.blocks))) for name in block.chunks]
    assert ends == chunks[: len(names.blocks) * block_size // CHUNK_TOKENS]


@pytest.mark.parametrize("block_size", [64, 128])
def test_a_request_that_grows_token_by_token_hashes_each_token_once(block_size):
    tokens = Read(TOKENS)
    named(block_size, tokens, step=1)
    assert {*tokens.times} == {0, 1}
