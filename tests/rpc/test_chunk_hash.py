"""The routing hash: its values never change, it is chained, and it ignores an incomplete last chunk."""

from hypothesis import given
from hypothesis import strategies as st

from rpc import CHUNK_TOKENS, chunk_hashes

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4 * CHUNK_TOKENS)


def test_the_value_never_changes():
    """The numbers are part of the protocol: routers and workers of different releases compare them."""
    assert chunk_hashes(range(130)) == [7183429981580064968, 1588078885320569853]
    assert chunk_hashes(range(64), salt=b"tenant") == [18298575443781725775]


def test_only_full_chunks_count():
    assert chunk_hashes([]) == []
    assert chunk_hashes([1] * (CHUNK_TOKENS - 1)) == []
    assert len(chunk_hashes([1] * CHUNK_TOKENS)) == 1


@given(tokens, tokens)
def test_equal_hashes_mean_equal_prefixes(left, right):
    a, b = chunk_hashes(left), chunk_hashes(right)
    for i, (x, y) in enumerate(zip(a, b, strict=False), start=1):
        assert (x == y) == (left[: i * CHUNK_TOKENS] == right[: i * CHUNK_TOKENS])


@given(tokens, tokens)
def test_a_longer_sequence_keeps_the_hashes_of_its_prefix(left, right):
    assert chunk_hashes(left + right)[: len(left) // CHUNK_TOKENS] == chunk_hashes(left)
