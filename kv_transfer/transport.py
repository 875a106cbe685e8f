"""The interfaces of a transport: what a worker's engine process uses of KV transfer, over any wire.

A `Transport` opens a `Sender`, which reads KV of the worker's cache, and a `Receiver`, which writes KV to it.
Roles see only these interfaces. Slots, credits, lanes and copies belong to the transport. All methods are for
the engine thread, and none blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.kv_transfer.layout import KVLayout, Range
from baton.kv_transfer.protocol.messages import FirstToken, Reason

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The KV cache of an engine, or of one rank of it. The engine owns the tensors."""

    layers: Sequence[torch.Tensor]
    """Of each layer with KV: [2 (K, V), num_blocks, block_size, KV heads of this rank, head_dim]."""
    block_size: int
    """Tokens."""
    layout: KVLayout
    device: str
    """Its name in torch."""
    rank: int = 0
    ranks: int = 1
    layers_ready: Callable[[], int] = lambda: 0
    """With several ranks: how many layers are ready so far, over all steps that hand over KV. All ranks count
    the same layers."""
    scales: Sequence[torch.Tensor] = ()
    """Of each layer with KV, if the layout has scales: [2, num_blocks, KV heads of this rank, block_size]
    float32."""
    states: Sequence[Sequence[torch.Tensor]] = ()
    """Of each state of the layout, of each layer with states: [slots, rows, heads of this rank, head_dim].
    Heads and their numbers are neighbours. The slots and rows need not be."""

    @property
    def heads(self) -> dict[int | None, Range]:
        """The heads of this rank, of each part of the layout."""
        return {state: part.heads_of(self.rank, self.ranks) for state, part in self.layout.parts.items()}


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing reads the prefill's blocks any more. Reported exactly once for each `open` and `serve`."""

    prefill_id: bytes  # or the pin id given to `serve`
    reason: str  # "acked" | "deadline" | "reused" (its id) | what close() was given


@dataclass(frozen=True, slots=True)
class ContentWanted:
    """A peer wants the KV of these chunks of 64 tokens. The answer is `serve` for the first of them that the
    prefix cache has, or `close` with the pin id."""

    pin_id: bytes
    chunks: Sequence[bytes]  # names (`content`)
    first_chunk: int  # its position in the prompt, in chunks


@dataclass(frozen=True, slots=True)
class InjectStats:
    """Times are time.monotonic(), which all processes of a host share."""

    bytes: int  # as they came
    tokens: int
    frames: int
    fetch_at: float  # fetch()
    asked_at: float  # the FETCH left: later, if a session had to be made first
    first_frame_at: float  # its header seen; with no frame this and the next two are injected_at
    last_frame_at: float  # verified
    scatter_at: float  # the first copy into the blocks was enqueued
    commit_at: float  # COMMIT known: prefill has its first token
    injected_at: float  # the last copy is over

    @property
    def transfer_seconds(self) -> float:
        return self.last_frame_at - self.first_frame_at

    @property
    def injection_seconds(self) -> float:
        return self.injected_at - self.scatter_at

    @property
    def exposed_seconds(self) -> float:
        """The part of the transfer that the prefill's computation did not hide."""
        return self.injected_at - self.commit_at

    @property
    def fetch_seconds(self) -> float:
        return self.injected_at - self.fetch_at

    @property
    def hidden_share(self) -> float:
        """1 − exposed ÷ transfer time, within 0…1."""
        if self.transfer_seconds <= 0:
            return 1.0
        return min(1.0, max(0.0, 1.0 - self.exposed_seconds / self.transfer_seconds))


@dataclass(frozen=True, slots=True)
class Injected:
    """Every position of the fetch is in its block, verified. The request may join the next step."""

    decode_id: bytes
    first_token: FirstToken
    stats: InjectStats


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The KV will not come from this prefill. Nothing writes into the blocks; fetch() may be called again."""

    decode_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Reported after cancel(): nothing writes into the blocks any more."""

    decode_id: bytes


