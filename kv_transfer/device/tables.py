"""Pinned memory: small tables on their way to a GPU, and what torch has not allocated. Imported on GPUs.

Tables use their memory again and again. `torch.tensor(…, pin_memory=True).to(device)` takes 60 to 100 µs of
the host, this a fourth of it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.kv_transfer.device.pool import Event
from baton.system.cuda_driver import copy

_LEAST = 512  # words of a table
_FEW = 16  # tables that are made ahead: pinning more waits for the device


@dataclass(slots=True, eq=False)
class Table:
    """int64 words in pinned memory, and as many on the device."""

    pinned: torch.Tensor
    words: np.ndarray  # the pinned memory
    on_device: torch.Tensor

    @classmethod
    def of_size(cls, count: int, device: torch.device) -> "Table":
        pinned = torch.empty(count, dtype=torch.int64, pin_memory=True)
        return cls(pinned, pinned.numpy(), torch.empty(count, dtype=torch.int64, device=device))

    def send(self, count: int, stream: torch.cuda.Stream) -> None:
        """Enqueues a copy of the first words to the device."""
        copy(self.on_device.data_ptr(), self.pinned.data_ptr(), 8 * count, stream.cuda_stream)

    def send_behind(self, start: int, numbers: Sequence[int], stream: torch.cuda.Stream) -> torch.Tensor:
        """As `send`, of the first `start` words and of these numbers behind them, which it returns."""
        stop = start + len(numbers)
        self.words[start:stop] = numbers
        self.send(stop, stream)
        return self.on_device[start:stop]

    def fetch(self, count: int, stream: torch.cuda.Stream) -> None:
        """Enqueues a copy of the first words from the device."""
        copy(self.pinned.data_ptr(), self.on_device.data_ptr(), 8 * count, stream.cuda_stream)


class Tables:
    """Of the kernels of one stream. One thread uses it."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self.stream = stream
        self._spare = [Table.of_size(_LEAST, device) for _ in range(_FEW)]
        self._sent: list[Table] = []
        self._under_way: deque[tuple[Event, list[Table]]] = deque()

    def send(self, numbers: Sequence[int]) -> torch.Tensor:
        """The numbers, on the device once the stream gets there, until the event of the next `over`."""
        table = self._filled(numbers)
        table.send(len(numbers), self.stream)
        return table.on_device[: len(numbers)]

    def write(self, numbers: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Enqueues copies of the numbers to memory on the device: each run is (address, how many)."""
        source = self._filled(numbers).pinned.data_ptr()
        for address, count in runs:
            copy(address, source, 8 * count, self.stream.cuda_stream)
            source += 8 * count

    def over(self, event: Event) -> None:
        """What was sent so far is not needed after this event."""
        self._under_way.append((event, self._sent))
        self._sent = []

    def take(self, count: int) -> Table:
        """A table of at least so many words, until `give`."""
        while self._under_way and self._under_way[0][0].query():
            self._spare += self._under_way.popleft()[1]
        for i, table in enumerate(self._spare):
            if len(table.words) >= count:
                return self._spare.pop(i)
        return Table.of_size(max(_LEAST, 1 << (count - 1).bit_length()), self._device)

    def give(self, table: Table) -> None:
        """No copy of it is under way."""
        self._spare.append(table)

    def _filled(self, numbers: Sequence[int]) -> Table:
        table = self.take(len(numbers))
        table.words[: len(numbers)] = numbers
        self._sent.append(table)
        return table


def pin(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    assert cudart is not None
    error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if error:
        raise RuntimeError(f"cannot pin {memory.numel()} bytes: CUDA error {error}")


def unpin(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    assert cudart is not None
    error = int(cudart.cudaHostUnregister(memory.data_ptr()))
    assert error == 0, f"cudaHostUnregister: CUDA error {error}"
