"""What `bench.survive` says of streams around kills."""

import math

from baton.bench.harness.streams import Case, Stream
from baton.bench.survive import longest


def test_a_pause_is_the_longest_gap_until_the_next_kill() -> None:
    """Tokens that were on the way come after a kill."""
    one, other = Stream(Case("", 9, 0.0, 1)), Stream(Case("", 9, 0.0, 2))
    one.arrivals = [1.0, 2.0, 2.1, 5.0, 5.1, 9.0]
    other.arrivals = [1.5, 2.5, 4.0, 6.0, 6.5]
    assert longest([one, other], 2.05, 5.05) == 5.0 - 2.1
    assert longest([one, other], 5.05, math.inf) == 9.0 - 5.1
    assert longest([one, other], 9.0, math.inf) == 0.0
