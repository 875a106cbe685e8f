"""Ctrl-C and SIGTERM for a program that has an order to keep when it stops."""

from __future__ import annotations

import asyncio
import signal
import threading


class StopSignals:
    """SIGINT and SIGTERM as events; the second of them sets `hurry`. SIGUSR1 sets `restart`.

    Installed explicitly: a shell starts background programs with SIGINT ignored, and Ray would put its own
    handlers there.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.hurry_threads = threading.Event()  # the same for code that runs in a thread
        self.first = int(signal.SIGINT)
        self.restart = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._received, signum)
        loop.add_signal_handler(signal.SIGUSR1, self.restart.set)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # a closed terminal; nohup says not to care
            loop.add_signal_handler(signal.SIGHUP, self._received, signal.SIGTERM)

    def _received(self, signum: int) -> None:
        if self.stop.is_set():
            self.hurry.set()
            self.hurry_threads.set()
        else:
            self.first = signum
            self.stop.set()
