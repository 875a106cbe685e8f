"""Moves the KV of vLLM's requests: the connector's half in the process with the model.

Threads: vLLM's calls everything of `Transfers`. The sender has a pump thread of its own. Another thread
(`Attendant`) has the receiver, so KV is injected while vLLM computes. It also reads what the sender reports
and what the worker wants, and tells the worker at once: vLLM may have no step soon.

The transfer process is a child of vLLM (`TransferProcess`), or that of a worker (`attachment`).
"""

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer import (
    Began,
    Closed,
    ContentWanted,
    FetchFailed,
    FirstToken,
    Heartbeat,
    Injected,
    PagedKV,
    Receiver,
    Released,
    Sender,
    Transport,
)
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.wait import wait
from baton.vllm_worker.attachment import Close, Commit, FromConnector, OnDevice
from baton.vllm_worker.metadata import BlockTable, Fetch, Pinned, StepMetadata, block_ids, log

Event = Injected | FetchFailed | Closed | Released


@dataclass(slots=True, eq=False)
class SentPrefill:
    """A prefill of a request, until vLLM and the sender need its blocks no more. The owner of `Released`."""

    request_id: str
    has_blocks: bool = False
    """vLLM has ended the request, and given its blocks to this connector."""
    released: bool = False


@dataclass(slots=True, eq=False)
class Fetching:
    """A fetch, while blocks may be written. The owner of its events."""

    fetch: Fetch
    deadline: float | None
    """time.monotonic(). Infinite: there is none, or it has passed. None: the request has ended."""


