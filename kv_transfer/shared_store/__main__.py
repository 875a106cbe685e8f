"""The store process of a worker: the client of the shared store. No torch.

On stdin come `StoreStart` as one line of JSON, and the cluster secret in hexadecimal. Two threads call the
store: one for what prompts wait for, one for what is written. If a call hangs, or the store does not answer,
the process ends, and the service starts it again.
"""

from __future__ import annotations

import logging
import logging.config
import os
import signal
import socket
import sys
import threading
import time
from queue import SimpleQueue

import msgspec
import setproctitle

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.protocol.local_messages import StoreAnswer, StoreOpened, StoreOrder
from baton.kv_transfer.shared_store import EXIT_UNUSABLE, StoreBackend, StoreGone, StoreStart, open_backend
from baton.kv_transfer.shared_store.chunk_object import SEAL_BYTES, ObjectSeal
from baton.kv_transfer.spawn import die_with_parent
from baton.kv_transfer.wait import wait

log = logging.getLogger("baton.kv.store")

HANGS = 20.0
"""Seconds after which a call counts as hung."""
RETRY = 2.0
"""Seconds between two attempts to connect."""
TICK = 1.0


class StoreProcess:
    def __init__(self, start: StoreStart, secret: bytes, channel: Channel, arena: Arena) -> None:
        self._units = start.units
        self._memory = arena.memory
        self._size = (start.units.slots - 1) * start.units.slot_bytes + SEAL_BYTES
        self._seal = ObjectSeal(secret, start.identity, encrypt=start.encrypt)
        self._channel = channel
        self._sending = threading.Lock()
        self._session = int.from_bytes(os.urandom(7))
        self._orders: dict[bool, SimpleQueue[StoreOrder]] = {True: SimpleQueue(), False: SimpleQueue()}
        self._calls: dict[bool, float] = {}  # since when a thread is in a call; time.monotonic()

    def run(self, backend: StoreBackend) -> None:
        """Serves until the engine process is gone."""
        for is_urgent in self._orders:
            threading.Thread(target=self._serve, args=(backend, is_urgent), daemon=True).start()
        self._answer(StoreOpened(self._session))
        while True:
            wait([self._channel.fileno()], TICK)
            while orders := self._channel.receive():
                for order in orders:
                    if order.session == self._session:  # else it was for the process before
                        self._orders[order.is_urgent].put(order)
            with self._sending:
                self._channel.flush()
            oldest = min(self._calls.values(), default=time.monotonic())
            if time.monotonic() - oldest > HANGS:
                log.warning("a call to the store has taken %.0f s; connecting again", HANGS)
                os._exit(1)

    def _answer(self, answer: StoreAnswer | StoreOpened) -> None:
        with self._sending:
            self._channel.send(answer)

    def _serve(self, backend: StoreBackend, is_urgent: bool) -> None:
        while True:
            order = self._orders[is_urgent].get()
            self._calls[is_urgent] = time.monotonic()
            try:
                answer = self._do(backend, order)
            except StoreGone as error:
                log.warning("the store is lost: %s", error)
                os._exit(1)
            del self._calls[is_urgent]
            self._answer(StoreAnswer(order.ticket, answer))

    def _do(self, backend: StoreBackend, order: StoreOrder) -> list[bool]:
        keys = [self._seal.key(name) for name in order.names]
        places = [self._units.memory(self._memory, unit)[: self._size] for unit in order.units]
        named = list(zip(order.names, places, strict=False))
        if not places:
            return backend.exists(keys)
        if order.is_put:
            for name, place in named:
                self._seal.seal(name, place)
            return backend.put(keys, places)
        found = backend.get(keys, places)
        whole = [
            got and self._seal.open(name, place) for got, (name, place) in zip(found, named, strict=True)
        ]
        # A wrong object would keep the right one out. One that has just vanished is removed in vain.
        if wrong := [key for key, is_whole in zip(keys, whole, strict=True) if not is_whole]:
            backend.remove(wrong)
        return whole


def main() -> None:
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=StoreStart)
    secret = bytes.fromhex(sys.stdin.readline().strip())
    die_with_parent(start.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    setproctitle.setproctitle(f"{start.title}: {start.name} store")
    if start.logging is not None:
        logging.config.dictConfig(start.logging)
    arena = Arena(start.arena_fd, start.units.count * start.units.slots, start.units.slot_bytes)
    channel = Channel(socket.socket(fileno=start.channel_fd), StoreOrder)
    channel.send(StoreOpened(0))  # else orders of the process before would seem to be under way
    reason = None
    while True:
        try:
            backend = open_backend(start.url, arena.memory)
            break
        except ImportError as error:
            log.error("%s cannot be used: %s (Debian: apt install libibverbs1)", start.url, error)
            sys.exit(EXIT_UNUSABLE)
        except StoreGone as error:
            if str(error) != reason:
                reason = str(error)
                log.warning("%s cannot be used: %s", start.url, reason)
            time.sleep(RETRY)
    log.info("%s is open", start.url)
    try:
        StoreProcess(start, secret, channel, arena).run(backend)
    except ChannelClosed:
        os._exit(0)  # the engine process is gone


if __name__ == "__main__":
    main()
