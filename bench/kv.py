"""KV over TCP loopback, end to end: GB/s from one engine's pool to the other's, next to raw sockets.

    python -m bench.kv [--json PATH] [--short]

Ours: pool → arena → transfer process → 4 lanes → transfer process → arena → pool, checksums on, block size
16, shuffled blocks, from fetch() until the receiver reports it injected. Raw: as many threads and connections
move the same bytes from one buffer to another, with nothing in between (bench.raw_sockets). Raw, pool to
pool: the same, but each thread gathers what it sends and scatters what it receives, still without checksum,
credit or other processes. All between two processes, in turn.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import secrets
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

import kv_transfer as kv
from bench.contract import EXIT_CANNOT_MEASURE, Report, Row, interleaved, paired_ratio, parser
from bench.raw_sockets import MIB, RawPair, in_threads

LANES = 4
CHUNK = MIB  # what the pool sender gives to one send call
BLOCK = 16
LAYOUT = kv.KVLayout(num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16")
INCARNATION = 1
SECRET = b"bench.kv: not a secret"


class Worker:
    """One side: a transfer process, an arena and a pool; the endpoint is made by who uses it."""

    def __init__(self, role: str, num_tokens: int, slots: int, slot_bytes: int) -> None:
        self.arena = kv.Arena.create(slots, slot_bytes)
        self.channel, theirs = kv.channel_pair()
        self.service, service = kv.channel_pair()
        config = kv.TransferConfig(
            role="prefill" if role == "prefill" else "decode", name=f"{role} 0", incarnation=INCARNATION,
            model_fingerprint="bench", layout=LAYOUT, num_slots=slots, slot_bytes=slot_bytes, lanes=LANES,
        )  # fmt: skip
        self.process = kv.spawn_transfer(
            config, channel=theirs, arena=self.arena, service=service, secret=SECRET
        )
        theirs.close()
        service.close()
        ready = kv.decode_from_transfer(self.service.recv(MIB))
        assert isinstance(ready, kv.Ready)
        self.port = ready.port
        blocks = -(-num_tokens // BLOCK)
        self.blocks = random.Random(role).sample(range(blocks), blocks)
        shape = (2, blocks, BLOCK, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        self.pool = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYOUT.num_layers)]
        self.bytes = [layer.view(torch.uint8).flatten(2).numpy() for layer in self.pool]  # [2, blocks, bytes]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def prefill_main(control: Connection, num_tokens: int, slots: int, slot_bytes: int) -> None:
    """The prefill engine: opens a finished prefill whenever asked to. And, when asked to, the raw sender."""
    torch.set_num_threads(1)
    worker = Worker("prefill", num_tokens, slots, slot_bytes)
    for layer in worker.pool:
        layer.copy_(torch.randn(layer.shape))
    sender = kv.KVSender(worker.channel, worker.arena, worker.pool, BLOCK, LAYOUT)
    raw = PoolSender(worker)
    _tell(control, [worker.port, raw.port, worker.process.pid, digest(worker)])
    while (order := json.loads(control.recv_bytes())) is not None:
        what, tokens = order
        if what == "pool":
            raw.send(tokens * LAYOUT.bytes_per_token)
            continue
        prefill_id = secrets.token_bytes(16)
        sender.open(prefill_id, worker.blocks, tokens)
        sender.ready(prefill_id, None, 0, tokens)
        sender.commit(prefill_id, kv.FirstToken(1))
        _tell(control, prefill_id.hex())
        while not sender.poll():
            select.select([sender], [], [])
    sender.shutdown()
    worker.stop()


class Cluster:
    """Both sides: decode in this process, prefill in a child."""

    def __init__(self, num_tokens: int, slots: int, slot_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._child = context.Process(target=prefill_main, args=(theirs, num_tokens, slots, slot_bytes))
        self._child.start()
        self._worker = Worker("decode", num_tokens, slots, slot_bytes)
        self._receiver = kv.KVReceiver(
            self._worker.channel, self._worker.arena, self._worker.pool, BLOCK, LAYOUT
        )
        port, raw_port, pid, self._digest = json.loads(self._control.recv_bytes())
        self._address = f"127.0.0.1:{port}"
        self._pools = PoolReceiver(raw_port, self._worker)
        self._raw = RawPair(LANES)
        assert self._child.pid is not None
        self._pids = (os.getpid(), self._child.pid, self._worker.process.pid, pid, self._raw.pid)

    def transfer(self, tokens: int) -> float:
        """GB/s of one transfer, from fetch() to Injected; the prefill is finished before."""
        _tell(self._control, ["kv", tokens])
        prefill_id = bytes.fromhex(json.loads(self._control.recv_bytes()))
        start = time.perf_counter()
        self._receiver.fetch(
            secrets.token_bytes(16), prefill_id=prefill_id, kv_address=self._address,
            incarnation=INCARNATION, block_ids=self._worker.blocks, num_tokens=tokens,
        )  # fmt: skip
        events: Sequence[object] = ()
        while not events:
            select.select([self._receiver], [], [])
            events = self._receiver.poll()
        assert isinstance(events[0], kv.Injected), events
        return tokens * LAYOUT.bytes_per_token / 1e9 / (time.perf_counter() - start)

    def raw(self, tokens: int) -> float:
        """GB/s of as many bytes over plain sockets."""
        size = tokens * LAYOUT.bytes_per_token
        return size / 1e9 / self._raw.seconds(size)

    def raw_pool(self, tokens: int) -> float:
        """GB/s of plain sockets from one pool into the other."""
        size = tokens * LAYOUT.bytes_per_token
        _tell(self._control, ["pool", tokens])
        return size / 1e9 / self._pools.receive(size)

    def cpu_seconds(self) -> float:
        """Of both engines, both transfer processes and the raw sender so far."""
        stats = (Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in self._pids)
        return sum(int(s[11]) + int(s[12]) for s in stats) / os.sysconf("SC_CLK_TCK")

    def check(self) -> None:
        """The decode pool holds what the prefill pool holds."""
        assert digest(self._worker) == self._digest, "KV at decode differs from KV at prefill"

    def stop(self) -> None:
        self._raw.close()
        _tell(self._control, None)
        self._child.join()
        self._receiver.shutdown()
        self._worker.stop()


class PoolSender:
    """LANES threads, each gathering its part of the pool and sending it down its own connection."""

    def __init__(self, worker: Worker) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=LANES)
        self.port = self._listener.getsockname()[1]
        self._worker = worker
        self._lanes: list[socket.socket] = []

    def send(self, size: int) -> None:
        while len(self._lanes) < LANES:
            self._lanes.append(self._listener.accept()[0])
            self._lanes[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(lane: int) -> None:
            memory = bytearray(CHUNK)
            bounce = np.frombuffer(memory, np.uint8)
            self._lanes[lane].recv(1)  # the receiver starts the clock
            for at in range(lane * size // LANES, (lane + 1) * size // LANES, CHUNK):
                for rows, piece in pool_rows(self._worker, at, size):
                    bounce[piece] = rows
                self._lanes[lane].sendall(memory)

        in_threads(send, LANES)


class PoolReceiver:
    def __init__(self, port: int, worker: Worker) -> None:
        self._lanes = [socket.create_connection(("127.0.0.1", port)) for _ in range(LANES)]
        self._worker = worker

    def receive(self, size: int) -> float:
        """Seconds until all bytes are where they belong."""

        def receive(lane: int) -> None:
            memory = memoryview(bytearray(CHUNK))
            bounce = np.frombuffer(memory, np.uint8)
            for at in range(lane * size // LANES, (lane + 1) * size // LANES, CHUNK):
                got = 0
                while got < CHUNK:
                    got += self._lanes[lane].recv_into(memory[got:])
                for rows, piece in pool_rows(self._worker, at, size):
                    rows[:] = bounce[piece]

        start = time.perf_counter()
        for lane in self._lanes:
            lane.send(b"g")
        in_threads(receive, LANES)
        return time.perf_counter() - start


def pool_rows(worker: Worker, at: int, size: int) -> Iterator[tuple[np.ndarray, slice]]:
    """The blocks that hold bytes [at, at + CHUNK) of a transfer of `size`, and their part of a chunk."""
    plane = size // LAYOUT.num_layers // 2  # K or V of one layer
    block = LAYOUT.bytes_per_token_layer // 2 * BLOCK
    for i in range(CHUNK // block):
        which, within = divmod(at + i * block, plane)
        layer = worker.bytes[which // 2]
        yield layer[which % 2, worker.blocks[within // block]], slice(i * block, (i + 1) * block)


def digest(worker: Worker) -> str:
    """Of K and V of all layers, in order of positions."""
    found = hashlib.blake2b()
    for layer in worker.pool:
        found.update(layer[:, worker.blocks].view(torch.uint8).numpy().data)
    return found.hexdigest()


def _tell(control: Connection, message: object) -> None:
    control.send_bytes(json.dumps(message).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser("KV over TCP loopback: GB/s from pool to pool, next to raw sockets.")
    p.add_argument("--slots", type=int, default=16, help="arena slots of either side")
    p.add_argument(
        "--slot-bytes", type=int, default=4 * MIB, help="bytes of an arena slot, the largest frame"
    )
    args = p.parse_args(arguments)
    if args.device == "cuda":
        print("bench.kv measures the host path; the CUDA path is measured by bench.overlap", file=sys.stderr)
        return EXIT_CANNOT_MEASURE
    torch.set_num_threads(1)
    pairs = 7 if args.short else 15
    report = Report(
        "kv",
        {
            "lanes": LANES,
            "slots": args.slots,
            "slot_bytes": args.slot_bytes,
            "pairs": pairs,
            "block_size": BLOCK,
        },
        args.json,
    )
    sizes = {64: 64 * MIB // LAYOUT.bytes_per_token, 256: 256 * MIB // LAYOUT.bytes_per_token}
    cluster = Cluster(max(sizes.values()), args.slots, args.slot_bytes)
    for mib, tokens in sizes.items():
        measure(cluster, report, mib, tokens, pairs)
    cluster.check()
    cluster.stop()
    report.finish()
    return 0


def measure(cluster: Cluster, report: Report, mib: int, tokens: int, pairs: int) -> None:
    cpu: dict[str, list[float]] = {}

    def counted(name: str, run: Callable[[int], float]) -> Callable[[], float]:
        def once() -> float:
            before = cluster.cpu_seconds()
            speed = run(tokens)
            seconds = cluster.cpu_seconds() - before
            cpu.setdefault(name, []).append(seconds / (tokens * LAYOUT.bytes_per_token / 1e9))
            return speed

        return once

    name = f"kv.tcp.lanes{LANES}.{mib}MiB"
    ours, raw = counted(name, cluster.transfer), counted(f"{name}.raw", cluster.raw)
    same_work = counted(f"{name}.raw_pool", cluster.raw_pool)
    for warm_up in (ours, raw, same_work):
        warm_up()
    cpu.clear()
    speeds, raw_speeds = interleaved(ours, raw, pairs)
    ratio, spread = paired_ratio(speeds, raw_speeds)
    row = Row(name, statistics.median(speeds), "GB/s", ratio=ratio, ratio_to="raw sockets", spread=spread)
    row.goal, row.better = 0.85, "higher"
    report.add(replace(row))
    report.add(Row(f"{name}.raw", statistics.median(raw_speeds), "GB/s"))
    speeds, pool_speeds = interleaved(ours, same_work, pairs)
    ratio, spread = paired_ratio(speeds, pool_speeds)
    what = "raw sockets, pool to pool"
    report.add(
        Row(f"{name}.same_work", statistics.median(speeds), "GB/s", ratio=ratio, ratio_to=what, spread=spread)
    )
    for measured, seconds in cpu.items():
        report.add(Row(f"{measured}.cpu", statistics.mean(seconds), "s/GB"))


if __name__ == "__main__":
    sys.exit(main())
