"""Options of KV transfer, and the deadlines of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from baton.cluster.options.declare import between, opt


@dataclass(frozen=True)
class TransferOptions:
    """The lanes and the staging arena of KV transfer."""

    panel: ClassVar[str] = "KV transfer"
    kv_lanes: Annotated[
        int, opt("TCP connections to each worker from which KV is fetched.", "N", check=between(1))
    ] = 4
    kv_connector: Annotated[
        Literal["auto", "tcp", "nixl"],
        opt(
            "How KV moves between workers. auto: workers of one host read it from memory of each other "
            "where a test copy succeeds; all others use TCP. nixl: workers with this setting read it with "
            "NIXL, which must be installed."
        ),
    ] = "auto"
    kv_encrypt: Annotated[
        bool, opt("Encrypt KV that moves over TCP (AES-256-GCM). All workers of a cluster must use it.")
    ] = False
    kv_bind: Annotated[
        str | None,
        opt(
            "Interfaces or local addresses over which a worker spreads the lanes that it opens.",
            "NIC,NIC",
            shown="by route",
        ),
    ] = None
    kv_slot_bytes: Annotated[
        int, opt("Size of a slice of KV and of a slot of the staging arena.", "BYTES", check=between(1))
    ] = 2 << 20
    kv_slots: Annotated[
        int,
        opt(
            "Slots of each of a worker's two staging arenas: one sends, one receives.", "N", check=between(1)
        ),
    ] = 64


@dataclass(frozen=True)
class DeadlineOptions:
    """The longest waits of a worker, in seconds."""

    panel: ClassVar[str] = "Deadlines"
    hold_timeout: Annotated[float, opt("A finished prefill waits this long for a decode worker.", "S")] = 30.0
    transfer_timeout: Annotated[float, opt("A KV transfer without progress fails after this.", "S")] = 10.0
    tombstone_timeout: Annotated[float, opt("Ids of closed transfers are kept this long.", "S")] = 60.0
    peer_timeout: Annotated[float, opt("A silent peer counts as dead after this.", "S")] = 5.0
    engine_timeout: Annotated[float, opt("A silent engine counts as dead after this.", "S")] = 10.0


@dataclass(frozen=True)
class DrainOptions:
    panel: ClassVar[str] = "Deadlines"
    drain_timeout: Annotated[float, opt("After SIGTERM, time for running requests to finish.", "S")] = 60.0
