"""The attempts of a generation: at most one prefill and one decode at a time, each with a new id."""

from dataclasses import dataclass

from baton.router.policy import PrefillWork
from baton.router.workers.connection import WorkerConnection
from baton.rpc import worker_pb2 as pb


@dataclass(slots=True)
class PrefillAttempt:
    id: bytes
    worker: WorkerConnection
    work: PrefillWork
    base: int
    """Output tokens emitted before it, which is the output index of its own token."""
    handover: bool = True
    """A decode worker takes over the KV. False if the prefill's token is the last one."""
    queued: bool = False
    """The first decode for it is submitted when it starts."""
    within: float = 0.0
    """Seconds in which the prompt should be computed. 0: it is in no hurry."""
    sent: bool = False
    answered: bool = False
    over: bool = False
    """The decode worker has the KV. Only the prefill's token may still come."""
    replaces: bool = False
    """The decode worker was told to fetch from another prefill before."""
    refetched: bool = False
    """A second decode worker fetches the KV, which the prefill worker may have released."""

    def source(self, attempt: int) -> pb.PrefillSource:
        """`attempt`: its number among the sources of the request, from 1."""
        described = self.worker.description
        return pb.PrefillSource(
            prefill_id=self.id,
            kv_address=described.kv_address,
            incarnation=described.incarnation,
            attempt=attempt,
        )


@dataclass(slots=True)
class DecodeAttempt:
    id: bytes
    worker: WorkerConnection
    prefills: bool = False
    """The decode worker computes the prompt itself (overflow)."""
    joined: bool = False
    """Its first token came."""
