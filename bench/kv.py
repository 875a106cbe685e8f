"""KV over TCP loopback, end to end: GB/s from one engine's pool to the other's, next to raw sockets.

    python -m bench.kv [--json PATH] [--short]

Ours: pool → arena → transfer process → 4 lanes → transfer process → arena → pool, checksums on, block size
16, shuffled blocks, from fetch() until the receiver reports it injected. Raw: as many threads and connections
move the same bytes from one buffer to another, with nothing in between. Both between two processes, in turn.
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
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import kv_transfer as kv
from bench.contract import EXIT_CANNOT_MEASURE, Report, Row, interleaved, paired_ratio, parser

MIB = 1 << 20
LANES = 4
CHUNK = MIB  # what the raw sender gives to one send call
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
    raw = RawSender(num_tokens * LAYOUT.bytes_per_token)
    _tell(control, [worker.port, raw.port, worker.process.pid, digest(worker)])
    while (order := json.loads(control.recv_bytes())) is not None:
        what, tokens = order
        if what == "raw":
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
        self._raw = RawReceiver(raw_port, num_tokens * LAYOUT.bytes_per_token)
        assert self._child.pid is not None
        self._pids = (os.getpid(), self._child.pid, self._worker.process.pid, pid)

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
        size = tokens * LAYOUT.bytes_per_token
        _tell(self._control, ["raw", tokens])
        return size / 1e9 / self._raw.receive(size)

    def cpu_seconds(self) -> float:
        """Of both engines and both transfer processes so far."""
        stats = (Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in self._pids)
        return sum(int(s[11]) + int(s[12]) for s in stats) / os.sysconf("SC_CLK_TCK")

    def check(self) -> None:
        """The decode pool holds what the prefill pool holds."""
        assert digest(self._worker) == self._digest, "KV at decode differs from KV at prefill"

    def stop(self) -> None:
        _tell(self._control, None)
        self._child.join()
        self._receiver.shutdown()
        self._worker.stop()


class RawSender:
    """LANES threads, each sending its part of one large buffer down its own connection."""

    def __init__(self, size: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=LANES)
        self.port = self._listener.getsockname()[1]
        self._buffer = memoryview(bytearray(os.urandom(MIB)) * (size // MIB))
        self._lanes: list[socket.socket] = []

    def send(self, size: int) -> None:
        while len(self._lanes) < LANES:
            self._lanes.append(self._listener.accept()[0])
            self._lanes[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        part = size // LANES

        def send(lane: int) -> None:
            self._lanes[lane].recv(1)  # the receiver starts the clock
            for at in range(lane * part, (lane + 1) * part, CHUNK):
                self._lanes[lane].sendall(self._buffer[at : min(at + CHUNK, (lane + 1) * part)])

        _in_threads(send)


class RawReceiver:
    def __init__(self, port: int, size: int) -> None:
        self._lanes = [socket.create_connection(("127.0.0.1", port)) for _ in range(LANES)]
        self._buffer = memoryview(bytearray(size))

    def receive(self, size: int) -> float:
        """Seconds until all bytes are in the buffer."""
        part = size // LANES

        def receive(lane: int) -> None:
            at, stop = lane * part, (lane + 1) * part
            while at < stop:
                at += self._lanes[lane].recv_into(self._buffer[at : min(at + CHUNK, stop)])

        start = time.perf_counter()
        for lane in self._lanes:
            lane.send(b"g")
        _in_threads(receive)
        return time.perf_counter() - start


def digest(worker: Worker) -> str:
    """Of K and V of all layers, in order of positions."""
    found = hashlib.blake2b()
    for layer in worker.pool:
        found.update(layer[:, worker.blocks].view(torch.uint8).numpy().data)
    return found.hexdigest()


def _in_threads(function: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=function, args=(lane,)) for lane in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _tell(control: Connection, message: object) -> None:
    control.send_bytes(json.dumps(message).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser("KV over TCP loopback: GB/s from pool to pool, next to raw sockets.")
    p.add_argument("--slots", type=int, default=64, help="arena slots of either side")
    p.add_argument("--slot-bytes", type=int, default=MIB, help="bytes of an arena slot, the largest frame")
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
    cpu: dict[str, list[float]] = {"kv": [], "raw": []}

    def counted(name: str, run: Callable[[int], float]) -> Callable[[], float]:
        def once() -> float:
            before = cluster.cpu_seconds()
            speed = run(tokens)
            cpu[name].append((cluster.cpu_seconds() - before) / (tokens * LAYOUT.bytes_per_token / 1e9))
            return speed

        return once

    ours, raw = counted("kv", cluster.transfer), counted("raw", cluster.raw)
    for warm_up in (ours, raw, ours, raw):
        warm_up()
    for seconds in cpu.values():
        seconds.clear()
    speeds, raw_speeds = interleaved(ours, raw, pairs)
    ratio, spread = paired_ratio(speeds, raw_speeds)
    name = f"kv.tcp.lanes{LANES}.{mib}MiB"
    report.add(
        Row(
            name, statistics.median(speeds), "GB/s", ratio=ratio, ratio_to="raw sockets", spread=spread,
            goal=0.85, better="higher",
        )
    )  # fmt: skip
    report.add(Row(f"{name}.raw", statistics.median(raw_speeds), "GB/s"))
    report.add(Row(f"{name}.cpu", statistics.mean(cpu["kv"]), "s/GB"))
    report.add(Row(f"{name}.raw.cpu", statistics.mean(cpu["raw"]), "s/GB"))


if __name__ == "__main__":
    sys.exit(main())
