"""Which transfer's slice a sender takes next."""

from collections import deque

from baton.kv_names.cache_kinds import ATTENTION, CacheArray
from baton.kv_transfer.endpoint.outgoing import (
    OutgoingPrefill,
    OutgoingTransfer,
    ReadyLayer,
    Slicing,
    Turns,
)
from baton.kv_transfer.layout import KVLayout, Piece
from baton.kv_transfer.protocol.credits import SenderAccount
from baton.kv_transfer.slices import Slice


def transfer(name: bytes, *layers: int, launched: bool) -> OutgoingTransfer:
    pieces = deque((Slice(Piece(layer, 0, 1, 0, 64, 0)), None) for layer in layers)
    account = SenderAccount(granted=1)
    return OutgoingTransfer(
        name, OutgoingPrefill(name, launched=launched), account, 1024, False, (), (), pieces
    )


def test_transfers_take_turns_and_those_of_prefills_that_are_over_come_first() -> None:
    turns, names = Turns(32), list[bytes]()
    computing = transfer(b"c", 0, 1, launched=False)
    first, second = (transfer(name, 30, 31, launched=True) for name in (b"1", b"2"))
    for each in (computing, first, second):
        turns.add(each)
    while (found := turns.next(lambda event: True, ahead=False)) is not None:
        found.pending.popleft()
        names.append(found.id)
        if len(names) == 2:
            second.account = SenderAccount(granted=0)  # its peer has no credit left
    assert names == [b"1", b"2", b"1", b"c", b"c"]


def test_lanes_share_the_last_layer_and_other_layers_fill_slots() -> None:
    """In slots of 4 MiB. Nothing hides the way of the last layer of the last chunk."""
    array = CacheArray(ATTENTION, "kv", rows=2, heads=8, head_dim=128, dtype="bfloat16")
    layout = KVLayout.of([(array,)] * 2)
    prefill = OutgoingPrefill(b"p", num_tokens=1536)
    ranges = ((0, 1536),)
    each = OutgoingTransfer(b"t", prefill, SenderAccount(), 4 << 20, False, ranges, [ranges], lanes=4)
    slicing = Slicing(layout, 1)
    for start, stop in ((0, 512), (512, 1536)):
        for layer in (0, 1):
            slicing.add(each, ReadyLayer(layer, start, stop, None))
    sizes = [(s.piece.layer, s.stored >> 20) for s, _ in each.pending]
    assert sizes == [(0, 2), (1, 2), (0, 4), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert [s.seq for s, _ in each.pending] == list(range(7))
