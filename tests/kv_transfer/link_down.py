"""`unshare -rn python -m tests.kv_transfer.link_down`: transfers while the link goes down, and comes back."""

from __future__ import annotations

import fcntl
import socket
import struct
import time

import baton.kv_transfer as kv

from .conftest import Decode, Pair, Prefill, until
from .transfer_process import deadlines

DEADLINES = deadlines(peer_dead=50.0, handshake=2.0)
TOKENS = 200


SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1  # of netdevice(7)


def link(state: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        answer = fcntl.ioctl(s, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("16xH", answer)
        flags = flags | IFF_UP if state == "up" else flags & ~IFF_UP
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))


def main() -> None:
    link("up")
    pair = Pair(Prefill(deadlines=DEADLINES), Decode(deadlines=DEADLINES))
    prefill_id = pair.prefill.open(TOKENS)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, TOKENS)
    pair.prefill.sender.ready(prefill_id, None, 0, TOKENS // 2)
    pair.until(lambda: pair.decode.stats().frames_received > 3, "half of it")
    link("down")
    pair.prefill.sender.ready(prefill_id, None, TOKENS // 2, TOKENS)
    pair.prefill.sender.commit(prefill_id, kv.FirstToken(1))
    for worker in (pair.decode, pair.prefill):
        pair.until(
            lambda worker=worker: worker.later(50.0) or worker.stats().sessions == 0, "it to give its peer up"
        )
    assert pair.decode.stats().deadlines["peer_dead"] >= 1
    down_until = time.monotonic() + 0.3  # lanes that are opened meanwhile find no listener
    until(lambda: time.monotonic() > down_until, "the link to stay down")
    link("up")
    event = pair.event(decode_id)
    assert isinstance(event, kv.Injected), event
    pair.assert_same(blocks, decode_id, 0, TOKENS)
    pair.assert_whole()
    print("injected after the link was down")
    pair.decode.close()
    pair.prefill.close()


if __name__ == "__main__":
    main()
