"""Sockets that clients connect to."""

import socket

SEND_BUFFER_BYTES = 256 << 10
"""What the kernel may hold for one client that does not read; by default it would be megabytes."""
BACKLOG = 1024


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """A listening TCP socket. `share`: other processes of ours listen at the same address (SO_REUSEPORT).

    Raises ValueError naming the flags.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=share)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"--host, --port: cannot listen on {host}:{port}: {reason}") from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted ones inherit it
    return made


def url_host(host: str) -> str:
    """As it stands before a port."""
    return f"[{host}]" if ":" in host else host
