"""Where work goes: pure functions over a snapshot of the workers, one file each.

A policy sees loads and returns a choice. It keeps nothing, waits for nothing, and knows neither connections
nor clocks, so that the same objects run in the router and in `simulator`.

Prefill: `PrefillLoads` follows what workers report and what this router sends, and makes a
`PrefillSnapshot` for each choice: the seconds of work ahead at each worker, its speed, and how much of the
prompt it has cached (`ChunkIndex`). A `PrefillPolicy` takes that and a request, and returns a worker.
`PrefillSnapshot.seconds` is the estimated time until a worker has its first token.

Overflow: `overflow` says whether a decode worker prefills a request itself, from that estimate, what the
worker has to spare (`ChunkOffer`), and what it has cached (`DecodeCaches`).

Decode: `two_choices` over a list of `DecodeLoad`, which follow what workers report and what this router asks
of them.
"""

from router.policy.decode_caches import DecodeCaches
from router.policy.decode_load import DecodeLoad, FreeRoom, free_room
from router.policy.overflow import ChunkOffer, Reason, overflow
from router.policy.prefill import PrefillPolicy, PrefillRequest, PrefillSnapshot
from router.policy.prefill_loads import PrefillLoads, PrefillWork
from router.policy.ring import Ring
from router.policy.round_robin import round_robin
from router.policy.sticky import sticky
from router.policy.two_choices import two_choices

PREFILL_POLICIES: dict[str, PrefillPolicy] = {"sticky": sticky, "round-robin": round_robin}

__all__ = [
    "PREFILL_POLICIES",
    "ChunkOffer",
    "DecodeCaches",
    "DecodeLoad",
    "FreeRoom",
    "PrefillLoads",
    "PrefillPolicy",
    "PrefillRequest",
    "PrefillSnapshot",
    "PrefillWork",
    "Reason",
    "Ring",
    "free_room",
    "overflow",
    "round_robin",
    "sticky",
    "two_choices",
]
