"""What a generation asks workers for: one prefill and one decode at a time, each with a fresh id."""

from dataclasses import dataclass

from router.policy import PrefillWork
from router.workers.connection import WorkerConnection
from rpc import worker_pb2 as pb


@dataclass(slots=True)
class Prefill:
    id: bytes
    worker: WorkerConnection
    work: PrefillWork
    base: int  # output tokens that were emitted before it: the index of its own token
    handover: bool = True
    sent: bool = False
    answered: bool = False
    over: bool = False  # decode has what it needs of it; only its token may still be on the way
    replaces: bool = False  # decode was first pointed at another one
    refetched: bool = False  # decode is the second to ask for its KV, which may be gone

    @property
    def source(self) -> pb.PrefillSource:
        described = self.worker.description
        return pb.PrefillSource(
            prefill_id=self.id, kv_address=described.kv_address, incarnation=described.incarnation
        )


@dataclass(slots=True)
class Decode:
    id: bytes
    worker: WorkerConnection
    here: bool = False  # it prefills too
    joined: bool = False
