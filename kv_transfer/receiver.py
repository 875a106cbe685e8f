"""The engine's half of the receiving side."""

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
class InjectStats:
    bytes: int
    frames: int
    transfer_seconds: float  # first frame's header seen → last frame verified; 0 with no frame
    exposed_seconds: float  # COMMIT known → injected: what the forward did not hide
    fetch_seconds: float  # fetch() → injected

    @property
    def hidden_share(self) -> float:
        """1 − exposed ÷ transfer time, within 0…1."""
        if self.transfer_seconds <= 0:
            return 1.0
        return min(1.0, max(0.0, 1.0 - self.exposed_seconds / self.transfer_seconds))


@dataclass(frozen=True, slots=True)
class Injected:
    """Every position asked for is in its block, verified. The request may join the next step."""

    decode_id: bytes
    first_token: FirstToken
    stats: InjectStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The KV will not come from this prefill. Nothing writes into the blocks; fetch() may be called again."""

    decode_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """After cancel(): nothing writes into the blocks any more."""

    decode_id: bytes


class KVReceiver:
    """Fetches KV into reserved blocks. All methods are for the engine thread; none blocks."""

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

    def fetch(
        self,
        decode_id: bytes,
        *,
        prefill_id: bytes,
        kv_address: str,
        incarnation: int,
        block_ids: Sequence[int],
        num_tokens: int,
        start: int = 0,
    ) -> None:
        """FETCH positions [start, num_tokens) into `block_ids`; replaces a live fetch of the same decode id."""
        raise NotImplementedError

    def cancel(self, decode_id: bytes) -> None:
        """Idempotent. poll() reports Closed for an id that was live, and nothing else for it afterwards."""
        raise NotImplementedError

    def poll(self) -> list[Injected | Failed | Closed]:
        """Take what arrived, write it into its blocks, report what ended. Call once per step, or when readable."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Readable when poll() has something."""
        raise NotImplementedError

    @property
    def poll_within(self) -> float | None:
        """Poll again after this many seconds although fileno() is silent: scatters are under way. None: no need."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """No fetch open, no slot held by this side."""
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError
