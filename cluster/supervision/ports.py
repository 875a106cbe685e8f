"""Checks the router's ports before any process starts."""

from __future__ import annotations

import contextlib
import socket

from baton.cluster.options import FrontOptions
from baton.machine.system import cannot_listen, family


def check_ports(front: FrontOptions) -> None:
    """Raises ValueError if the router could not listen on one of its ports."""
    asked = [("port", front.host, front.port), ("grpc-port", front.host, front.grpc_port)]
    asked.append(("admin-port", front.admin_host, front.admin_port))
    with contextlib.ExitStack() as held:  # hold all probes until the end, to find a port that is given twice
        for flag, host, port in asked:
            if port is None:
                continue
            probe = held.enter_context(socket.socket(family(host), socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ValueError(cannot_listen(f"--{flag}", host, port, error)) from error
            probe.listen()  # with SO_REUSEADDR, the next probe could bind a port on which nothing listens
