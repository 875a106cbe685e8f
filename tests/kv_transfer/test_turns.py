"""Which transfer's slice a sender takes next."""

import math
from collections import deque

from baton.kv_names.cache_kinds import ATTENTION, CacheArray
from baton.kv_transfer.endpoint.orders import Ready
from baton.kv_transfer.endpoint.outgoing import (
    OutgoingPrefill,
    OutgoingTransfer,
    Slicing,
    Turns,
)
from baton.kv_transfer.layout import KVLayout, Piece
from baton.kv_transfer.protocol.credits import SenderAccount
from baton.kv_transfer.slices import Slice

ARRAY = CacheArray(ATTENTION, "kv", rows=2, heads=8, head_dim=128, dtype="bfloat16")
LAYOUT = KVLayout.of([(ARRAY,)] * 2)


def transfer(name: str, *layers: int, due: float = math.inf) -> OutgoingTransfer:
    pieces = deque((Slice(Piece(layer, 0, 1, 0, 64, 0), size=64), None) for layer in layers)
    return OutgoingTransfer(
        name.encode(), OutgoingPrefill(name.encode(), due=due), SenderAccount(granted=1), LAYOUT,
        1024, False, (), (), pieces, left=64 * len(layers),
    )  # fmt: skip


def order(transfers: list[OutgoingTransfer], *, begins: float, blocks: str = "") -> str:
    """The names of the transfers, a slice a second."""
    turns, names = Turns(32), ""
    for each in transfers:
        turns.add(each)
    while found := turns.next(lambda event: True, begins + len(names), ahead=False):
        found.left -= found.pending.popleft()[0].size
        names += found.id.decode()
        if names == blocks:
            found.account = SenderAccount(granted=0)  # its peer has no credit left
    return names


def test_transfers_that_peers_wait_for_come_first_one_after_the_other() -> None:
    computing, later = transfer("c", 0, 1), transfer("d", 0, 1)
    first, second = (transfer(name, 29, 30, 31, due=due) for name, due in (("1", 1.0), ("2", 1.5)))
    assert order([computing, later, second, first], begins=2.0) == "111222ccdd"


def test_a_transfer_without_credit_keeps_its_slices() -> None:
    transfers = [transfer("1", 30, 31, due=0.0), transfer("2", 31, due=0.0), transfer("c", 0)]
    assert order(transfers, begins=1.0, blocks="21") == "21c"


def test_a_short_transfer_passes_a_long_one_and_a_stream_of_short_ones_does_not_hold_it_up() -> None:
    long = transfer("l", *range(20), due=0.0)
    assert order([long, transfer("s", 30, 31, due=5.0)], begins=5.0).startswith("lss")
    long = transfer("l", *range(20), due=0.0)
    short = [transfer("s", 30, 31, due=2.0 * number) for number in range(60)]  # as many as the link carries
    assert order([long, *short], begins=1.0).rindex("l") < 100


def test_lanes_share_the_last_layer_and_other_layers_fill_slots() -> None:
    """In slots of 4 MiB. Nothing hides the way of the last layer of the last chunk."""
    prefill = OutgoingPrefill(b"p", num_tokens=1536)
    ranges = ((0, 1536),)
    each = OutgoingTransfer(b"t", prefill, SenderAccount(), LAYOUT, 4 << 20, False, ranges, [ranges], lanes=4)
    slicing = Slicing(LAYOUT, 1)
    for start, stop in ((0, 512), (512, 1536)):
        for layer in (0, 1):
            slicing.add(each, Ready(b"", layer, start, stop, None))
    sizes = [(s.piece.layer, s.size >> 20) for s, _ in each.pending]
    assert sizes == [(0, 2), (1, 2), (0, 4), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert [s.seq for s, _ in each.pending] == list(range(7))
    assert {s.slot for s, _ in each.pending} == {0}, "none has a slot yet"
