"""The engine's half of the sending side."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.arena import Arena
from kv_transfer.layout import KVLayout
from kv_transfer.messages import FirstToken

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Released:
    """The prefill's blocks may be freed: nothing reads them any more. Exactly once for each `open`."""

    prefill_id: bytes
    reason: str  # "acked" | "deadline" | what close() was given


class KVSender:
    """Serves the KV of held prefills to whoever FETCHes them. Owns the pump thread and its end of `channel`.

    All methods are for the engine thread; none blocks.
    """

    def __init__(
        self,
        channel: socket.socket,
        arena: Arena,
        kv_cache: Sequence[torch.Tensor],
        block_size: int,
        layout: KVLayout,
        device: str = "cpu",
        trace_path: str | None = None,
    ) -> None:
        raise NotImplementedError

    def expect(self, prefill_id: bytes) -> None:
        """This prefill is accepted but not scheduled yet: its FETCH waits without the unseen-id deadline."""
        raise NotImplementedError

    def open(self, prefill_id: bytes, block_ids: Sequence[int], num_tokens: int) -> None:
        """The prefill of positions [0, num_tokens) starts in these blocks, which stay until `Released`."""
        raise NotImplementedError

    def ready(self, prefill_id: bytes, layer: int | None, start: int, stop: int) -> None:
        """K/V of [start, stop) in `layer` (None: all layers) is written once the current stream gets here."""
        raise NotImplementedError

    def commit(self, prefill_id: bytes, first_token: FirstToken) -> None:
        """All positions of all layers are ready, and this is the first token. Hold until ACK."""
        raise NotImplementedError

    def close(self, prefill_id: bytes, reason: str) -> None:
        """The engine's own end ("finished", "cancelled", "gone"); idempotent, also for ids never opened."""
        raise NotImplementedError

    def poll(self) -> list[Released]:
        raise NotImplementedError

    def has_fetch(self, prefill_id: bytes) -> bool:
        """A decode worker asks for it (also true before `open`)."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Readable when poll() has something."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Nothing open, every arena slot home."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Stop and join the pump; close the channel."""
        raise NotImplementedError
