"""What reads memory of peers in a transfer process, where the engine does not: `MemoryReader`.

To add one, write its class and name it in `READERS`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import ClassVar, Protocol

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.protocol.messages import Export
from baton.kv_transfer.slices import Slice

READERS = {"nixl": "baton.kv_transfer.nixl.memory:NixlMemory"}
"""By the value of `--kv-connector`: module and class."""


class MemoryReader(Protocol):
    """Memory that peers read, and what reads that of peers. Not safe for threads; no method blocks.

    It has slots with marks, which the engines fill and verify. Or it has the arenas: then the transfer
    processes compute checksums, and engines see no difference to TCP."""

    transports: ClassVar[Sequence[str]]
    """The kinds of its memory, in metrics."""
    export: Export
    """What peers are told."""
    for_sender: Export | None
    """Slots with marks, which the engine opens. None: it has the arena."""
    for_receiver: Export | None

    @staticmethod
    def check(*, encrypt: bool) -> None:
        """Raises ValueError if it cannot be used here, or not with `--kv-encrypt`."""

    @staticmethod
    def device_of(engine_device: str) -> str | None:
        """The device on which it has slots of its own. None: it uses the arenas."""

    def __init__(
        self, config: TransferConfig, secret: bytes, sending: Arena, receiving: Arena,
        wake: Callable[[], None],
    ) -> None:  # fmt: skip
        """In the transfer process. Any thread calls `wake` when `opened` or `finished` has something. Raises
        RuntimeError with a text for the user."""

    @property
    def slot_bytes(self) -> int:
        """Of the slots that it reads into."""

    @property
    def why_not_exported(self) -> str:
        """Why no peer can be told of the memory; empty: peers can."""

    def checksum(self, payload: memoryview) -> int:
        """Of a slice in the arena: its `sum` in SLICES, which has 63 bits."""

    def open(self, session: int, incarnation: int, export: Export) -> str:
        """Starts to read the token of the memory. Returns why it cannot be read; empty: `opened` tells."""

    def opened(self) -> Iterator[tuple[int, str]]:
        """Sessions of which the token was read, and why their memory cannot be read; empty: it can."""

    def close(self, session: int) -> None:
        """Its reads go on: their slots are used until `finished` names them."""

    def read(self, session: int, slices: Sequence[Slice]) -> None:
        """Starts to read slices that lie `there` into their slots. `finished` tells how each ends."""

    def finished(self) -> Mapping[int, bool]:
        """The slots whose read is over, and whether they are as SLICES said."""

    @property
    def busy(self) -> bool:
        """`opened` or `finished` will have something."""

    def look_within(self) -> float | None:
        """Seconds until a read may be over, if nothing else tells. None: `wake` tells."""


def reader_of(connector: str) -> type[MemoryReader] | None:
    """None: the engines read, or nothing but TCP is used."""
    module, _, name = READERS.get(connector, "").partition(":")
    return getattr(import_module(module), name) if module else None
