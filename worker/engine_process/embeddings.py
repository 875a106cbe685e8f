"""Embeddings of images between workers, over the transfers of KV: their names, their layout, and the end that
fetches.

An image travels as chunks of 64 tokens of one layer, whose names follow from the name of the image
(`chunk_names`). So a fetch is one of `Receiver.fetch_content`: verified, bounded by
credits, within deadlines.
Both ends have memory for some images in paged form, and copy from there and to there.
"""

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from baton.engine.core.fair_shares import FairShares, Tag
from baton.kv_names import CHUNK_TOKENS, NAME_BYTES
from baton.kv_names.cache_kinds import EMBEDDING, ITEM_BYTES, CacheArray
from baton.kv_transfer import FetchFailed, Injected, KVLayout, PagedKV, Transport
from baton.kv_transfer.channel import ChannelClosed
from baton.kv_transfer.wait import wait
from baton.rpc import worker_pb2 as pb
from baton.vision.embeddings import EmbeddingFormat, Embeddings
from baton.worker.engine_process.to_routers import image_wanted
from baton.worker.ipc import ServiceLink
from baton.worker.messages import ToRouter

log = logging.getLogger(__name__)

MOST_SOURCES = 4096
"""Images of which a worker remembers the encoder."""


def embedding_layout(made: EmbeddingFormat) -> KVLayout:
    numbers = made.token_bytes // ITEM_BYTES[made.dtype]
    return KVLayout.of([[CacheArray(EMBEDDING, "image", 1, 1, numbers, made.dtype)]])


