"""The group of a worker: workers that share the experts of one model, each with its own requests and KV."""

import asyncio
import contextlib
import os
from typing import Self

import msgspec


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker of a group knows of it. The process that starts the group makes the text.

    When an engine of the group ends, the others hang. So each worker holds the writing end of one pipe until
    it has drained, and ends only when no other holds it: the pipe then ends for its readers.
    """

    id: str
    """16 hexadecimal digits, drawn at each start of the group."""
    rank: int
    size: int
    port: int
    """At which the engines of the group meet, on 127.0.0.1."""
    undrained: int
    """A descriptor: the writing end. The kernel closes it when the worker ends for any other reason."""
    drained: int
    """A descriptor: the reading end."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Children of this process get none of the descriptors. Raises ValueError."""
        try:
            group = msgspec.json.decode(text, type=cls)
            os.set_inheritable(group.undrained, False)
            os.set_inheritable(group.drained, False)
        except (msgspec.DecodeError, OSError) as error:
            raise ValueError(f"--group: is for workers that a group has started ({error})") from error
        return group

    async def all_drained(self, timeout: float) -> None:
        """Says that this worker has drained, and waits until all others have, or have ended: `timeout`
        seconds at most."""
        os.close(self.undrained)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.drained, ended.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await ended.wait()
        loop.remove_reader(self.drained)
