"""What the roles call of an engine, and of the two ends that move its KV.

Baton's engine, its `Sender` and its `Receiver` have more. A worker with another engine implements this.

A *live request* is the engine's own object for a request (`Live`). It knows its owner, an `EngineAttempt`.
This is told what happens: `open` when a handover begins, `sampled` for each token, `lost` if the request ends
otherwise. Whatever uses the memory of the request has a lease of the owner.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from baton.engine import EngineRequest, Logprobs, Output
from baton.kv_transfer import Began, Closed, ContentWanted, FetchFailed, Injected, Released
from baton.kv_transfer.protocol.messages import FirstToken, Reason


class Live(Protocol):
    """What attempts read of a live request."""

    handed_over: bool
    """Another worker has its KV."""
    goes_on: bool
    """A decode of this worker takes it over after its first token."""

    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def num_cached(self) -> int:
        """Positions that the prefix cache had."""
        ...

    @property
    def state_slot(self) -> int: ...
    @property
    def images(self) -> Any:
        """`PromptImages`. None: it has none, or the engine does not tell of them."""
        ...


class Exchange(Protocol):
    """As `PrefixExchange`. An engine has its own `MissingPrefix`, `Import` and `Pin`."""

    def missing(self, request: EngineRequest, most: int, *, remnant: bool = False) -> Any: ...
    def start_import(self, missing: Any, /) -> Any: ...
    def bring(self, chunks: Sequence[bytes], first_chunk: int, then: Callable[[], None]) -> bool: ...
    def pin_prefix(self, chunks: Sequence[bytes], first_chunk: int) -> Any: ...


class Engine(Protocol):
    """As those of Baton's `Engine`. A live request is a `Live` of this engine."""

    @property
    def prefix_exchange(self) -> Exchange | None:
        """None: the engine has no prefix cache, or prefixes of its model do not move."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def blocks_free(self) -> int: ...
    @property
    def is_moving_memory(self) -> bool:
        """Whether steps make room: then a refused request asks again."""
        ...

    def add(self, request: EngineRequest, *, handover: bool, owner: Any) -> Any: ...
    def start(self, request: EngineRequest, owner: Any) -> Any: ...
    def reserve(self, request: EngineRequest, owner: Any) -> Any: ...
    def extend_reservation(self, live: Any, output_ids: Sequence[int]) -> bool: ...
    def join(self, live: Any, token: int, logprobs: Logprobs | None = None) -> Output: ...
    def resume(self, live: Any, request_id: bytes, owner: Any) -> Output | None: ...
    def cancel(self, live: Any) -> None: ...
    def prompt_seconds(self, tokens: int, uncached: int, position: int) -> float: ...


class SendingEnd(Protocol):
    """As those of `Sender`. Events go to their owners."""

    def expect(self, prefill_id: bytes) -> None: ...
    def open(
        self, prefill_id: bytes, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0,
        states_at: Sequence[int] | None = None, next_positions: Sequence[int] = (), owner: Any = None,
    ) -> None: ...  # fmt: skip
    def commit(self, prefill_id: bytes, first_token: FirstToken) -> None: ...
    def close(self, prefill_id: bytes, reason: Reason) -> None: ...
    def serve(
        self, pin_id: bytes, block_ids: Sequence[int], start: int, stop: int, state_slot: int = 0,
        owner: Any = None,
    ) -> None: ...  # fmt: skip
    def has_fetch(self, prefill_id: bytes) -> bool: ...
    def poll(self) -> Sequence[Released | ContentWanted]: ...


class ReceivingEnd(Protocol):
    """As those of `Receiver`."""

    def fetch_content(
        self, fetch_id: bytes, *, chunks: Sequence[bytes], first_chunk: int, kv_address: str,
        incarnation: int, block_ids: Sequence[int], state_slot: int = 0, owner: Any = None,
    ) -> None: ...  # fmt: skip
    def cancel(self, decode_id: bytes, /) -> None: ...
    def began(self, decode_id: bytes, /) -> bool: ...
    def fetch(
        self, decode_id: bytes, *, prefill_id: bytes, kv_address: str, incarnation: int, attempt: int,
        block_ids: Sequence[int], num_tokens: int, start: int = 0, state_slot: int = 0, owner: Any = None,
    ) -> None: ...  # fmt: skip
    def poll(self, spare: float) -> Sequence[Injected | FetchFailed | Closed | Began]: ...
