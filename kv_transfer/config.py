"""What a transfer process is told at its start."""

from typing import Any, Self

import msgspec

from baton.kv_transfer.layout import KVLayout
from baton.system import usable_cpus

MAX_SLOT_BYTES = 64 << 20
MAX_LANES = 64
SLOTS, SLOT_BYTES = 64, 2 << 20
"""Of each arena of a worker. Such a slot fits the L2 cache of a core beside an H200: lanes take 0.82 of the
CPU time of slots of 8 MiB there (with two cores of an EPYC 1.08), and a quarter of the pinned memory. Short
prompts need the number of slots."""
EXPORTED_SLOT_BYTES = 16 << 20
"""The least size of a slot that peers read on a GPU. A link between GPUs carries that many bytes in 45 µs.
A slice takes each of four processes about as long."""
PAGE = 4096
MOST_PINS = 2
"""Transfers by content at the same time. More would delay the prefills of a worker."""


class TransferDeadlines(msgspec.Struct, frozen=True):
    """Seconds. Each wait has exactly one owner, always a transfer process; see docs/protocol.md."""

    handshake: float = 5.0  # from accept or connect to an authenticated lane, and to a whole session
    fetch_wait: float = 30.0  # prefill: a FETCH whose prefill id has not been seen
    hold: float = 30.0  # prefill: a finished prefill with no FETCH, or no ACK
    pin: float = 30.0  # prefill: KV that a peer fetches by content, however its bytes move
    progress: float = 10.0  # each side: a transfer whose bytes are due and do not come
    ping: float = 1.0
    peer_dead: float = 5.0  # nothing heard from a peer
    engine_dead: float = 10.0  # the peer's engine does not tick
    unreachable: float = 5.0  # decode: no session with the prefill worker came up
    idle_close: float = 60.0  # decode: lanes without a transfer
    tombstone: float = 60.0

    @classmethod
    def after(cls, silence: float) -> Self:
        """Those of a worker in which an engine or a transfer that is silent for so long has failed."""
        return cls(
            engine_dead=silence,
            progress=silence,
            peer_dead=silence / 2,
            hold=3 * silence,
            fetch_wait=3 * silence,
        )


def _movers() -> int:
    """No mover on fewer than eight cores: more processes would only compete for these."""
    cores = usable_cpus()
    return min(8, cores // 2) if cores >= 8 else 0


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a transfer process."""

    name: str  # "prefill 0": for the process title, logs and the peer's logs
    title: str = "baton"  # what the process title begins with
    incarnation: int  # u64, drawn by the service process at its start
    model_fingerprint: str
    layout: KVLayout
    num_slots: int  # of each arena
    slot_bytes: int  # of each arena: the largest payload of one frame
    hosts: tuple[str, ...] = ("127.0.0.1",)  # listens there for the workers that fetch: one of each card
    port: int = 0  # 0: chosen, and told in Ready
    lanes: int = 4  # for KV: opened to each worker that KV is fetched from (fewer when there are many)
    max_lanes: int = 64  # opened over all peers; each peer gets its share when this process connects
    bind: tuple[str, ...] = ()  # interfaces or own addresses that lanes go out from, in turn
    max_sessions: int = 256  # with peers that fetch from here
    # accepted connections that have not yet proved the secret; as many more from known addresses
    max_handshakes: int = 64
    max_waiting: int = 4096  # FETCHes for prefill ids not yet seen
    max_pins: int = MOST_PINS
    movers: int = msgspec.field(default_factory=_movers)  # 0: the transfer process does it
    encrypt: bool = False  # lanes; each peer must do the same
    exports: bool = False  # memory of the engine to peers on this host, and it reads theirs
    sums: bool = False  # the engine computes and verifies sums of slices, if the peer's does: it is on GPUs
    reader: str = ""  # of `memory_reader.READERS`: reads memory of peers where a test read succeeds. "": none
    reader_device: str | None = None  # with slots of its own for it: "cuda:0" or "cpu"; None: the arenas
    exported_slot_bytes: int = EXPORTED_SLOT_BYTES  # the least size of these on a GPU
    deadlines: TransferDeadlines = TransferDeadlines()
    trace_path: str | None = None
    logging: dict[str, Any] | None = None  # for logging.config.dictConfig; None: Python's own

    @property
    def sums_lanes(self) -> bool:
        """Whether lanes to a peer that says the same are summed. On an encrypted one a tag does that."""
        return self.sums and not self.encrypt

    def __post_init__(self) -> None:
        for array in self.layout.arrays:
            least, what = array.head_bytes, f"one head of {array.name}"
            if array.per_token:
                least, what = array.bytes, f"one position of {array.name} in one layer"
            if self.slot_bytes < least:
                raise ValueError(
                    f"slot_bytes is {self.slot_bytes}, less than {what} ({least} bytes): use larger slots"
                )
