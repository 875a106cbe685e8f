"""What a step of a split prompt waits for."""

import itertools
from dataclasses import replace

from baton.kv_names.cache_kinds import ATTENTION, STATE, CacheArray, Window
from baton.kv_transfer import KVLayout
from baton.kv_transfer.endpoint.live_fetch import LayersThere
from baton.kv_transfer.layout import Piece, cut
from tests.ledger import LedgerCache

KV = CacheArray(ATTENTION, "kv", 2, 2, 8, "float32")
LAYOUT = KVLayout.of([(KV,), (KV, *LedgerCache(4).arrays), (CacheArray(STATE, "s", 1, 4, 8, "float32"),)])


def slices(layer: int, start: int, stop: int, *, per_token: bool) -> list[Piece]:
    """Of the arrays of a layer that each token has, or each request."""
    numbers = [n for n in LAYOUT.numbers[layer] if LAYOUT.arrays[n].per_token == per_token]
    pieces = (cut(LAYOUT, layer, (start, stop), (0, LAYOUT.arrays[n].heads), 512, n) for n in numbers)
    return [*itertools.chain.from_iterable(pieces)]


def test_a_layer_waits_for_all_of_its_arrays_and_the_states_of_the_next() -> None:
    """Two ranges come, the first one with the states after it."""
    there = LayersThere([(0, 64), (128, 192)], LAYOUT, states_at=[64])
    needed = {
        -1: slices(0, 0, 64, per_token=False),
        0: slices(0, 0, 64, per_token=True) + slices(1, 0, 64, per_token=False),
        1: slices(1, 0, 64, per_token=True) + slices(2, 0, 64, per_token=False),
        2: slices(2, 0, 64, per_token=True),
    }
    assert [bool(pieces) for pieces in needed.values()] == [False, True, True, False]
    for layer, pieces in needed.items():
        for piece in pieces:
            assert not there.has(layer, 128), piece
            there.written(piece)
        assert there.has(layer, 128)
    assert there.has_all(128)
    assert not there.has(0, 192), "the other range"


def test_a_range_of_which_no_window_reads_anything_begins_at_once() -> None:
    """Ranges of the receiver begin at 500 and 900. Nothing comes of what is further behind."""
    windows = replace(KV, name="near", window=Window(100)), replace(KV, name="far", window=Window(300))
    layout, ranges = KVLayout.of([(windows[0],), (windows[1],)]), [(0, 128), (128, 450), (600, 900)]
    there = LayersThere(ranges, layout, [], next_positions=(500, 900))
    assert there.began() == [128]
    asked = [[*array.read_of(ranges, (500, 900))] for array in windows]
    assert asked == [[(384, 450), (768, 900)], [(128, 450), (600, 900)]], "from the beginning of a tile on"
    for layer, read in enumerate(asked):
        assert there.has(layer, 128)
        for start, stop in read:
            assert not there.has(layer, stop)
            for piece in cut(layout, layer, (start, stop), (0, KV.heads), 1 << 20, layer):
                there.arrived(piece)
                there.written(piece)
            assert there.has(layer, stop)
    assert there.began() == [450, 900]