class Sender(Protocol):
    """Serves the KV of held prefills to the decode workers that fetch them."""

    def expect(self, prefill_id: bytes) -> None:
        """The prefill is accepted but not scheduled yet. Its FETCH waits without a deadline."""

    def open(self, prefill_id: bytes, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0) -> None:
        """The prefill of positions [0, num_tokens) starts in these blocks, which stay until `Released`. So
        does the slot of its states, if the layout has states."""

    def ready(self, prefill_id: bytes, layer: int | None, start: int, stop: int) -> None:
        """K and V of [start, stop) are written when the current stream gets here. `layer` None: of all layers
        with KV. Of a layer with states: they cover [0, stop). They are final if this is the whole prefill."""

    def commit(self, prefill_id: bytes, first_token: FirstToken) -> None:
        """All positions of all layers are ready. The prefill is held until the decode worker's ACK."""

    def close(self, prefill_id: bytes, reason: Reason) -> None:
        """The engine ends the prefill. Idempotent, also for ids that were never opened."""

    def serve(self, pin_id: bytes, block_ids: Sequence[int], start: int, stop: int) -> None:
        """Sends positions [start, stop) of these blocks, which are complete and stay until `Released`.

        This answers `ContentWanted`. The positions are those of its first chunks."""

    def poll(self) -> list[Released | ContentWanted]:
        """What came since the last call. Raises RuntimeError if a thread of the sender died."""

    def has_fetch(self, prefill_id: bytes) -> bool:
        """A decode worker asks for the prefill. This may be true before `open`."""

    def fileno(self) -> int:
        """Readable when poll() has something."""

    @property
    def idle(self) -> bool:
        """No prefill is open or expected, and no memory of the transport is in use."""

    def shutdown(self) -> None:
        """Stops reading blocks and closes the sender."""


class Receiver(Protocol):
    """Fetches KV into reserved blocks."""

    def fetch(
        self,
        decode_id: bytes,
        *,
        prefill_id: bytes,
        kv_address: str,
        incarnation: int,
        attempt: int,
        block_ids: Sequence[int],
        num_tokens: int,
        start: int = 0,
        state_slot: int = 0,
    ) -> None:
        """Fetches positions [start, num_tokens) into `block_ids`, which no enqueued step may touch. If the
        layout has states, those that cover [0, num_tokens) come, too, into `state_slot`.

        It replaces a fetch of this decode id that is live, or whose failure is not reported yet. `attempt`
        numbers the decode attempts of a request: a fetch of a newer attempt replaces those of older ones.
        """

    def fetch_content(
        self,
        fetch_id: bytes,
        *,
        chunks: Sequence[bytes],
        first_chunk: int,
        kv_address: str,
        incarnation: int,
        block_ids: Sequence[int],
    ) -> None:
        """Fetches chunks of 64 tokens from the prefix cache of a worker, as far as it has them.

        `chunks`: at most `MAX_CHUNKS` names (`content`). `first_chunk`: the position of the first one in the
        prompt, in chunks. The events of `poll` have `fetch_id` as their `decode_id`. Injected has the bytes
        of the chunks that came, from the first on, and a first token without meaning. A fetch that fails is
        not tried again."""

    def cancel(self, decode_id: bytes) -> None:
        """Idempotent. poll() reports Closed for an id that was live, and nothing else for it afterwards."""

    def poll(self, spare: float = math.inf) -> list[Injected | FetchFailed | Closed]:
        """Writes what arrived into its blocks and returns what ended. Call it once a step, or when readable.

        `spare`: seconds until the next step must be launched. Infinite: no step is computed now.
        """

    def began(self, decode_id: bytes) -> bool:
        """Whether KV of a live fetch has arrived, or will not come any more because nothing is missing."""

    @property
    def next_injection(self) -> float:
        """When the first of the fetches should have all of its KV (time.monotonic()), as far as its layers
        tell. Infinite: not known."""

    def fileno(self) -> int:
        """Readable when poll() has something."""

    @property
    def poll_within(self) -> float | None:
        """Call poll() within these seconds even if fileno() is not readable. None: no limit."""

    @property
    def idle(self) -> bool:
        """No fetch is open, and no memory of the transport is in use on this side."""

    def shutdown(self) -> None:
        """Closes the receiver. Nothing is written into blocks afterwards."""


class Transport(Protocol):
    """The engine process's half of a transport."""

    def sender(self, kv: PagedKV) -> Sender: ...

    def receiver(self, kv: PagedKV) -> Receiver: ...
