"""How KV travels, and how long anything waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from cluster.options.declare import between, opt


@dataclass(frozen=True)
class TransferOptions:
    """How KV travels."""

    panel: ClassVar[str] = "KV transfer"
    kv_lanes: Annotated[
        int, opt("TCP connections from a decode worker to each prefill worker.", "N", check=between(1))
    ] = 4
    kv_bind: Annotated[
        str | None,
        opt(
            "Interfaces or own addresses that a decode worker's lanes take in turn.",
            "NIC,NIC",
            shown="by route",
        ),
    ] = None
    kv_slot_bytes: Annotated[
        int, opt("One slice of KV on the wire, one slot of the staging arena.", "BYTES", check=between(1))
    ] = 2 << 20
    kv_slots: Annotated[int, opt("Slots of a worker's staging arena.", "N", check=between(1))] = 64


@dataclass(frozen=True)
class DeadlineOptions:
    """How long a worker waits for anything, in seconds."""

    panel: ClassVar[str] = "Deadlines"
    hold_timeout: Annotated[float, opt("A finished prefill waits for a decode worker.", "S")] = 30.0
    transfer_timeout: Annotated[float, opt("A KV transfer makes no progress.", "S")] = 10.0
    tombstone_timeout: Annotated[float, opt("The id of a closed transfer is remembered.", "S")] = 60.0
    peer_timeout: Annotated[float, opt("The other end of the lanes is silent.", "S")] = 5.0
    engine_timeout: Annotated[float, opt("An engine gives no sign of life.", "S")] = 10.0


@dataclass(frozen=True)
class DrainOptions:
    panel: ClassVar[str] = "Deadlines"
    drain_timeout: Annotated[float, opt("Running requests finish after SIGTERM.", "S")] = 60.0