def chunk_names(name: bytes, tokens: int) -> list[bytes]:
    """The names of the chunks of an image. The last chunk is filled up with any numbers."""
    chunks = -(-tokens // CHUNK_TOKENS)
    return [
        blake2b(number.to_bytes(4, "little"), key=name, digest_size=NAME_BYTES).digest()
        for number in range(chunks)
    ]


class PagedEmbeddings:
    """Memory for embeddings on their way, in blocks of a chunk: for two of the largest images, so that one is
    copied while the other travels. The system gives memory when it is written first. The blocks that were
    freed last are taken first, so that it gives no more than travels at the same time.

    Attributes:
        paged: as `Sender` and `Receiver` take it.
        free: numbers of blocks.
    """

    def __init__(self, made: EmbeddingFormat) -> None:
        layout = embedding_layout(made)
        blocks = 2 * -(-made.most_tokens // CHUNK_TOKENS)
        shape = 1, blocks, CHUNK_TOKENS, 1, layout.arrays[0].head_dim
        memory = torch.empty(shape, dtype=getattr(torch, made.dtype))
        self.paged = PagedKV([[[memory]]], CHUNK_TOKENS, layout, "cpu")
        self.free = list(range(blocks))[::-1]
        self._bytes = memory.view(torch.uint8).numpy().reshape(blocks, CHUNK_TOKENS, made.token_bytes)

    def take(self, tokens: int) -> list[int] | None:
        """Blocks for so many tokens. None: there are not enough now."""
        count = -(-tokens // CHUNK_TOKENS)
        if count > len(self.free):
            return None
        taken = self.free[-count:]
        del self.free[-count:]
        return taken

    def write(self, blocks: Sequence[int], embeddings: np.ndarray) -> None:
        for number, block in enumerate(blocks):
            part = embeddings[number * CHUNK_TOKENS : (number + 1) * CHUNK_TOKENS]
            self._bytes[block, : len(part)] = part

    def read(self, blocks: Sequence[int], tokens: int) -> np.ndarray:
        """A copy: [tokens, bytes] uint8."""
        return self._bytes[list(blocks)].reshape(len(blocks) * CHUNK_TOKENS, -1)[:tokens]


class _Asked(NamedTuple):
    """The engine wants the embeddings of an image."""

    name: bytes
    tokens: int
    tenant: bytes
    future: "Future[np.ndarray]"


@dataclass(slots=True, eq=False)
class _Waiting:
    """An image that was asked for and is not there. It waits in the turn of each tenant that wants it, and
    takes the first."""

    tokens: int
    future: "weakref.ref[Future[np.ndarray]]"
    tag: Tag
    tenants: set[bytes]


@dataclass(slots=True, eq=False)
class _Fetch:
    name: bytes
    tokens: int
    future: "Future[np.ndarray]"
    source: pb.ImageReady
    blocks: list[int]
    asked_at: float
    """time.monotonic()"""


class _Busy(NamedTuple):
    """An encoder sends as many images as it can. Times are time.monotonic()."""

    since: float
    """The first question was asked that it refused."""
    until: float
    """It is not asked again before."""


class FetchedEmbeddings(Embeddings):
    """Fetches embeddings from the encoders that routers name, in a thread of its own. So no step waits for a
    copy. Tenants take turns by the tokens of their images. The loop's thread calls `tell`, `report` and what
    `Embeddings` has.

        asked by the engine ─ a router has named an encoder ─▶ memory ─▶ fetched ─▶ kept
             └─ none was named, or the fetch failed ─▶ `ImageWanted`: a router names one

    What an image waits for ends alone: memory is given back by fetches, which have deadlines, and a router
    that finds no encoder ends its request. An image that no request waits for any more is forgotten.
    """

    def __init__(self, transport: Transport, made: EmbeddingFormat, link: ServiceLink) -> None:
        super().__init__()
        self._under_way = weakref.WeakValueDictionary()
        self._memory = PagedEmbeddings(made)
        self._transport = transport  # the other end, which sends nothing, must stay open
        self._receiver = transport.receiver(self._memory.paged)
        self._link = link
        self._commands = deque[_Asked | pb.ImageReady]()
        self._wanted = deque[ToRouter]()
        self._wake, self._changed = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        self._stopping = False
        self._sources = OrderedDict[bytes, pb.ImageReady]()
        self._asked: dict[bytes, _Waiting] = {}
        self._shares = FairShares()
        self._fetches: dict[bytes, _Fetch] = {}  # by image
        self._busy: dict[str, _Busy] = {}  # by the address of the encoder
        self._again_at: float | None = None  # when one of these is asked for an image
        self._thread = threading.Thread(target=self._run, name="embeddings", daemon=True)
        self._thread.start()

    # The loop's thread

    def fileno(self) -> int:
        """Readable when `report` has something, or embeddings have come."""
        return self._changed

    @property
    def idle(self) -> bool:
        """Nothing is fetched."""
        return not self._fetches and not self._commands

    def embeddings(
        self, name: bytes, pixels: bytes, rows: int, columns: int, tenant: bytes = b""
    ) -> "Future[np.ndarray]":
        future = super().embeddings(name, pixels, rows, columns, tenant)
        if not future.done():  # also if it was asked for before: routers may have forgotten it
            self.tell(_Asked(name, rows * columns, tenant, future))
        return future

    def tell(self, command: _Asked | pb.ImageReady) -> None:
        """An image is asked for, or an encoder has its embeddings."""
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    def report(self) -> None:
        """Tells the service which images it needs encoders for."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._changed)
        while self._wanted:
            self._link.send(self._wanted.popleft())

    def wait(self, seconds: float) -> bool:
        """As in `Embeddings`. Ends early if there is something to `report`, or a message of the service."""
        if not self._under_way:
            return False
        if not self._link.has_messages:
            wait([self._changed, self._link.fileno()], seconds)
        return True

    def close(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._receiver.shutdown()
        os.close(self._wake)
        os.close(self._changed)

    def _start(
        self, name: bytes, pixels: bytes, rows: int, columns: int, tenant: bytes
    ) -> "Future[np.ndarray]":
        return Future()

    # The thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                within = self._receiver.poll_within
                if self._again_at is not None:
                    again = max(0.0, self._again_at - time.monotonic())
                    within = again if within is None else min(within, again)
                if self._wake in wait([self._wake, self._receiver.fileno()], within):
                    os.eventfd_read(self._wake)
                self._turn()
        except ChannelClosed:
            log.error("the transfer process of images has ended")  # its worker ends, too

    def _turn(self) -> None:
        while self._commands:
            match self._commands.popleft():
                case _Asked(name, tokens, tenant, future):
                    self._wait_for(name, tokens, tenant, future)
                    if name not in self._fetches and name not in self._sources:
                        self._want(name, lost=False)
                case ready:
                    self._sources[ready.name] = ready
                    self._sources.move_to_end(ready.name)
                    if len(self._sources) > MOST_SOURCES:
                        self._sources.popitem(last=False)
        for event in self._receiver.poll():
            fetch = event.owner
            assert isinstance(fetch, _Fetch)
            self._ended(fetch, event)
        self._fetch_next()

    def _wait_for(self, name: bytes, tokens: int, tenant: bytes, future: "Future[np.ndarray]") -> None:
        waiting = self._asked.get(name)
        if waiting is None or waiting.future() is not future:
            tag, _ = self._shares.tag(tenant, tokens)
            self._asked[name] = _Waiting(tokens, weakref.ref(future), tag, {tenant})
        elif tenant not in waiting.tenants:
            waiting.tenants.add(tenant)
            tag, _ = self._shares.tag(tenant, tokens)
            waiting.tag = min(waiting.tag, tag, key=attrgetter("tokens"))

    def _fetch_next(self) -> None:
        """Begins fetches by the tags of images, as far as there is memory."""
        now, self._again_at = time.monotonic(), None
        for name, waiting in sorted(self._asked.items(), key=lambda each: each[1].tag.tokens):
            tokens, future = waiting.tokens, waiting.future()
            if future is None or future.done():
                del self._asked[name]
                continue
            if name in self._fetches or (source := self._sources.get(name)) is None:
                continue
            busy = self._busy.get(source.kv_address)
            if busy is not None and now < busy.until:
                self._again_at = min(busy.until, self._again_at or busy.until)
                continue
            blocks = self._memory.take(tokens)
            if blocks is None:
                return
            self._shares.served(waiting.tag.tokens)
            fetch = self._fetches[name] = _Fetch(name, tokens, future, source, blocks, now)
            self._receiver.fetch_content(
                os.urandom(16),
                chunks=chunk_names(name, tokens),
                first_chunk=0,
                kv_address=source.kv_address,
                incarnation=source.incarnation,
                block_ids=blocks,
                owner=fetch,
            )

    def _ended(self, fetch: _Fetch, event: object) -> None:
        del self._fetches[fetch.name]
        address, busy = fetch.source.kv_address, self._busy.pop(fetch.source.kv_address, None)
        complete = isinstance(event, Injected) and event.stats.tokens == len(fetch.blocks) * CHUNK_TOKENS
        if complete:
            embeddings = self._memory.read(fetch.blocks, fetch.tokens)
            self._keep(fetch.name, embeddings)
            self._asked.pop(fetch.name, None)
            fetch.future.set_result(embeddings)
            os.eventfd_write(self._changed, 1)
        elif isinstance(event, FetchFailed) and event.reason == "busy":
            # The wait is as long as all questions so far, so it doubles.
            now, since = time.monotonic(), busy.since if busy else fetch.asked_at
            self._busy[address] = _Busy(since, 2 * now - since)
        else:
            why = event.reason if isinstance(event, FetchFailed) else "a part is missing"
            log.warning("an image did not come from the encoder at %s: %s", address, why)
            if self._sources.get(fetch.name) == fetch.source:
                del self._sources[fetch.name]
                self._want(fetch.name, lost=True)
        self._memory.free += fetch.blocks

    def _want(self, name: bytes, *, lost: bool) -> None:
        self._wanted.append(image_wanted(name, lost=lost))
        os.eventfd_write(self._changed, 1)
