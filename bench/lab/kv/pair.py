"""The KV transfer of a prefill and a decode worker, each with an engine process, for `bench.kv`."""

import multiprocessing
import os
import random
import secrets
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import psutil
import torch

import baton.kv_transfer as kv
from baton.bench.lab.harness.hosts import Host
from baton.bench.lab.harness.processes import cpu_seconds
from baton.bench.lab.kv.raw_sockets import MIB
from baton.kv_names.cache_kinds import ATTENTION, CacheArray
from baton.kv_transfer.spawn import Ready, StatsRequest, decode_from_transfer, encode
from baton.kv_transfer.wait import end_waits_on_time, wait

_KV = CacheArray(ATTENTION, "kv", rows=2, heads=8, head_dim=128, dtype="bfloat16")
LAYOUT = kv.KVLayout.of([(_KV,)] * 8)
BLOCK = 16
NO_TRACE = kv.TraceWriter(None, "")
_INCARNATIONS = {"prefill": 1, "decode": 2}
CONNECT_S = 20.0  # until KV goes by another transport than TCP
_SECRET = b"bench.kv: not a secret"


@dataclass(frozen=True)
class Settings:
    lanes: int
    slots: int
    slot_bytes: int
    most_bytes: int  # of a transfer
    device: str = "meta"  # of the pools; "meta": no pools, only slots are sent
    encrypt: bool = False
    transport: Literal["tcp", "nixl", "nixl_cuda", "shared_memory", "cuda_ipc"] = "tcp"
    """As `TransferStats` names it. With the last three the receiver reads memory of the sender itself."""
    sums: bool = False
    """With "meta": lanes compute no checksums, as between GPUs."""
    sender: Host | None = None
    """Where the prefill worker runs. The caller is on another host."""

    cards: int = 1
    """Of the sender's, which its transfer process listens on, and of the caller's."""
    sources: tuple[str, ...] = ()
    """The caller's addresses from which lanes go out."""

    def hosts_of(self, role: str) -> tuple[str, ...]:
        if self.sender is None or role == "decode":
            return ("127.0.0.1",)
        return tuple(self.sender.addresses[: self.cards])

    def device_of(self, role: str) -> str:
        """Each engine has a GPU of its own if there are two."""
        if self.device != "cuda":
            return self.device
        return f"cuda:{min(torch.cuda.device_count() - 1, _INCARNATIONS[role] - 1)}"


