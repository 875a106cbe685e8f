"""Moves KV caches from prefill to decode workers, layer by layer, while the prefill still computes.

Life of a transfer, and the process of each step::

    prefill engine          prefill transfer process        decode transfer process          decode engine
    ------------------      ------------------------        -----------------------          -------------
    Sender.open             READY                           RESERVED                     Receiver.fetch
                                      <-------------------- FETCH, CREDIT
    Sender.ready            STREAMING
      pump: gather, D2H       KV frames --------------------> RECEIVING
        into an arena slot    from the slot                     into a slot, verified     poll: H2D, scatter
    Sender.commit           COMMITTED ------ COMMIT --------> COMPLETE
                                                            INJECTED                      poll: Injected
    poll: Released          RELEASED  <------- ACK ----------

Between GPUs the decode engine verifies a slice, when its scatter is over.

Of a layer that keeps states in place of KV, `Sender.ready` counts only for the last positions. The states
then travel as frames of the same transfer.

Chunks of a prefix cache travel in the same way, named by their content: FETCH_CONTENT, `ContentWanted`,
`Sender.serve`, HAVE, frames, COMMIT, ACK.

Of a prompt that several workers compute, each fetches the ranges of the others (`Receiver.fetch_ranges`), and
uses a layer as soon as it is there (`wait_for_layer`).

Roles use `Sender` and `Receiver`. In engine processes these touch KV and torch (`endpoint/`, `device/`).
Transfer processes touch sockets (`process/`) and never torch. Between them are an `Arena` and a socketpair.
What both sides agree on is in `protocol/`, as pure state machines; the wire is in `docs/protocol.md`.
"""

from baton.kv_transfer.arena import Arena, ArenaEnd, Arenas, WorkerEnds, channel_pair
from baton.kv_transfer.config import TransferConfig, TransferDeadlines
from baton.kv_transfer.endpoint import Receiver, Sender, Transport
from baton.kv_transfer.heartbeat import Heartbeat
from baton.kv_transfer.layout import KVLayout
from baton.kv_transfer.protocol.local_messages import ContentWanted
from baton.kv_transfer.protocol.messages import FirstToken
from baton.kv_transfer.spawn import TransferStats, spawn_transfer
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.transport import (
    Began,
    Closed,
    FetchFailed,
    Injected,
    InjectStats,
    PagedKV,
    Released,
)
