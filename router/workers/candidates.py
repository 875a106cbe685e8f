"""The workers that the routing policies choose from, kept current with the reports of the connections."""

import random
import time
from collections.abc import Collection
from dataclasses import dataclass

from router.policy import (
    DecodeCaches,
    DecodeLoad,
    PrefillLoads,
    PrefillPolicy,
    PrefillRequest,
    PrefillWork,
)
from router.workers.connection import WorkerConnection
from router.workers.refusal import Refused
from rpc import CHUNK_TOKENS
from rpc import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """The prefill worker that the policy chose for a request."""

    worker: WorkerConnection
    work: PrefillWork
    """What the worker would compute."""
    seconds: float
    """Estimated time until the first token if the request is sent now."""


class Candidates:
    """All attached workers. Each has a row in the tables of the policies.

    Attributes:
        decodes: the decode workers that take new work.
    """

    def __init__(self, policy: PrefillPolicy) -> None:
        self.decodes: list[DecodeLoad] = []
        self._policy = policy
        self._loads = PrefillLoads()
        self._rows: dict[WorkerConnection, int] = {}
        self._prefills: dict[int, WorkerConnection] = {}
        self._decode_loads: dict[WorkerConnection, DecodeLoad] = {}
        self._decode_caches = DecodeCaches()
        self._decode_rows: dict[WorkerConnection, int] = {}
        self._choices = 0

    # ------------------------------------------------------------ reports of the connections

    def availability_changed(self, connection: WorkerConnection, *, serves: bool) -> None:
        """`serves`: the worker takes new work."""
        if connection.description.first_pool == pb.POOL_PREFILL:
            self._prefill_changed(connection, serves)
            return
        self._decode_changed(connection, serves)
        load = connection.attempts.load if serves else None
        if self._decode_loads.get(connection) is not load:
            self._decode_loads.pop(connection, None)
            if load is not None:
                self._decode_loads[connection] = load
            self.decodes = list(self._decode_loads.values())

    def _prefill_changed(self, connection: WorkerConnection, serves: bool) -> None:
        row = self._rows.get(connection)
        if connection.attached and row is None:
            block_size = connection.description.block_size
            row = self._loads.join(connection.address, block_size=block_size, now=time.monotonic())
            self._rows[connection], self._prefills[row] = row, connection
            self.prefill_reported(connection)
        elif not connection.attached and row is not None:
            self._loads.leave(row)
            del self._rows[connection], self._prefills[row]
            return
        if row is not None:
            self._loads.serve(row, serves)

    def _decode_changed(self, connection: WorkerConnection, serves: bool) -> None:
        row = self._decode_rows.get(connection)
        if connection.attached and row is None:
            assert connection.attempts.load is not None
            row = self._decode_rows[connection] = self._decode_caches.join(connection.attempts.load)
        elif not connection.attached and row is not None:
            self._decode_caches.leave(row)
            del self._decode_rows[connection]
            return
        if row is not None:
            self._decode_caches.serve(row, serves)

    def prefill_reported(self, connection: WorkerConnection) -> None:
        status = connection.status
        self._loads.reported(
            self._rows[connection],
            tokens_waiting=status.tokens_waiting,
            tokens_per_s=status.prefill_tokens_per_s,
            now=time.monotonic(),
        )

    def cache_changed(self, connection: WorkerConnection, events: pb.CacheEvents) -> None:
        """Raises Refused if the worker reports more chunks than fit into its blocks."""
        described = connection.description
        if described.first_pool == pb.POOL_PREFILL:
            row, index = self._rows[connection], self._loads.index
        else:
            row, index = self._decode_rows[connection], self._decode_caches.index
        if events.reset:
            index.clear(row)
        index.discard(row, events.evicted)
        most = described.num_blocks * -(-described.block_size // CHUNK_TOKENS)
        if index.reported(row) + len(events.added) > most:
            raise Refused(f"it reports more cached chunks than fit into {described.num_blocks} blocks")
        index.add(row, events.added)

    def prefill_sent(self, connection: WorkerConnection, work: PrefillWork) -> None:
        self._loads.sent(self._rows[connection], work, time.monotonic())

    def prefill_ended(self, connection: WorkerConnection, work: PrefillWork, *, computed: bool) -> None:
        self._loads.ended(self._rows[connection], work, computed=computed, now=time.monotonic())

    # ------------------------------------------------------------ choices

    def prefill_tokens_per_s(self) -> float:
        """Measured speed of all prefill workers together."""
        return self._loads.tokens_per_s()

    @property
    def has_prefill(self) -> bool:
        return self._loads.serving > 0

    def choose_prefill(
        self, key: int, chunks: list[int], tokens: int, avoid: Collection[str]
    ) -> PrefillTarget | None:
        """As `WorkerPool.choose_prefill`."""
        request = PrefillRequest(key=key, tokens=tokens, chunks=chunks, arrival=self._choices)
        avoided = (
            [row for connection, row in self._rows.items() if connection.address in avoid] if avoid else ()
        )
        snapshot = self._loads.snapshot(request, time.monotonic(), avoided)
        if snapshot is None:
            return None
        self._choices += 1
        row = self._policy(snapshot, request)
        work = PrefillWork(tokens - snapshot.cached.of(row), chunks)
        return PrefillTarget(self._prefills[row], work, snapshot.seconds(request, row))

    def cached_on_decode(
        self,
        chosen: WorkerConnection,
        *,
        chunks: list[int],
        tokens: int,
        rng: random.Random,
        avoid: Collection[str],
    ) -> list[tuple[str, int]]:
        """As `DecodeCaches.candidates`."""
        row = self._decode_rows[chosen]
        return self._decode_caches.candidates(row, chunks=chunks, tokens=tokens, rng=rng, avoid=avoid)
