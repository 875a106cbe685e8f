"""What the engine's thread tells the pump (`Sender`), in this order. Only the pump's thread does it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from baton.kv_transfer.protocol.messages import FirstToken, Reason


class Expect(NamedTuple):
    prefill_id: bytes


class Open(NamedTuple):
    prefill_id: bytes
    table: Any  # of `Pool.table`
    num_tokens: int
    states_at: Sequence[int] | None
    next_positions: Sequence[int]
    owner: Any


class Extend(NamedTuple):
    prefill_id: bytes
    table: Any


class Ready(NamedTuple):
    prefill_id: bytes
    layer: int | None  # None: all layers with KV
    start: int
    stop: int
    event: Any  # after which the layer may be read


class Serve(NamedTuple):
    pin_id: bytes
    table: Any
    start: int
    stop: int
    owner: Any
    event: Any  # after which the blocks may be read. None: now


class Commit(NamedTuple):
    prefill_id: bytes
    first_token: FirstToken


class Close(NamedTuple):
    prefill_id: bytes
    reason: Reason


class Stop(NamedTuple):
    pass


Order = Expect | Open | Extend | Ready | Serve | Commit | Close | Stop