class Attendant:
    """The thread that has the receiver. Its methods may be called from vLLM's thread."""

    def __init__(
        self, open_receiver: Callable[[], Receiver], sender: Sender, tables: Sequence[BlockTable],
        vocabulary: int, worker: Channel | None,
    ) -> None:  # fmt: skip
        """`tables`: of the groups of layers. `vocabulary`: tokens of the model. `worker`: to the engine
        process of a worker, which is told of each event."""
        self._sender = sender
        self._tables = tables
        self._vocabulary = vocabulary
        self._worker = worker
        self._orders: queue.SimpleQueue[Callable[[Receiver], object] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, args=(open_receiver,), name="baton kv", daemon=True)
        self._thread.start()

    def order(self, call: Callable[[Receiver], object] | None) -> None:
        """Calls this in the thread. None: ends the thread."""
        self._orders.put(call)
        os.eventfd_write(self._wake, 1)

    def fetch(self, owner: Fetching) -> None:
        fetch, source = owner.fetch, owner.fetch.source
        if fetch.chunks:
            # The first chunk may begin in blocks that are cached here: they are not written again.
            ids = block_ids(self._tables, fetch.blocks, fetch.stop, fetch.start)
            first = fetch.start // CHUNK_TOKENS
            self.order(
                lambda receiver: receiver.fetch_content(
                    fetch.decode_id, chunks=fetch.chunks[first:], first_chunk=first,
                    kv_address=source.kv_address, incarnation=source.incarnation, block_ids=ids, owner=owner,
                )
            )  # fmt: skip
            return
        ids = block_ids(self._tables, fetch.blocks, fetch.stop)
        self.order(
            lambda receiver: receiver.fetch(
                fetch.decode_id, prefill_id=source.prefill_id, kv_address=source.kv_address,
                incarnation=source.incarnation, attempt=fetch.attempt, block_ids=ids,
                num_tokens=fetch.stop, start=fetch.start, owner=owner,
            )
        )  # fmt: skip

    def cancel(self, decode_id: bytes) -> None:
        self.order(lambda receiver: receiver.cancel(decode_id))

    def decline(self, fetch: Fetch) -> None:
        """Fetches nothing of a prefill, whose server then frees its blocks, as after any fetch. In a worker,
        routers end prefills."""
        source = fetch.source
        if self._worker is None:
            self.order(
                lambda receiver: receiver.fetch(
                    os.urandom(16), prefill_id=source.prefill_id, kv_address=source.kv_address,
                    incarnation=source.incarnation, attempt=fetch.attempt, block_ids=(), num_tokens=0,
                )
            )  # fmt: skip

    def tell(self, messages: Sequence[FromConnector]) -> None:
        """Sends messages to the engine process."""
        worker = self._worker
        if worker is not None:  # else a client has asked for them
            self.order(lambda _: [worker.post(message) for message in messages])

    def events(self) -> list[Event]:
        """Returns what came since the last call. Raises RuntimeError if the thread has ended."""
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Exception):
                    raise RuntimeError("KV cannot be moved any more") from event
                events.append(event)
        return events

    def close(self) -> None:
        self.order(None)
        self._thread.join()

    def _run(self, open_receiver: Callable[[], Receiver]) -> None:
        try:
            receiver, worker = open_receiver(), self._worker
            watched = [self._wake, receiver.fileno(), self._sender.fileno()]
            if worker is not None:
                watched.append(worker.fileno())
            while True:
                full = [worker.fileno()] if worker is not None and worker.full else []
                if self._wake in wait(watched, receiver.poll_within, full) and self._woken(receiver):
                    receiver.shutdown()
                    return
                for event in (*map(self._checked, receiver.poll()), *self._sender.poll()):
                    self._report(event)
                if worker is not None:
                    worker.flush()
                    for message in worker.receive():
                        match message:
                            case Close(prefill_id, reason):
                                self._sender.close(prefill_id, reason)
                            case Commit(prefill_id, first_token):
                                self._sender.commit(prefill_id, first_token)
        except Exception as error:  # noqa: BLE001  any error: `events` raises it in vLLM's thread
            self._events.put(error)

    def _report(self, event: Event | Began | ContentWanted) -> None:
        worker = self._worker
        if not isinstance(event, ContentWanted):
            assert not isinstance(event, Began), "vLLM computes all of a prompt, or nothing"
            self._events.put(event)
            if worker is not None:
                worker.post(structs.replace(event, owner=None))
        elif worker is not None:
            worker.post(event)
        else:  # no router tells the other server what is cached here
            self._sender.close(event.pin_id, "gone")

    def _checked(self, event: Event | Began) -> Event | Began:
        if not isinstance(event, Injected):
            return event
        if defect := event.first_token.defect(self._vocabulary):
            return FetchFailed(event.decode_id, defect, event.owner)
        if len(self._tables) > 1 and event.owner is not None:
            # vLLM has given blocks of windows and states for the end that was asked for.
            fetch: Fetch = event.owner.fetch
            if fetch.chunks and fetch.behind(event.stats.tokens) < fetch.stop:
                return FetchFailed(event.decode_id, "gone", event.owner)
        return event

    def _woken(self, receiver: Receiver) -> bool:
        """Carries out the orders. Returns whether the thread ends."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._orders.empty():
            order = self._orders.get()
            if order is None:
                return True
            order(receiver)
        return False


class Transfers:
    """Sends and fetches what the metadata of vLLM's scheduler says."""

    def __init__(
        self,
        kv: PagedKV,
        tables: Sequence[BlockTable],
        transport: Transport,
        heartbeat: Heartbeat,
        *,
        timeout: float,
        vocabulary: int,
        worker: Channel | None = None,
    ) -> None:
        """`timeout`: seconds for the KV of a request to come. In a worker it waits for its prompt as long as
        the router lets it. `tables`, `vocabulary`, `worker`: as in `Attendant`."""
        self._layers_ready = 0
        kv = replace(kv, layers_ready=lambda: self._layers_ready)
        self._tables = tables
        self._timeout = timeout if worker is None else math.inf
        self._heartbeat = heartbeat
        self._ranks = transport.ranks
        self._sender = transport.sender(kv)
        self._attendant = Attendant(lambda: transport.receiver(kv), self._sender, tables, vocabulary, worker)
        self._metadata = StepMetadata()
        # Sending.
        self._prefills: dict[bytes, SentPrefill] = {}  # by id
        self._sent: set[str] = set()  # requests whose blocks nothing reads any more, until vLLM is told
        # Fetching.
        self._fetches: dict[bytes, Fetching] = {}  # by decode id
        self._fetch_ends: list[FetchFailed | Closed] = []  # that vLLM is not told of yet
        self._failed_blocks: set[int] = set()
        self._failed: set[str] = set()  # requests, as in `take_failed`
        self._attached = worker is not None
        self._first_tokens: dict[str, int] = {}  # by request id: vLLM is not told of these yet
        self.asked = False  # `injected` tells of these requests, and `ended` does not

    def adapter_moved(self, numbers: list[int], seconds: float) -> None:
        """As `OnDevice`."""
        self._attendant.tell([OnDevice(numbers, seconds)])

    def begin(self, metadata: StepMetadata) -> None:
        """A step begins. Its preempted prompts have been handled."""
        self._heartbeat.tick()
        self._metadata = metadata
        for prefill_id in metadata.expected:
            self._sender.expect(prefill_id)
        for prefill_id, request_id in metadata.opened.items():
            self._prefills[prefill_id] = SentPrefill(request_id)
        if metadata.told:
            self._attendant.tell(metadata.told)
        opened = set(metadata.opened)
        for chunk in metadata.chunks:
            blocks = block_ids(self._tables, chunk.blocks, chunk.num_tokens)
            if chunk.prefill_id in opened:
                opened.discard(chunk.prefill_id)
                owner = self._prefills[chunk.prefill_id]
                self._sender.open(chunk.prefill_id, blocks, chunk.num_tokens, owner=owner)
            else:
                self._sender.extend(chunk.prefill_id, blocks, chunk.num_tokens)
        for prefill_id, token in metadata.committed.items():
            if token is not None:
                self._sender.commit(prefill_id, FirstToken(token))
            self._has_blocks(prefill_id)
        for prefill_id, reason in metadata.aborted.items():
            self._sender.close(prefill_id, reason)
            self._has_blocks(prefill_id)
        for pinned in metadata.pinned:
            self._serve(pinned)
        for fetch in metadata.fetches:
            fetching = self._fetches[fetch.decode_id] = Fetching(fetch, time.monotonic() + self._timeout)
            self._attendant.fetch(fetching)
        for fetch in metadata.declined:
            self._attendant.decline(fetch)

    def _serve(self, pinned: Pinned) -> None:
        """Sends cached blocks. A step before this one may still write to them."""
        start, stop, owner = pinned.start, pinned.stop, SentPrefill(pinned.request_id, has_blocks=True)
        if start == stop:
            self._sender.close(pinned.pin_id, "gone")
            self._attendant.tell([Released(pinned.pin_id, "gone")])
            self._sent.add(pinned.request_id)
        else:
            blocks = block_ids(self._tables, pinned.blocks, stop)
            self._sender.serve(pinned.pin_id, blocks, start, stop, owner=owner, after_steps=True)

    def _has_blocks(self, prefill_id: bytes) -> None:
        """The connector has the blocks of a prefill, unless it never began."""
        if (prefill := self._prefills.pop(prefill_id, None)) is not None:
            prefill.has_blocks = True
            if prefill.released:
                self._sent.add(prefill.request_id)

    def saved(self, layer: int) -> None:
        """The step has written the KV of this layer."""
        self._heartbeat.tick()
        self._layers_ready += bool(self._metadata.chunks)
        for chunk in self._metadata.chunks:
            self._sender.ready(chunk.prefill_id, layer, chunk.start, chunk.stop)

    def preempt(self, prefill_ids: Sequence[bytes]) -> None:
        """Ends these prefills. Other prompts write to their blocks at once, also while a slice is copied from
        there: no COMMIT follows, so no receiver uses anything of their transfers."""
        for prefill_id in prefill_ids:
            self._sender.close(prefill_id, "cancelled")
            self._prefills.pop(prefill_id, None)

    def ended(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """`finished`: requests that have ended since the last call. Returns requests whose blocks nothing
        reads any more, and requests whose fetch has ended."""
        self._cancel(finished)
        self._take_events()
        sent, self._sent = self._sent, set()
        received = set[str]() if self.asked else set(self._first_tokens)
        for event in self._fetch_ends:
            fetching = self._fetches.pop(event.decode_id)
            fetch = fetching.fetch
            received.add(fetch.request_id)
            self._attendant.decline(fetch)
            if fetching.deadline is not None:
                reason = event.reason if isinstance(event, FetchFailed) else f"in {self._timeout:g} s"
                if not fetch.chunks:  # else its prompts are computed
                    log.warning("%s: its KV did not come (%s)", fetch.request_id, reason)
                if len(self._tables) == 1:
                    [blocks] = fetch.blocks
                    self._failed_blocks |= set(blocks[fetch.start // self._tables[0].block_size :])
                elif self._attached:
                    received.remove(fetch.request_id)
                    self._failed.add(fetch.request_id)
                else:
                    self._failed.add(fetch.request_id)
        self._fetch_ends.clear()
        if self._attached:
            received |= self._failed & finished
            self._failed -= finished
        return sent, received

    def injected(self) -> dict[str, int]:
        """As `take_first_tokens`, for a scheduler in this process: KV that came after `ended` counts, too.
        From now on `ended` does not tell of these requests."""
        self.asked = True
        self._take_events()
        return self.take_first_tokens()

    def _cancel(self, finished: set[str]) -> None:
        """Ends the fetches of these requests, and those that take too long."""
        now = time.monotonic()
        for decode_id, fetching in self._fetches.items():
            if fetching.fetch.request_id in finished:
                fetching.deadline = None
            elif fetching.deadline is not None and fetching.deadline <= now:
                fetching.deadline = math.inf
            else:
                continue
            self._attendant.cancel(decode_id)

    def take_failed_blocks(self) -> set[int]:
        """Returns the blocks without KV of the fetches that failed since the last call. With several groups
        of layers, vLLM takes no blocks: see `take_failed`."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed(self) -> set[str]:
        """Returns the requests without KV since the last call, with several groups of layers. In a worker
        there are none: it ends these requests, and `ended` tells of them when vLLM has ended them."""
        if self._attached:
            return set()
        failed, self._failed = self._failed, set()
        return failed

    def take_first_tokens(self) -> dict[str, int]:
        """Returns those of fetches that ended since the last call, by request id. Of a prefix: how many
        positions there are now, since the source may have had less of it."""
        tokens, self._first_tokens = self._first_tokens, {}
        return tokens

    def close(self) -> None:
        self._attendant.close()
        self._sender.shutdown()
        self._ranks.close()

    def _take_events(self) -> None:
        for event in self._attendant.events():
            if isinstance(event, Released):
                prefill: SentPrefill = event.owner
                prefill.released = True
                if prefill.has_blocks:  # else vLLM has them, also if it has preempted the request
                    self._sent.add(prefill.request_id)
            elif event.decode_id not in self._fetches:
                continue  # of a fetch that only released its prefill
            elif isinstance(event, Injected):
                fetch, token = self._fetches.pop(event.decode_id).fetch, event.first_token.token_id
                if fetch.chunks:
                    token = fetch.behind(event.stats.tokens)
                self._first_tokens[fetch.request_id] = token
            else:
                self._fetch_ends.append(event)
