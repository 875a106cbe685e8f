"""Sockets that clients connect to."""

import socket

from rpc.ports import cannot_listen, family

SEND_BUFFER_BYTES = 256 << 10
"""What the kernel may hold for one client that does not read; by default it would be megabytes."""
BACKLOG = 1024


def listen(flag: str, host: str, port: int, *, share: bool = False) -> socket.socket:
    """A listening TCP socket. `share`: other processes of ours listen at the same address (SO_REUSEPORT).

    Raises ValueError naming the flag.
    """
    try:
        made = socket.create_server((host, port), family=family(host), backlog=BACKLOG, reuse_port=share)
    except OSError as error:
        raise ValueError(cannot_listen(flag, host, port, error)) from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted ones inherit it
    return made


def reserve(flag: str, host: str, port: int) -> socket.socket:
    """Takes a port for sockets that share it. Receives no connections: it does not listen itself.

    Raises ValueError naming the flag when somebody else has the port, also one who would share it.
    """
    made = socket.socket(family(host), socket.SOCK_STREAM)
    try:
        with socket.socket(family(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
            probe.bind((host, port))
            address = probe.getsockname()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ValueError(cannot_listen(flag, host, port, error)) from error
    return made
