"""Memory in which an engine process shows that it is alive and what it computes.

The engine process writes. The service process and the transfer process read: a counter that stands still
means that the engine hangs. The memory survives the engine process, so that its death can be explained.

It is a memfd of 1 MiB: a counter (u64), the number of ids (u64), and the ids (16 bytes each) of the requests
in the current step. A memfd has no name. It is inherited, and it ends with the last process that maps it.
Pages take no memory until they are written.
"""

import mmap
import os
from collections.abc import Collection

_ID_BYTES = 16
_BYTES = 1 << 20
MAX_STEP_IDS = _BYTES // _ID_BYTES - 1


class Heartbeat:
    """One process's view of the memory. Owns `fd`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _BYTES)
        self._tick = memoryview(self._map)[:8].cast("Q")
        self._step_size = memoryview(self._map)[8:16].cast("Q")
        self._step_ids = memoryview(self._map)[16:]

    @classmethod
    def create(cls) -> "Heartbeat":
        fd = os.memfd_create("baton-heartbeat", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _BYTES)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def tick(self) -> None:
        """For the engine thread: once per layer and start-up stage, and at least once a second when idle."""
        self._tick[0] = (self._tick[0] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    @property
    def ticks(self) -> int:
        """Number of ticks. 0: the engine has not ticked yet."""
        return self._tick[0]

    def set_step(self, ids: Collection[bytes]) -> None:
        """Names the requests of the step that begins, at most `MAX_STEP_IDS`. For the engine thread.

        A reader never sees ids that are half written, whenever the writer dies.
        """
        assert len(ids) <= MAX_STEP_IDS
        self._step_size[0] = 0
        written = b"".join(ids)
        self._step_ids[: len(written)] = written
        self._step_size[0] = len(written) // _ID_BYTES

    @property
    def step(self) -> list[bytes]:
        """The ids of the step that the engine computes, or computed when it died."""
        end = min(self._step_size[0], MAX_STEP_IDS) * _ID_BYTES
        return [bytes(self._step_ids[i : i + _ID_BYTES]) for i in range(0, end, _ID_BYTES)]

    def close(self) -> None:
        for view in (self._tick, self._step_size, self._step_ids):
            view.release()
        self._map.close()
        os.close(self.fd)
