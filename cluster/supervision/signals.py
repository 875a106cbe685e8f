"""Turns the signals of `baton serve` into asyncio events, so that it can stop its roles in order."""

from __future__ import annotations

import asyncio
import signal
import threading


class StopSignals:
    """The first SIGINT or SIGTERM sets `stop`, the second sets `hurry`. SIGUSR1 sets `restart`.

    `install` sets the handlers explicitly: a shell starts background programs with SIGINT ignored, and Ray
    installs handlers of its own.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.hurry_threads = threading.Event()  # the same as `hurry`, for code that runs in a thread
        self.first = int(signal.SIGINT)  # the signal that set `stop`
        self.restart = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._received, signum)
        loop.add_signal_handler(signal.SIGUSR1, self.restart.set)
        # A closed terminal sends SIGHUP. Under nohup it is ignored, and must stay so.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._received, signal.SIGTERM)

    def _received(self, signum: int) -> None:
        if self.stop.is_set():
            self.hurry.set()
            self.hurry_threads.set()
        else:
            self.first = signum
            self.stop.set()