class Side:
    """One worker: a transfer process, an arena and a pool. The caller makes the endpoint."""

    def __init__(self, role: str, settings: Settings) -> None:
        device = settings.device_of(role)
        nixl_on_gpus = settings.transport == "nixl_cuda"
        end_waits_on_time()  # as in engine processes
        if settings.device == "cuda":
            torch.cuda.set_device(device)
        self.sending, sending = kv.ArenaEnd.pair(settings.slots, settings.slot_bytes)
        self.receiving, receiving = kv.ArenaEnd.pair(settings.slots, settings.slot_bytes)
        self.heartbeat = kv.Heartbeat.create()
        memory = self.sending.arena.memory
        memory[:] = random.Random(0).randbytes(MIB) * (len(memory) // MIB)
        self.service, service = kv.channel_pair()
        config = kv.TransferConfig(
            name=f"{role} 0", incarnation=_INCARNATIONS[role],
            model_fingerprint="bench", layout=LAYOUT, num_slots=settings.slots,
            slot_bytes=settings.slot_bytes, lanes=settings.lanes, encrypt=settings.encrypt,
            exports=settings.transport in ("shared_memory", "cuda_ipc"),
            sums=settings.sums or settings.device == "cuda",
            reader="nixl" if settings.transport in ("nixl", "nixl_cuda") else "",
            reader_device=device if nixl_on_gpus else None,
            hosts=settings.hosts_of(role), bind=settings.sources if role == "decode" else (),
        )  # fmt: skip
        self.process = kv.spawn_transfer(
            config,
            sending=sending,
            receiving=receiving,
            heartbeat=self.heartbeat,
            service=service,
            secret=_SECRET,
        )
        ready = decode_from_transfer(self.service.recv(MIB))  # sent after all imports
        assert isinstance(ready, Ready)
        self.port = ready.port
        blocks = -(-(settings.most_bytes // LAYOUT.bytes_per_token) // BLOCK)
        self.blocks = random.Random(role).sample(range(blocks), blocks)
        shape = (_KV.rows, blocks, BLOCK, _KV.heads, _KV.head_dim)
        self.pool = [
            torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYOUT.num_layers)
        ]

        self.transport = kv.Transport(
            self.sending, self.receiving, NO_TRACE, settings.transport not in ("tcp", "nixl"), nixl_on_gpus
        )
        self.paged_kv = kv.PagedKV([[self.pool]], BLOCK, LAYOUT, device)

    def digest(self) -> list[int]:
        """Sums over K and V of all layers, in order of positions: each 32-bit word times its place."""
        sums = []
        for layer in self.pool:
            if layer.is_meta:
                continue
            for block in layer[:, self.blocks].flatten().view(torch.int32).split(MIB):
                words = block.to(torch.int64)
                sums.append(int((words * torch.arange(1, len(words) + 1, device=words.device)).sum()))
        return sums

    def transports(self) -> dict[str, str]:
        """As in `TransferStats`."""
        self.service.send(encode(StatsRequest()))
        while True:
            message = decode_from_transfer(self.service.recv(MIB))
            if isinstance(message, kv.TransferStats):
                return message.transports

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def _prefill(control: Connection, settings: Settings) -> None:
    """The prefill engine: opens a finished prefill for each number of tokens that it gets."""
    if settings.sender is not None:
        settings.sender.enter()
    torch.set_num_threads(1)
    side = Side("prefill", settings)
    for layer in side.pool:
        layer.normal_()
    sender = side.transport.sender(side.paged_kv)
    control.send((side.port, side.process.pid, side.digest()))
    while (tokens := control.recv()) is not None:
        if tokens == 0:
            control.send(side.transports())
            continue
        prefill_id = secrets.token_bytes(16)
        sender.open(prefill_id, side.blocks, tokens)
        sender.ready(prefill_id, None, 0, tokens)
        sender.commit(prefill_id, kv.FirstToken(1))
        control.send(prefill_id)
        while not sender.poll():
            select.select([sender], [], [])
    side.stop()
    sender.shutdown()


class Pair:
    """The decode engine runs in this process, the prefill engine in a child. Close it."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, remote = context.Pipe()
        self._child = context.Process(target=_prefill, args=(remote, settings))
        self._child.start()
        remote.close()  # so that recv() fails if the child has ended
        self._side = Side("decode", settings)
        self._receiver = self._side.transport.receiver(self._side.paged_kv)
        port, pid, self._digest = self._control.recv()
        self._address = f"{','.join(settings.hosts_of('prefill'))}:{port}"
        assert self._child.pid is not None
        transfers = (self._side.process.pid, pid)
        movers = [child.pid for each in transfers for child in psutil.Process(each).children()]
        self._pids = (os.getpid(), self._child.pid, *transfers, *movers)
        deadline = time.monotonic() + CONNECT_S
        while settings.transport not in ("tcp", transport := self._transport()):
            assert time.monotonic() < deadline, transport
            self.seconds(MIB)

    def seconds(self, size: int) -> float:
        """Seconds of one transfer of `size` bytes, from fetch() to Injected.

        The prefill is finished before.
        """
        tokens = size // LAYOUT.bytes_per_token
        self._control.send(tokens)
        prefill_id = self._control.recv()
        started = time.perf_counter()
        self._receiver.fetch(
            secrets.token_bytes(16), prefill_id=prefill_id, kv_address=self._address,
            incarnation=_INCARNATIONS["prefill"], attempt=0,
            block_ids=self._side.blocks[: -(-tokens // BLOCK)], num_tokens=tokens,
        )  # fmt: skip
        events: Sequence[object] = ()
        while not events:
            wait([self._receiver.fileno()], self._receiver.poll_within)
            events = self._receiver.poll()
        assert isinstance(events[0], kv.Injected), events
        return time.perf_counter() - started

    def _transport(self) -> str:
        """How KV gets to decode: as in `TransferStats.transports`."""
        self._control.send(0)
        return self._control.recv().get("decode 0", "tcp")

    def cpu_seconds(self) -> float:
        """CPU time so far of both engines and both transfer processes with their movers."""
        return sum(map(cpu_seconds, self._pids))

    def close(self) -> None:
        """Ends both sides. Asserts that both pools hold the same KV."""
        same = self._side.digest() == self._digest
        self._control.send(None)
        self._child.join()
        self._side.stop()
        self._receiver.shutdown()
        assert same, "KV at decode differs from KV at prefill"
