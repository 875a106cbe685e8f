"""The two ends that move KV, as roles call them. The connector has the real ones, in vLLM's process.

vLLM itself tells the connector of requests that begin, and that it aborts. Here are the owners of events.
"""

import os
from asyncio import Task
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from baton.engine import EngineRequest, SamplingParams
from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer import Closed, ContentWanted, FetchFailed, FirstToken, Injected, Released
from baton.kv_transfer.protocol.messages import Reason
from baton.vllm_worker.attachment import Close, Commit, Pool, ToConnector
from baton.vllm_worker.engine import Host, VLLMEngine, VLLMRequest
from baton.vllm_worker.metadata import Source
from baton.vllm_worker.prefixes import Missing

_SERVED = ("acked", "finished")
"""Why a prefill is freed that has sent, or will send, its token to its router."""


class VLLMSender:
    """As `Sender`.

    Args:
        pin: shows a request with these `kv_transfer_params` to the connector.
    """

    def __init__(
        self, engine: VLLMEngine, host: Host, tell: Callable[[ToConnector], None],
        pin: Callable[[bytes, dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._host = host
        self._tell = tell
        self._pin = pin
        self._owners: dict[bytes, Any] = {}  # of what the connector may read
        self._events: list[Released | ContentWanted] = []

    def expect(self, prefill_id: bytes) -> None:
        """vLLM tells the connector."""

    def open(
        self, prefill_id: bytes, block_ids: Sequence[int], num_tokens: int, state_slot: int = 0,
        states_at: Sequence[int] | None = None, next_positions: Sequence[int] = (), owner: Any = None,
    ) -> None:  # fmt: skip
        self._owners[prefill_id] = owner

    def commit(self, prefill_id: bytes, first_token: FirstToken) -> None:
        self._tell(Commit(prefill_id, first_token))

    def close(self, prefill_id: bytes, reason: Reason) -> None:
        self._tell(Close(prefill_id, reason))

    def serve(
        self, pin_id: bytes, block_ids: Sequence[Any], start: int, stop: int, state_slot: int = 0,
        owner: Any = None,
    ) -> None:  # fmt: skip
        """`block_ids`: vLLM's names of the blocks, from that with `start` on."""
        self._owners[pin_id] = owner
        names, first = [name.hex() for name in block_ids], start // CHUNK_TOKENS
        params = {"pinned": names, "first_chunk": first, "chunks": stop // CHUNK_TOKENS - first}
        self._pin(pin_id, {"pin_id": pin_id.hex(), **params})

    def has_fetch(self, prefill_id: bytes) -> bool:
        """No prompt waits here for room that a held prefill has: vLLM preempts."""
        return False

    def poll(self) -> Sequence[Released | ContentWanted]:
        events, self._events = self._events, []
        return events

    def heard(self, event: Released | ContentWanted) -> None:
        """The connector says this. It may be of a prefill that has ended."""
        if isinstance(event, Released):
            live = self._engine.lives.get(event.prefill_id)
            if event.reason in _SERVED and live is not None and live.submission and not live.sampled:
                live.released = partial(self.heard, event)  # this socket was faster than vLLM's
                return
            if (owner := self._owners.pop(event.prefill_id, None)) is None:
                return
            event = structs.replace(event, owner=owner)
        self._events.append(event)
        self._host.soon()


@dataclass(slots=True)
class _Prefix:
    """A request of vLLM's that fetches a prefix."""

    owner: Any
    task: Task[None]
    came: Injected | None = None


class VLLMReceiver:
    """As `Receiver`. The connector names a fetch by an id that is drawn here: one that a router draws could
    be in use there, though its attempt has ended.

    Args:
        run: gives a request to vLLM, with `kv_transfer_params`. The task ends when vLLM has ended it.
        pool: vLLM's blocks.
        at_once: whether vLLM's scheduler hears of KV that has come before it gets a request that is given to
            it then. With several ranks it hears of it after a step.
    """

    def __init__(
        self,
        engine: VLLMEngine,
        host: Host,
        run: Callable[[EngineRequest, dict[str, Any]], Task[None]],
        pool: Pool,
        *,
        at_once: bool,
    ) -> None:
        self._engine = engine
        self._host = host
        self._run = run
        self._pool = pool
        self._at_once = at_once
        self._fetches: dict[bytes, tuple[VLLMRequest, Any]] = {}  # with owners, by the connector's id
        self._prefixes: dict[bytes, _Prefix] = {}  # by id of the fetch
        self._events: list[Injected | FetchFailed | Closed] = []

    @property
    def idle(self) -> bool:
        """Whether no prefix is fetched."""
        return not self._prefixes

    def fetch(
        self, decode_id: bytes, *, prefill_id: bytes, kv_address: str, incarnation: int, attempt: int,
        block_ids: Sequence[int], num_tokens: int, start: int = 0, state_slot: int = 0, owner: Any = None,
    ) -> None:  # fmt: skip
        """It replaces a fetch of the attempt that is under way, or whose end the role has not heard of."""
        live = self._engine.lives[decode_id]
        self._fetches.pop(live.fetch, None)
        self._events = [event for event in self._events if event.decode_id != decode_id]
        name = live.fetch = os.urandom(16)
        self._fetches[name] = live, owner
        params = Source(kv_address, incarnation, prefill_id).params
        params |= {"decode_id": name.hex(), "attempt": attempt}
        if live.request.images:
            params["unseen_until"] = live.request.images[-1].stop
        self._engine.submit(live, params)

    def fetch_content(
        self, fetch_id: bytes, *, chunks: Sequence[bytes], first_chunk: int, kv_address: str,
        incarnation: int, block_ids: Sequence[int], state_slot: int = 0, owner: Any = None,
    ) -> None:  # fmt: skip
        """`owner`: a `PrefixFetch`. vLLM's cache may have less of the prompt than it was thought to have: the
        connector gets the names from the beginning on."""
        missing: Missing = owner.into.missing
        request, stop = missing.request, first_chunk + len(chunks)
        if self._pool.bounded:
            # vLLM gives blocks for windows and states before the source says how much it has.
            known = owner.place.source.chunks * CHUNK_TOKENS // self._pool.block_size
            stop = min(stop, known * self._pool.block_size // CHUNK_TOKENS)
            if stop <= first_chunk:
                self._report(FetchFailed(fetch_id, "gone", owner))
                return
        tokens = [*request.prompt_ids, *request.output_ids][: stop * CHUNK_TOKENS + 1]
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        prefix = replace(request, id=fetch_id, prompt_ids=tokens, output_ids=[], sampling=sampling)
        names = [name.hex() for name in missing.names[:stop]]
        params = Source(kv_address, incarnation, bytes(16)).params
        params |= {"decode_id": fetch_id.hex(), "attempt": 0, "chunks": names}
        task = self._run(prefix, params)
        self._prefixes[fetch_id] = _Prefix(owner, task)
        task.add_done_callback(lambda _: self._ran(fetch_id))

    def cancel(self, decode_id: bytes) -> None:
        if (prefix := self._prefixes.get(decode_id)) is not None:
            prefix.task.cancel()
        elif (live := self._engine.lives.get(decode_id)) is not None and live.fetch in self._fetches:
            _, owner = self._fetches.pop(live.fetch)
            self._report(Closed(decode_id, owner))

    def began(self, decode_id: bytes) -> bool:
        """The connector does not tell."""
        return False

    def poll(self, spare: float) -> Sequence[Injected | FetchFailed | Closed]:
        events, self._events = self._events, []
        return events

    def heard(self, event: Injected | FetchFailed | Closed) -> None:
        """The connector says this. It may be of a fetch that nothing here waits for."""
        if (prefix := self._prefixes.get(event.decode_id)) is not None:
            if isinstance(event, Injected) and not self._at_once and prefix.came is None:
                prefix.came = event
            else:
                del self._prefixes[event.decode_id]
                if not isinstance(event, Injected):
                    prefix.task.cancel()  # as `VLLMEngine.withdraw`
                self._report(structs.replace(event, owner=prefix.owner))
        elif (fetch := self._fetches.pop(event.decode_id, None)) is not None:
            live, owner = fetch
            if isinstance(event, Closed):
                event = FetchFailed(event.decode_id, "its KV did not come in time")
            if isinstance(event, FetchFailed):
                self._engine.withdraw(live)
            self._report(structs.replace(event, decode_id=live.request.id, owner=owner))

    def _report(self, event: Injected | FetchFailed | Closed) -> None:
        self._events.append(event)
        self._host.soon()

    def _ran(self, fetch_id: bytes) -> None:
        """vLLM has ended the request. Unless a report came before, it has fetched nothing."""
        if (prefix := self._prefixes.get(fetch_id)) is not None:
            self.heard(prefix.came or Closed(fetch_id))
