"""Listening sockets for clients."""

import socket

from baton.rpc.ports import cannot_listen, family

SEND_BUFFER_BYTES = 256 << 10
"""Bytes that the kernel buffers for one client that does not read. Its default is megabytes."""
BACKLOG = 1024


def listen(flag: str, host: str, port: int, *, share: bool = False) -> socket.socket:
    """Returns a listening TCP socket. `share`: other processes of this router listen at the same address.

    Raises ValueError naming the flag.
    """
    try:
        made = socket.create_server((host, port), family=family(host), backlog=BACKLOG, reuse_port=share)
    except OSError as error:
        raise ValueError(cannot_listen(flag, host, port, error)) from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
    return made


def reserve(flag: str, host: str, port: int) -> socket.socket:
    """Returns a socket that reserves a port for sockets that share it.

    It does not listen, so it gets no connections. Raises ValueError naming the flag when another program has
    the port, even with SO_REUSEPORT.
    """
    made = socket.socket(family(host), socket.SOCK_STREAM)
    try:
        with socket.socket(family(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows TIME_WAIT
            probe.bind((host, port))
            address = probe.getsockname()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ValueError(cannot_listen(flag, host, port, error)) from error
    return made
