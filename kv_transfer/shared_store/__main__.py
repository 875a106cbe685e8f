"""The store process of a worker: seals and verifies the objects of the shared store. No torch.

On stdin come `StoreStart` as one line of JSON, and the cluster secret in hexadecimal. The process starts with
the engine process, so that the client's library is loaded when the engine says what its KV is.

Threads call the client process: `READERS` for what prompts wait for, so that some read while another one
verifies, and one for what is written. If a call hangs, or the store does not answer, the process ends, and
the service starts it again.

Objects belong to a *period*, half of the age limit. Those of this period and the one before are used, and all
older ones are removed.
"""

import logging
import logging.config
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

import msgspec
import numpy as np
import setproctitle

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.dense_slices import dense_planes
from baton.kv_transfer.protocol.local_messages import StoreAnswer, StoreLayout, StoreOpened, StoreOrder
from baton.kv_transfer.shared_store import EXIT_UNUSABLE, READERS, StoreGone, StoreStart, Units, max_age
from baton.kv_transfer.shared_store.chunk_object import ObjectSeal, section_of
from baton.kv_transfer.shared_store.client import ClientProcess
from baton.kv_transfer.wait import wait
from baton.processes.children import die_with_parent
from baton.processes.spawn import take_given

log = logging.getLogger("baton.kv.store")

HANGS = 20.0
"""Seconds after which a call counts as hung."""
REST = 1.0
"""After a write beside reads, so many times as long without one: half of the bandwidth is left to them."""
TICK = 1.0


class StoreProcess:
    def __init__(
        self, start: StoreStart, secret: bytes, channel: Channel, identity: str, units: Units
    ) -> None:
        self._units = units
        self._arena = Arena(start.arena_fd, units.count * units.slots, units.slot_bytes)
        self._seal = ObjectSeal(secret, identity, encrypt=start.encrypt)
        self._period_seconds = max_age(start.url) / 2
        self._cleared: int | None = None  # the period in which older objects were removed
        self._channel = channel
        self._sending = threading.Lock()
        self._session = int.from_bytes(os.urandom(7))
        # By whether they are urgent. None: to remove what is too old.
        self._orders: dict[bool, SimpleQueue[StoreOrder | None]] = {True: SimpleQueue(), False: SimpleQueue()}
        self._calls: dict[int, float] = {}  # since when a connection is in use; time.monotonic()
        self._read_at = 0.0  # the last urgent call, as above
        self._marks = deque[float](maxlen=2)  # when all readers were ready for a part of a probe, as above
        self._readers = threading.Barrier(READERS, lambda: self._marks.append(time.monotonic()))

    def run(self, client: ClientProcess) -> None:
        """Serves until the engine process is gone."""
        for connection in range(1 + READERS):
            threading.Thread(target=self._serve, args=(client, connection), daemon=True).start()
        self._answer(StoreOpened(self._session))
        while True:
            wait([self._channel.fileno()], TICK)
            while orders := self._channel.receive():
                for order in orders:
                    # Else it was for the process before, or says the layout once more.
                    if isinstance(order, StoreOrder) and order.session == self._session:
                        self._orders[order.is_urgent].put(order)
            with self._sending:
                self._channel.flush()
            if self._period_seconds and self._cleared != self._periods[0]:
                self._cleared = self._periods[0]
                self._orders[False].put(None)
            oldest = min(self._calls.values(), default=time.monotonic())
            if time.monotonic() - oldest > HANGS:
                log.warning("a call to the store has taken %.0f s; connecting again", HANGS)
                os._exit(1)

    @property
    def _periods(self) -> Sequence[int]:
        """Whose objects are used, the present one first."""
        if not self._period_seconds:
            return (0,)
        now = int(time.time() / self._period_seconds)  # noqa: TID251 - workers on other machines agree
        return now, now - 1

    def _answer(self, answer: StoreAnswer | StoreOpened) -> None:
        with self._sending:
            self._channel.send(answer)

    def _serve(self, client: ClientProcess, connection: int) -> None:
        is_urgent = connection > 0
        while True:
            order = self._orders[is_urgent].get()
            self._calls[connection] = began = time.monotonic()
            try:
                if order is None:
                    client.call(connection, "clear", self._seal.keys.pattern(keep=self._periods))
                else:
                    self._answer(StoreAnswer(order.ticket, self._do(client, connection, order)))
            except StoreGone as error:
                log.warning("the store is lost: %s", error)
                os._exit(1)
            del self._calls[connection]
            if is_urgent:
                self._read_at = time.monotonic()
            elif self._read_at > began:
                time.sleep((time.monotonic() - began) * REST)

    def _do(self, client: ClientProcess, connection: int, order: StoreOrder) -> list[bool]:
        names = order.names
        if order.is_put:
            return (self._probe if order.is_urgent else self._put)(client, connection, order)
        done = [False] * len(names)
        # A late offer is one for this period.
        for period in self._periods if order.is_urgent else self._periods[:1]:
            missing = [i for i, is_done in enumerate(done) if not is_done]
            keys = [self._seal.key(names[i], period) for i in missing]
            if not keys:
                break
            if not order.units:
                results = client.call(connection, "exists", keys)
            else:
                wanted = [(names[i], order.units[i]) for i in missing]
                results = self._get(client, connection, wanted, keys, period)
            for i, is_done in zip(missing, results, strict=True):
                done[i] = is_done
        return done

    def _probe(self, client: ClientProcess, connection: int, order: StoreOrder) -> list[bool]:
        """Measures how long it takes to read an object while all readers read, so that no prompt has to wait
        to find out. Each reader does one such order, and its objects are no part of the store."""
        period, wanted = self._periods[0], list(zip(order.names, order.units, strict=True))
        keys = [self._seal.key(name, period) for name in order.names]
        done = self._put(client, connection, order)
        began = time.monotonic()
        client.call(connection, "exists", keys)
        waited = time.monotonic() - began
        for _ in range(2):  # the first time finds pages and connections missing
            self._readers.wait()
            if all(done):
                done = self._get(client, connection, wanted, keys, period)
        if not self._readers.wait() and all(done):
            seconds = (self._marks[1] - self._marks[0]) / (READERS * len(keys))
            self._answer(StoreOpened(self._session, waited, seconds))
        client.call(connection, "remove", keys)
        return done

    def _put(self, client: ClientProcess, connection: int, order: StoreOrder) -> list[bool]:
        period, places = self._periods[0], []
        for name, unit in zip(order.names, order.units, strict=True):
            memory, place = self._places(client, name, unit)
            _join_heads(self._units, self._arena, unit, section_of(name))
            self._seal.seal(name, period, memory)
            _copy(client.memory[place[0] :][: place[1]], memory)
            places.append(place)
        keys = [self._seal.key(name, period) for name in order.names]
        return client.call(connection, "put", keys, places)

    def _get(
        self,
        client: ClientProcess,
        connection: int,
        wanted: Sequence[tuple[bytes, int]],
        keys: Sequence[str],
        period: int,
    ) -> list[bool]:
        both = [self._places(client, name, unit) for name, unit in wanted]
        results = client.call(connection, "get", keys, [place for _, place in both])
        intact, wrong = [False] * len(wanted), []
        for i, ((name, _), (memory, (at, size))) in enumerate(zip(wanted, both, strict=True)):
            if results[i]:
                # The copy is verified, since peers of the store may change the client's memory.
                _copy(memory, client.memory[at : at + size])
                intact[i] = self._seal.open(name, period, memory)
            if results[i] is not None and not intact[i]:
                wrong.append(keys[i])
        if wrong:  # they would keep the right ones out
            client.call(connection, "remove", wrong)
        return intact

    def _places(self, client: ClientProcess, name: bytes, unit: int) -> tuple[memoryview, tuple[int, int]]:
        """The memory of an object: in the arena, and in what the client has."""
        memory = self._units.memory(self._arena.memory, unit, section_of(name))
        return memory, (unit * self._units.object_slots * self._units.slot_bytes, memory.nbytes)


