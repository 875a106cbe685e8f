"""Which transfer's slice a sender takes next."""

from collections import deque

from baton.kv_transfer.endpoint.outgoing import OutgoingPrefill, OutgoingTransfer, Turns
from baton.kv_transfer.layout import Piece
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
