"""What `bench.survive` says of streams around kills."""

import math

from baton.bench.lab.harness.streams import Case, Stream
from baton.bench.lab.survive import longest


def test_a_pause_is_the_longest_gap_until_the_next_kill() -> None:
    """Tokens that were on the way come after a kill."""
    one, other = Stream(Case("", 9, 0.0, 1)), Stream(Case("", 9, 0.0, 2))
    one.arrivals = [1.0, 2.0, 2.1, 5.0, 5.1, 9.0]
    other.arrivals = [1.5, 2.0, 4.0, 6.0, 6.5]
    assert longest([one, other], 2.05, 5.05, decoded=True) == 5.0 - 2.1
    assert longest([one, other], 5.05, math.inf, decoded=True) == 9.0 - 5.1
    assert longest([one, other], 9.0, math.inf, decoded=True) == 0.0


def test_a_stream_whose_kv_was_under_way_is_told_apart() -> None:
    decoded, joining, later = (Stream(Case("", 9, 0.0, seed)) for seed in range(3))
    decoded.arrivals = [1.0, 1.1, 2.5, 2.6]
    joining.arrivals = [1.8, 6.0, 6.1]
    later.arrivals = [3.0, 3.5]
    for streams, decodes, seconds in (
        ([decoded, joining, later], True, 2.5 - 1.1),
        ([decoded, joining, later], False, 6.0 - 1.8),
        ([decoded, later], False, 3.5 - 3.0),
    ):
        assert longest(streams, 2.0, math.inf, decoded=decodes) == seconds
