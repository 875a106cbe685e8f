"""Which transfer's slice is next. Pure; only the pump of a sender uses it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from baton.kv_transfer.endpoint.outgoing import OutgoingTransfer


class Turns:
    """Round robin over the open transfers. Those whose prefill is launched up to its end come first: clients
    wait for their second tokens. The others have time until their prefills end."""

    def __init__(self, num_layers: int) -> None:
        self._last_layer = num_layers - 1
        self._ring: deque[OutgoingTransfer] = deque()  # next in turn first

    def add(self, transfer: OutgoingTransfer) -> None:
        self._ring.append(transfer)

    def remove(self, transfer: OutgoingTransfer) -> None:
        self._ring.remove(transfer)

    def next(self, passed: Callable[[Any], bool], *, ahead: bool) -> OutgoingTransfer | None:
        """The first transfer with credit, window and a slice that is ready. With `ahead`, a slice of the last
        layer need not be ready. A transfer that is skipped keeps its turn."""
        for transfer in sorted(self._with_room(), key=lambda t: not t.prefill.launched):
            piece, event = transfer.pending[0]
            if event is None or (ahead and piece.layer == self._last_layer) or passed(event):
                self._ring.remove(transfer)
                self._ring.append(transfer)
                return transfer
        return None

    @property
    def waiting(self) -> bool:
        """Whether a slice with credit and window waits to be ready. Ask only after `next` found nothing."""
        return any(True for _ in self._with_room())

    @property
    def urgent(self) -> bool:
        """Whether KV of a prefill that is launched up to its end has not left yet."""
        return any(t.prefill.launched and (t.pending or t.prefill.gathers) for t in self._ring)

    def _with_room(self) -> Iterator[OutgoingTransfer]:
        return (t for t in self._ring if t.pending and t.account.has_room)
