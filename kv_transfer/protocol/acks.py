"""ACKs that a peer may lack: those that wait for a session, and those sent recently in the present one.

Nothing confirms an ACK. A second ACK does no harm. A prefill that gets none keeps its blocks until the hold
deadline. So ACKs that may be lost with a session are sent again in the next one. Pure.
"""

from baton.kv_transfer.config import TransferDeadlines

# Seconds, on top of `peer_dead` twice: for two looks at the clock (0.25 each), and for bytes on their way.
_MARGIN = 2.0
_MOST = 4096  # of either kind; the oldest are forgotten first


class Acks:
    """The ACKs of one peer."""

    def __init__(self, deadlines: TransferDeadlines) -> None:
        self.waiting: dict[bytes, float] = {}  # transfer id → when it was injected; oldest first
        self._said: dict[bytes, tuple[float, float]] = {}  # → when it was injected, when said; oldest first
        self._hold = deadlines.hold
        # If the network breaks, the peer notices after `peer_dead`, and closes. If its FIN is lost, too, this
        # side notices `peer_dead` after the last byte of the peer.
        self._unnoticed = 2 * deadlines.peer_dead + _MARGIN

    def injected(self, transfer_id: bytes, now: float) -> None:
        self.waiting[transfer_id] = now
        self._bound()

    def say(self, now: float) -> list[bytes]:
        """Returns the ACKs that wait. The caller sends them in a session that is up."""
        ids = list(self.waiting)
        self._said |= {transfer_id: (injected, now) for transfer_id, injected in self.waiting.items()}
        self.waiting.clear()
        self._bound()
        return ids

    def lost(self, now: float) -> None:
        """The session was lost, perhaps with ACKs sent recently. These wait for the next session."""
        self.expire(now)
        said = {transfer_id: injected for transfer_id, (injected, _) in self._said.items()}
        self._said.clear()
        self.waiting = said | self.waiting
        self._bound()

    def expire(self, now: float) -> None:
        """Forgets ACKs that must have arrived, and those whose prefill is no longer held."""
        while self._said:
            transfer_id, (injected, said) = next(iter(self._said.items()))
            if now < min(said + self._unnoticed, injected + self._hold):
                break
            del self._said[transfer_id]
        while self.waiting and now >= next(iter(self.waiting.values())) + self._hold:
            del self.waiting[next(iter(self.waiting))]

    def clear(self) -> None:
        self.waiting.clear()
        self._said.clear()

    def _bound(self) -> None:
        for ids in (self.waiting, self._said):
            while len(ids) > _MOST:
                del ids[next(iter(ids))]
