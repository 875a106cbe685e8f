"""Whether the router could listen where it is told to, before anything is started."""

from __future__ import annotations

import contextlib
import socket

from cluster.options import FrontOptions
from rpc.ports import cannot_listen, family


def check_ports(front: FrontOptions) -> None:
    """Raises ValueError when the router could not listen somewhere."""
    asked = [("port", front.host, front.port), ("grpc-port", front.host, front.grpc_port)]
    asked.append(("admin-port", front.admin_host, front.admin_port))
    with contextlib.ExitStack() as held:  # until all are checked: two of them may be the same
        for flag, host, port in asked:
            if port is None:
                continue
            probe = held.enter_context(socket.socket(family(host), socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ValueError(cannot_listen(f"--{flag}", host, port, error)) from error
            probe.listen()  # else the next one might share it
