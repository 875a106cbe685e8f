"""Helpers that fork. They are no forks of pytest, which has threads."""

import os
import socket
import sys

from baton.processes.children import Forked
from baton.processes.spawn import environment


def helper(control: socket.socket, *arguments: str) -> Forked:
    """Runs Python with these arguments and the number of a socket."""
    os.set_inheritable(number := control.fileno(), True)
    command = [sys.executable, *arguments, str(number)]
    return Forked(os.posix_spawn(sys.executable, command, environment()))
