"""The adapters (LoRA) that clients of a router can name, as the workers report them.

All workers have the same ones, but for the time of a change. Then clients can name those of the newest set
that all attached workers have. So a request finds its adapter on the workers that compute its prompt and
decode it, and on those that it moves to when a worker dies.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable

from baton.router.workers.checks import RefusedWorker
from baton.rpc import worker_pb2 as pb

MOST = 1024
FINGERPRINT_BYTES = 16
_NAME = re.compile(r"[\x21-\x7e]{1,128}")
_SAME = "Give all workers the same --lora-modules, --advanced.max-loras and --advanced.max-cpu-loras."


class LacksAdapters(RefusedWorker):
    """A worker has older adapters than the others. It can take theirs."""


class KnownAdapters:
    """
    Attributes:
        newest: the set that all workers should have.
        served: those that clients can name, by name.
    """

    def __init__(self) -> None:
        self._renew(pb.AdapterSet())
        self.served: dict[str, pb.Adapter] = {}
        self._sets: dict[Hashable, frozenset[tuple[str, bytes]]] = {}  # by attached worker
        self._workers_with: Counter[tuple[str, bytes]] = Counter()

    def check(self, described: pb.WorkerDescription) -> None:
        """Raises RefusedWorker if a worker that attaches has other adapters than the accepted ones."""
        reported = set_of(described)
        if reported == self.newest:
            return
        _check(reported)
        adapters, newest = _named(reported.adapters), self._named_newest
        if adapters == newest or reported.revision > self.newest.revision:
            return
        if reported.revision < self.newest.revision:
            if described.max_adapters < len(newest):
                room = f"it has room for {described.max_adapters} adapters, and the others have {len(newest)}"
                raise RefusedWorker(room, _SAME)
            raise LacksAdapters("it lacks adapters of the other workers")
        if self._sets:
            raise RefusedWorker("its adapters are not those of the other workers", _SAME)

    def told(self, worker: Hashable, adapters: pb.AdapterSet) -> None:
        """An attached worker has these now. Raises RefusedWorker."""
        if adapters != self.newest:  # they were checked, and all workers have the same
            _check(adapters)
        self._forget(worker)
        if adapters.revision > self.newest.revision or not self._sets:
            self._renew(adapters)
        is_newest = adapters == self.newest
        now = self._sets[worker] = self._named_newest if is_newest else _named(adapters.adapters)
        self._workers_with.update(now)
        self._serve()

    def left(self, worker: Hashable) -> None:
        self._forget(worker)
        self._serve()

    def _renew(self, newest: pb.AdapterSet) -> None:
        self.newest, self._named_newest = newest, _named(newest.adapters)

    def _forget(self, worker: Hashable) -> None:
        if before := self._sets.pop(worker, None):
            self._workers_with -= Counter(before)

    def _serve(self) -> None:
        count, workers_with = len(self._sets), self._workers_with
        self.served = {
            each.name: each
            for each in self.newest.adapters
            if workers_with[each.name, each.fingerprint] == count
        }


def set_of(described: pb.WorkerDescription) -> pb.AdapterSet:
    return pb.AdapterSet(revision=described.adapters_revision, adapters=described.adapters)


def _named(adapters: Iterable[pb.Adapter]) -> frozenset[tuple[str, bytes]]:
    return frozenset((each.name, each.fingerprint) for each in adapters)


def _check(reported: pb.AdapterSet) -> None:
    if len(reported.adapters) > MOST:
        raise RefusedWorker(f"it reports {len(reported.adapters)} adapters, more than {MOST}")
    for each in reported.adapters:
        if not _NAME.fullmatch(each.name) or len(each.fingerprint) != FINGERPRINT_BYTES:
            raise RefusedWorker(
                f"it reports an adapter without a valid name or fingerprint: {each.name[:20]!r}"
            )
