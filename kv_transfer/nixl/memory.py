"""Arenas that NIXL has registered: peers read slots of one, and slots of peers are read into the other.

    sender:    EXPORT (NIXL's metadata); a slot is full: SLICES with its checksum; TAKEN: the slot is free
    receiver:  READ of the token; REACH; SLICES: READ into a slot of its own, checksum, TAKEN

NIXL (https://github.com/ai-dynamo/nixl) moves bytes through UCX, with connections of its own, which are
neither authenticated nor encrypted. So the metadata, by which a peer connects and reads, is sealed with the
cluster secret. With slots on a GPU the engines compute checksums (`slots`).

NIXL's thread serves peers and sleeps while there is nothing to do. Threads of this process start reads.
Shared memory is copied by the thread that starts the read, and the bytes are in its cache when it computes
their checksum. Only this file imports NIXL, when a worker uses it.
"""

import importlib
import logging
import os
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from baton.kv_transfer.arena import MARK, TOKEN, Arena
from baton.kv_transfer.config import PAGE, TransferConfig
from baton.kv_transfer.memory_reader import MemoryReader
from baton.kv_transfer.nixl.slots import NixlSlots, make_slots
from baton.kv_transfer.protocol.messages import MAX_HANDLE_BYTES, Export
from baton.kv_transfer.slices import Slice
from baton.system import usable_cpus
from baton.system.cuda_driver import CudaError

log = logging.getLogger("baton.kv")

WHEELS = ("nixl_cu13", "nixl_cu12")  # the package `nixl` would import torch to choose one of them
_ADDRESS = struct.Struct("<Q")
_PLACE = struct.Struct("<QI")  # of slots with marks: address, device
_END = 1 << 64  # of all addresses
_PATIENCE, _RARELY = 1.0, 0.01  # seconds: after so long without an end, looks are so far apart
_MOST_THREADS = 4  # one copies and verifies 3 to 4 GB/s of shared memory
_SMALL = 64 << 10  # bytes that are read sooner than a thread is woken
_SLEEP = 100_000  # microseconds that NIXL's thread waits for an event; 0 would keep a core busy


@dataclass(frozen=True, slots=True)
class _Peer:
    """The agent of a session's peer, and its memory."""

    name: bytes
    address: int
    device: int
    export: Export


@dataclass(slots=True, eq=False)
class _Read:
    """Bytes of a peer on their way here, and then under verification."""

    peer: bytes
    token_of: int | None  # session
    slots: Sequence[int]  # of ours
    size: int
    is_right: Callable[[], bool] | None  # None: the engine will see
    handle: int = 0


def installed() -> bool:
    return any(find_spec(name) for name in WHEELS)


def nics_read_gpus() -> bool:
    """RDMA devices here can read memory of GPUs: with nvidia_peermem, or by dma-buf, which NVIDIA's open
    kernel modules have."""
    driver = Path("/proc/driver/nvidia/version")
    is_open = driver.exists() and "Open Kernel Module" in driver.read_text()
    return any(Path("/sys/class/infiniband").glob("*")) and (
        is_open or Path("/sys/module/nvidia_peermem").exists()
    )


def listen_on(host: str) -> None:
    """UCX listens on the interface with this address alone, and not on all. Call it before an agent is made.

    UCX has one variable for all devices, so RDMA devices are named, too. Nothing changes if the user has set
    the variable, or if no interface has the address: it may be that of all."""
    import psutil  # only with NIXL

    address = str(socket.getaddrinfo(host, None)[0][4][0])
    interfaces = psutil.net_if_addrs().items()
    names = [name for name, has in interfaces if address in [x.address.split("%")[0] for x in has]]
    if names:
        os.environ.setdefault("UCX_NET_DEVICES", ",".join([*names, *rdma_devices()]))