def _copy(to: memoryview, of: memoryview) -> None:
    """Readers copy at the same time: NumPy releases Python's lock, and an assignment of memory does not."""
    np.frombuffer(to, np.uint8)[:] = np.frombuffer(of, np.uint8)


def _join_heads(units: Units, arena: Arena, unit: int, section: int) -> None:
    """Ranks wrote their heads, each into slots of its own. Makes slices with all heads of these."""
    first = unit * units.slots
    for at, piece in enumerate(units.objects[section], first):
        if len(cuts := units.of_ranks(piece)) == 1:
            continue
        array, positions = units.layout.arrays[piece.array], max(1, piece.token_count)
        all_heads = dense_planes(arena.slot(at), array, positions, piece.head_count)
        for number, of_rank in enumerate(cuts, 1):
            start = of_rank.head_start - piece.head_start
            slot = arena.slot(at + number * units.object_slots)
            rank_heads = dense_planes(slot, array, positions, of_rank.head_count)
            for plane, heads in zip(all_heads, rank_heads, strict=True):
                plane[:, :, start : start + of_rank.head_count] = heads


def main() -> None:
    line, secret_in_hex = take_given().splitlines()
    start, secret = msgspec.json.decode(line, type=StoreStart), bytes.fromhex(secret_in_hex.decode())
    die_with_parent(start.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    title = f"{start.title}: {start.name} store"
    setproctitle.setproctitle(title)
    if start.logging is not None:
        logging.config.dictConfig(start.logging)
    channel = Channel(socket.socket(fileno=start.channel_fd), StoreOrder | StoreLayout)
    client, told = ClientProcess(start.url, f"{title} client"), ""
    try:
        channel.send(StoreOpened(0))  # else orders of the process before would seem to be under way
        layout = _layout(channel)
        units = Units(layout.layout, layout.ranks)
        client.open(units.count * units.object_slots * units.slot_bytes)
        while reason := client.reason():
            if reason != told:
                log.warning("%s cannot be used: %s", start.url, reason)
                told = reason
        log.info("%s is open", start.url)
        StoreProcess(start, secret, channel, layout.identity, units).run(client)
    except ImportError as error:
        log.error("%s cannot be used: %s; see above", start.url, error)
        sys.exit(EXIT_UNUSABLE)
    except StoreGone as error:
        log.warning("%s: %s", start.url, error)
        sys.exit(1)
    except ChannelClosed:
        os._exit(0)  # the engine process is gone


def _layout(channel: Channel) -> StoreLayout:
    """Waits until the engine has said what its KV is."""
    while True:
        wait([channel.fileno()], TICK)
        for message in channel.receive():
            if isinstance(message, StoreLayout):
                return message


if __name__ == "__main__":
    main()
