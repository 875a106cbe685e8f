"""`unshare -rn python -m tests.kv_transfer.own_network ARGS`: pytest with a network of a loopback only."""

import fcntl
import os
import socket
import struct
import sys

import pytest

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1  # of netdevice(7)
VARIABLE = "BATON_TEST_OWN_NETWORK"
"""Is in the environment of such a run: its tests may take the link down."""


def link(state: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        answer = fcntl.ioctl(s, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("16xH", answer)
        flags = flags | IFF_UP if state == "up" else flags & ~IFF_UP
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))


if __name__ == "__main__":
    link("up")
    os.environ[VARIABLE] = "1"
    sys.exit(pytest.main(sys.argv[1:]))