def rdma_devices() -> list[str]:
    """As UCX names them."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]


class NixlMemory(MemoryReader):
    """Owns the agent of NIXL. If memory of its device cannot be registered, the arenas are."""

    transports = ("nixl", "nixl_cuda")

    @staticmethod
    def check(*, encrypt: bool) -> None:
        if encrypt:
            raise ValueError("--kv-encrypt: NIXL does not encrypt; use another --kv-connector")
        if not installed():
            raise ValueError(
                "--kv-connector: NIXL is not installed; run `pip install -e '.[nixl]'` in Baton's source "
                "directory"
            )

    @staticmethod
    def device_of(engine_device: str) -> str | None:
        """From GPU to GPU where NICs read their memory."""
        kind, _, number = engine_device.partition(":")
        return f"cuda:{number or 0}" if kind == "cuda" and nics_read_gpus() else None

    def __init__(
        self, config: TransferConfig, secret: bytes, sending: Arena, receiving: Arena,
        wake: Callable[[], None],
    ) -> None:  # fmt: skip
        from baton.kv_transfer.protocol.encryption import Seal  # takes 50 ms

        wheel = next(name for name in WHEELS if find_spec(name))
        self._nixl: Any = importlib.import_module(f"{wheel}._bindings")
        members = vars(self._nixl).values()
        self._errors = tuple(x for x in members if isinstance(x, type) and issubclass(x, Exception))
        settings = self._nixl.nixlAgentConfig()
        settings.useProgThread, settings.pthrDelay = True, _SLEEP
        settings.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
        threads = min(_MOST_THREADS, max(2, usable_cpus() // 2))
        listen_on(config.hosts[0])
        self._agent = self._nixl.nixlAgent(_name(config.incarnation).decode(), settings)
        try:
            self._backend = [self._agent.createBackend("UCX", {"num_workers": str(threads)})]
        except self._errors as e:
            variables = [f"{x}={os.environ.get(x, 'not set')}" for x in ("UCX_TLS", "UCX_NET_DEVICES")]
            raise RuntimeError(
                f"--kv-connector nixl: UCX does not start ({', '.join(variables)}: {e}): name transports and "
                "devices that this machine has, or use another --kv-connector"
            ) from None
        device, slot_bytes = config.reader_device, config.exported_slot_bytes
        try:
            out, incoming = self._registered(sending, receiving, device, slot_bytes)
        except (CudaError, OSError, *self._errors) as e:
            if device is None:
                raise
            log.warning("NIXL cannot use memory of %s, and uses the host's: %s", device, e)
            out, incoming = self._registered(sending, receiving, None, slot_bytes)
        self._local = incoming
        place = _PLACE.pack(out.address, out.device or 0) if out.mark_bytes else _ADDRESS.pack(out.address)
        shown = self._nixl.nixlRegDList(self._segment, [(out.address, out.size, out.device or 0, b"")])
        metadata = self._agent.getLocalPartialMD(shown, True, self._backend)
        self._seal = Seal(secret, b"baton nixl metadata")
        handle = self._seal.seal(place + metadata, _name(config.incarnation))
        self.export = Export(out.kind, (handle,), out.num_slots, out.slot_bytes, sending.token)
        self.for_sender, self.for_receiver = out.export, incoming.export
        self._open: dict[int, _Peer] = {}  # by session
        self._users: Counter[bytes] = Counter()  # sessions and reads of each peer
        self._reads = 0  # that are not over
        self._under_way: set[_Read] = set()  # NIXL reads, and no thread waits for that
        # Steps of reads that are over. Threads add to them. None: NIXL still reads.
        self._steps: deque[tuple[_Read, Future[bool | None]]] = deque()
        self._tokens_over: list[tuple[int, bool]] = []
        self._slots_over: dict[int, bool] = {}
        self._threads = ThreadPoolExecutor(threads, "reads", self._local.enter_thread)
        self._wake = wake
        self._moved = 0.0  # when a read began or ended (time.monotonic())

    @property
    def slot_bytes(self) -> int:
        return self._local.slot_bytes

    @property
    def why_not_exported(self) -> str:
        """UCX describes each network device."""
        size = len(self.export.handles[0])
        if size <= MAX_HANDLE_BYTES:
            return ""
        return f"NIXL's metadata has {size} of at most {MAX_HANDLE_BYTES} bytes: name few UCX_NET_DEVICES"

    def checksum(self, payload: memoryview) -> int:
        return xxhash.xxh3_64_intdigest(payload) >> 1

    # ------------------------------------------------------------ sessions

    def open(self, session: int, incarnation: int, export: Export) -> str:
        try:
            form = _PLACE if self._local.mark_bytes else _ADDRESS
            handle = self._seal.open(export.handles[0], _name(incarnation))
            address, *device = form.unpack(handle[: form.size])
            token_at = address + export.num_slots * (export.slot_bytes + self._local.mark_bytes)
            if token_at + TOKEN > _END:
                return (
                    f"{export.num_slots} slots of {export.slot_bytes} bytes do not fit behind their address"
                )
            if self._local.mark_bytes and export.slot_bytes > self.slot_bytes:
                return f"slots of {export.slot_bytes} bytes, and those here have {self.slot_bytes}"
            name = self._agent.loadRemoteMD(handle[form.size :])
            self._users[name] += 1
            self._open[session] = peer = _Peer(name, address, sum(device), export)
            place = self._local.tokens + session % (PAGE // TOKEN) * TOKEN
            read = partial(self._local.token_read, place)
            self._start(peer, [(place, token_at, TOKEN)], lambda: read() == export.token, token_of=session)
        except ValueError as e:
            return f"the metadata: {e}"
        except (*self._errors, struct.error) as e:
            return f"NIXL: {e}"
        return ""

    def opened(self) -> Iterator[tuple[int, str]]:
        self._take()
        tokens, self._tokens_over = self._tokens_over, []
        for session, intact in tokens:
            if session in self._open:
                yield session, "" if intact else "NIXL did not read the token"

    def close(self, session: int) -> None:
        if session in self._open:
            self._release(self._open.pop(session).name)

    # ------------------------------------------------------------ slices

    def read(self, session: int, slices: Sequence[Slice]) -> None:
        peer, incoming = self._open[session], self._local
        export = peer.export
        if not incoming.mark_bytes:  # each is verified and free again as soon as it is there
            for x in slices:
                piece = incoming.slot(x.slot), peer.address + x.there * export.slot_bytes, x.size
                is_right = partial(self._is_right, incoming.arena.slot(x.slot)[: x.size], x.sum)
                self._start(peer, [piece], is_right, slots=[x.slot])
            return
        pieces: list[tuple[int, int, int]] = []
        marks = peer.address + export.num_slots * export.slot_bytes
        for x in slices:
            pieces.append((incoming.slot(x.slot), peer.address + x.there * export.slot_bytes, x.size))
            pieces.append((incoming.mark(x.slot), marks + x.there * MARK, MARK))
        if pieces:
            self._start(peer, pieces, None, slots=[x.slot for x in slices])

    def finished(self) -> dict[int, bool]:
        self._take()
        slots, self._slots_over = self._slots_over, {}
        return slots

    @property
    def busy(self) -> bool:
        return bool(self._reads or self._tokens_over or self._slots_over)

    def look_within(self) -> float | None:
        """NIXL has no descriptor that tells."""
        if not self._under_way:
            return None
        return 0.0 if time.monotonic() < self._moved + _PATIENCE else _RARELY

    # ------------------------------------------------------------ inside

    def _registered(
        self, sending: Arena, receiving: Arena, device: str | None, slot_bytes: int
    ) -> tuple[NixlSlots, NixlSlots]:
        out, incoming = make_slots(sending, device, slot_bytes), make_slots(receiving, device, slot_bytes)
        self._segment = self._nixl.DRAM_SEG if incoming.device is None else self._nixl.VRAM_SEG
        areas = [(out.address, out.size), (incoming.address, incoming.size), (incoming.tokens, PAGE)]
        registered = [(address, size, incoming.device or 0, b"") for address, size in areas]
        self._agent.registerMem(self._nixl.nixlRegDList(self._segment, registered), self._backend)
        return out, incoming

    def _start(
        self,
        peer: _Peer,
        pieces: Sequence[tuple[int, int, int]],
        is_right: Callable[[], bool] | None,
        *,
        token_of: int | None = None,
        slots: Sequence[int] = (),
    ) -> None:
        """`pieces`: of each the address here, the address there, and its bytes."""
        self._users[peer.name] += 1
        self._reads += 1
        read = _Read(peer.name, token_of, slots, sum(size for _, _, size in pieces), is_right)
        self._do(read, partial(self._begin, read, peer, pieces), inline=read.size <= _SMALL)

    def _do(self, read: _Read, step: Callable[[], bool | None], *, inline: bool) -> None:
        """By a thread, or at once `inline`."""
        self._moved = time.monotonic()
        if inline:
            future: Future[bool | None] = Future()
            future.set_result(step())
            self._steps.append((read, future))
            return

        def done(future: Future[bool | None]) -> None:
            self._steps.append((read, future))
            self._wake()

        self._threads.submit(step).add_done_callback(done)

    def _take(self) -> None:
        """What threads have done, and what NIXL has read."""
        self._take_steps()
        for read in list(self._under_way):
            if (came := self._came(read)) is not None:
                self._under_way.discard(read)
                inline = read.is_right is None or read.size <= _SMALL
                self._do(read, partial(self._end, read, came=came), inline=inline)
        self._take_steps()

    def _take_steps(self) -> None:
        while self._steps:
            read, future = self._steps.popleft()
            if (intact := future.result()) is None:
                self._under_way.add(read)
                continue
            self._moved = time.monotonic()
            self._reads -= 1
            self._release(read.peer)
            self._slots_over |= dict.fromkeys(read.slots, intact)
            if read.token_of is not None:
                self._tokens_over.append((read.token_of, intact))

    def _begin(self, read: _Read, peer: _Peer, pieces: Sequence[tuple[int, int, int]]) -> bool | None:
        """In any thread. UCX copies shared memory here, and returns when it is copied."""
        nixl, number = self._nixl, self._local.device or 0
        try:
            ours = nixl.nixlXferDList(self._segment, [(here, size, number) for here, _, size in pieces])
            theirs = nixl.nixlXferDList(
                self._segment, [(there, size, peer.device) for _, there, size in pieces]
            )
            read.handle = self._agent.createXferReq(
                nixl.NIXL_READ, ours, theirs, peer.name, b"", self._backend
            )
            self._agent.postXferReq(read.handle, b"")
        except self._errors:
            return self._end(read, came=False)
        came = self._came(read)
        return None if came is None else self._end(read, came=came)

    def _came(self, read: _Read) -> bool | None:
        """Whether NIXL has read all bytes; None: it still reads."""
        try:
            return None if self._agent.getXferStatus(read.handle) == self._nixl.NIXL_IN_PROG else True
        except self._errors:  # the peer is gone
            return False

    def _end(self, read: _Read, *, came: bool) -> bool:
        """In any thread. Whether the bytes are right."""
        if read.handle:
            with suppress(*self._errors):
                self._agent.releaseXferReq(read.handle)
        return came and (read.is_right is None or read.is_right())

    def _is_right(self, payload: memoryview, expected: int) -> bool:
        return self.checksum(payload) == expected

    def _release(self, peer: bytes) -> None:
        self._users[peer] -= 1
        if not self._users[peer]:
            del self._users[peer]
            with suppress(*self._errors):  # NIXL has forgotten a peer that is gone
                self._agent.invalidateRemoteMD(peer)


def _name(incarnation: int) -> bytes:
    """Of the agent of a worker."""
    return f"{incarnation:x}".encode()
