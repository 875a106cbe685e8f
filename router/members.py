"""The ready workers in the form that policies read: built when workers come or go, then kept current."""

from collections.abc import Iterable

from router.connection import WorkerConnection
from router.policy import DecodeLoad, Ring
from rpc import worker_pb2 as pb


class Members:
    """Loads of all ready workers.

    Attributes:
        ring: the prefill workers.
        prefill_tokens: tokens that wait at each of them; `prefill_total` is the sum.
        decodes: the decode workers.
        capacity: positions that one request may have anywhere; None while no worker is known.
    """

    def __init__(self, ready: Iterable[WorkerConnection], capacity: int | None) -> None:
        workers = list(ready)
        prefills = [c for c in workers if c.description.role == pb.ROLE_PREFILL]
        self.ring = Ring([c.address for c in prefills])
        self.prefill_tokens = {c.address: _waiting_tokens(c) for c in prefills}
        self.prefill_total = sum(self.prefill_tokens.values())
        self._decode_loads = {
            c.address: _decode_load(c) for c in workers if c.description.role == pb.ROLE_DECODE
        }
        self.decodes = list(self._decode_loads.values())
        self.capacity = capacity

    def update(self, connection: WorkerConnection) -> None:
        """Takes in what changed at one worker."""
        address = connection.address
        if address in self.prefill_tokens:
            tokens = _waiting_tokens(connection)
            self.prefill_total += tokens - self.prefill_tokens[address]
            self.prefill_tokens[address] = tokens
        elif address in self._decode_loads:
            _update(self._decode_loads[address], connection)


def _waiting_tokens(connection: WorkerConnection) -> int:
    # What it reports includes other routers' work, but is up to a second old.
    return max(connection.waiting_tokens, connection.status.tokens_waiting)


def _decode_load(connection: WorkerConnection) -> DecodeLoad:
    described = connection.description
    load = DecodeLoad(
        worker=connection.address,
        block_size=described.block_size,
        blocks_total=described.num_blocks,
        max_running=described.max_num_seqs,
    )
    _update(load, connection)
    return load


def _update(load: DecodeLoad, connection: WorkerConnection) -> None:
    status = connection.status
    load.blocks_free = 0 if connection.full else status.blocks_free - connection.blocks_taken
    load.running = max(connection.attempts, status.requests_running + status.reservations)
