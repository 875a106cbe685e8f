"""File descriptors that the processes of a group of ranks inherit from the process that starts them."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from baton.system.kept_pages import CannotShareError


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The descriptors have the same numbers in all processes of a group. Nothing of them has a name in a file
    system, so nothing is left when the last process ends."""

    exchange: int
    """Memory in which ranks on GPUs find each other, and in which ranks on CPUs exchange tensors."""
    commands: int
    """Memory of `engine.execution.commands`."""
    failure: int
    """Memory for the reason why a rank could not start, behind a byte that says whether it can alone."""
    readings: int
    """An eventfd: a rank has read weights."""
    wakes: Sequence[int]
    """An eventfd for each rank from 1 on; it counts the commands that the rank has not received."""

    @classmethod
    def create(cls, size: int) -> "RankFiles":
        """For a group of `size` ranks."""
        flags = os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        with contextlib.ExitStack() as opened:

            def opened_fd(fd: int) -> int:
                opened.callback(os.close, fd)
                return fd

            files = cls(
                opened_fd(os.memfd_create("rank-exchange")),
                opened_fd(os.memfd_create("rank-commands")),
                opened_fd(os.memfd_create("rank-failure")),
                opened_fd(os.eventfd(0, flags)),
                [opened_fd(os.eventfd(0, flags)) for _ in range(size - 1)],
            )
            opened.pop_all()
        return files

    @property
    def fds(self) -> Sequence[int]:
        return (self.exchange, self.commands, self.failure, self.readings, *self.wakes)

    def take_turn(self) -> None:
        """On rank 0: all others go on from `wait_for_turn`."""
        for wake in self.wakes:
            os.eventfd_write(wake, 1)

    def wait_for_turn(self, rank: int) -> None:
        """Before the first command: rank 0 alone knows when the memory of KV may be written."""
        os.eventfd_read(self.wakes[rank - 1])

    def fail(self, error: ValueError) -> None:
        """Notes why a rank could not start."""
        alone = isinstance(error, CannotShareError)
        os.pwrite(self.failure, bytes([alone]) + str(error).encode(), 0)

    @property
    def start_failure(self) -> tuple[str, bool]:
        """Why a rank could not start, and whether it can when no other engine is there."""
        noted = os.pread(self.failure, os.fstat(self.failure).st_size, 0)
        return noted[1:].decode(), any(noted[:1])

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
