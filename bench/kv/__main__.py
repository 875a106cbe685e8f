"""KV between two workers of one host: GB/s over TCP loopback, in turns with raw sockets, and without sockets.

    python -m baton.bench.kv [--json PATH] [--short] [--device cpu|cuda] [--lanes N]
                       [--only tcp|encrypted|nixl|exported] [--nixl PYTHON]

`kv.tcp.lanes4.64MiB`  from arena to arena, with transfer processes, frames, checksums and credits: from
                       fetch() until the receiver reports the KV as injected. Without the copies between arena
                       and pool, as for raw sockets, and as NIXL and Mooncake define a transfer (registered
                       memory to registered memory)
`….raw`                the same bytes over plain sockets, with as many threads and connections (`raw_sockets`)
`….encrypted`          the first with --kv-encrypt, against plain lanes; GB/s and CPU of these are `….plain`
`….pool`               from one paged pool to the other, block size 16, shuffled blocks. On a CPU gather and
                       scatter compete with the sockets for cores; with `--device cuda` the GPU does them
`….cpu`, `….raw.cpu`   CPU seconds for each GB, of all processes

`kv.cuda_ipc.4096MiB`  from pool to pool, read from memory that the sender exports: between two GPUs, or in
                       one. On a CPU `kv.shared_memory.…`. The ratio is to plain copies, of 64 MiB each, from
                       memory of another process, which `….plain` shows
`….default_slots`      with the slots that workers have by default: smaller copies, less memory

With `--nixl PYTHON`, a Python that has NIXL: `kv.vs.nixl_read.256MiB` is Baton's GB/s over TCP and the ratio
to NIXL over TCP. `kv.nixl.256MiB`: --kv-connector nixl against NIXL alone, if NIXL is also installed for this
Python; with `.tcp` over UCX's TCP. `kv.nixl_cuda.4096MiB`, with `--device cuda`: from pool to pool over
memory of GPUs, as `kv.cuda_ipc`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import psutil
import torch

from baton.bench.contract import Report, Row, interleaved, parser
from baton.bench.kv import exported
from baton.bench.kv.pair import BLOCK, Pair, Settings, cpu_seconds
from baton.bench.kv.raw_sockets import MIB, RawPair
from baton.kv_transfer.config import nixl_installed
from baton.kv_transfer.staging import exported_slot_bytes

PARTS = ("tcp", "encrypted", "nixl", "exported")
SIZES = (64, 256)  # MiB
NIXL_TCP = {
    "UCX_TLS": "tcp,cuda_copy", "UCX_TCP_TX_SEG_SIZE": "2m", "UCX_TCP_RX_SEG_SIZE": "2m",
    "UCX_TCP_SNDBUF": "4m", "UCX_TCP_RCVBUF": "4m",
}  # fmt: skip
NIXL_PIECES = 4  # of a transfer
"""These settings were the best of those tried."""
# What UCX may use for `kv.nixl`: by default the shared memory of one host.
NIXL_OVER: dict[str, dict[str, str]] = {"": {}, ".tcp": NIXL_TCP}
NIXL_SIZES = (4, 64, 256)  # MiB


@dataclass
class Way:
    """A way to move bytes, and its CPU seconds for each GB."""

    seconds: Callable[[int], float]
    cpu_seconds: Callable[[], float]
    cpu: list[float] = field(default_factory=list)

    def speed(self, size: int) -> float:
        before = self.cpu_seconds()
        seconds = self.seconds(size)
        self.cpu.append((self.cpu_seconds() - before) / size * 1e9)
        return size / 1e9 / seconds


def ours(pair: Pair | exported.PlainCopy) -> Way:
    return Way(pair.seconds, pair.cpu_seconds)


def sockets(raw: RawPair) -> Way:
    return Way(raw.seconds, lambda: cpu_seconds(os.getpid()) + cpu_seconds(raw.pid))


def compare(
    report: Report, name: str, way: Way, to: Way, size: int, pairs: int, goal: float | None = None,
    shown: str = "", other: str = "raw sockets",
) -> None:  # fmt: skip
    """Adds row `name` with its ratio to `to`, which the report names `other`, and its CPU seconds.

    `shown` is a row for `to`.
    """
    for each in (way, to):
        each.speed(size)  # warm up
        each.cpu.clear()
    speeds, raw_speeds = interleaved(lambda: way.speed(size), lambda: to.speed(size), pairs)
    report.add_ratio(name, speeds, "GB/s", raw_speeds, other, goal=goal, better="higher")
    report.add(Row(f"{name}.cpu", statistics.mean(way.cpu), "s/GB"))
    if shown:
        report.add(Row(shown, statistics.median(raw_speeds), "GB/s"))
        report.add(Row(f"{shown}.cpu", statistics.mean(to.cpu), "s/GB"))


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser("KV between workers of one host: GB/s next to raw sockets, and next to plain copies.")
    p.add_argument("--lanes", type=int, default=4)
    p.add_argument("--slots", type=int, default=16, help="arena slots of each side")
    p.add_argument("--slot-bytes", type=int, default=4 * MIB, help="size of an arena slot: the largest frame")
    p.add_argument("--only", choices=PARTS, help="one kind of transport")
    p.add_argument("--nixl", metavar="PYTHON", help="a Python that has NIXL installed, to compare with")
    args = p.parse_args(arguments)
    if args.nixl is not None and not shutil.which(args.nixl):
        p.error(f"--nixl {args.nixl}: no such program. Give a Python that has NIXL installed.")
    torch.set_num_threads(1)
    settings = Settings(args.lanes, args.slots, args.slot_bytes, max(SIZES) * MIB)
    pairs = 7 if args.short else 15
    shown = {"lanes": args.lanes, "slots": args.slots, "slot_bytes": args.slot_bytes}
    shown |= {"pairs": pairs, "block_size": BLOCK, "pools": args.device}
    report = Report("kv", shown, args.json)
    parts = PARTS if args.only is None else (args.only,)
    if "tcp" in parts:
        with closing(RawPair(args.lanes)) as raw:
            rows(report, settings, args.device, sockets(raw), pairs)
        if args.nixl is not None:
            beside_nixl(report, settings, args.nixl, pairs)
    if "encrypted" in parts:
        encrypted(report, settings, pairs)
    if "nixl" in parts and args.nixl is not None and nixl_installed():
        nixl_connector(report, settings, args.nixl, pairs)
        if args.device == "cuda":
            nixl_on_gpus(report, args.nixl, pairs)
    if "exported" in parts:
        without_sockets(report, args.device, pairs)
    return report.finish()


class Nixl:
    """NIXL in child processes. They poll, so they run only during their turn. Close it."""

    def __init__(self, memory: str, python: str, most_bytes: int, environment: dict[str, str]) -> None:
        driver = Path(__file__).with_name("nixl_driver.py")
        self._process = subprocess.Popen(
            [python, str(driver), memory, str(most_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | environment, start_new_session=True,
        )  # fmt: skip

    def seconds(self, size: int, pieces: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(f"{size} {pieces}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # other lines are its log
                os.killpg(self._process.pid, signal.SIGSTOP)
                return json.loads(line)["seconds"]
        raise RuntimeError(f"{self._process.args} ended")

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid) + sum(
            cpu_seconds(child.pid) for child in psutil.Process(self._process.pid).children()
        )

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.communicate("")


def encrypted(report: Report, settings: Settings, pairs: int) -> None:
    with closing(Pair(settings)) as plain, closing(Pair(replace(settings, encrypt=True))) as pair:
        for mib in SIZES:
            name = f"kv.tcp.lanes{settings.lanes}.{mib}MiB.encrypted"
            shown = f"{name}.plain"
            compare(report, name, ours(pair), ours(plain), mib * MIB, pairs, 0.5, shown, "plain lanes")


def without_sockets(report: Report, device: str, pairs: int) -> None:
    for variant, settings in exported.variants(device).items():
        with (
            exported.opened(settings, exported.KINDS[device]) as pair,
            closing(exported.PlainCopy(settings)) as plain,
        ):
            for mib in exported.SIZES[device]:
                name = f"kv.{exported.KINDS[device]}.{mib}MiB"
                goal = None
                if mib >= 1024 and torch.cuda.device_count() > 1 and variant != ".default_slots":
                    goal = 0.75
                compare(
                    report, name + variant, ours(pair), ours(plain), mib * MIB, pairs, goal,
                    "" if variant else f"{name}.plain", "plain copies",
                )  # fmt: skip


def beside_nixl(report: Report, settings: Settings, python: str, pairs: int) -> None:
    """Lanes in turns with NIXL over TCP."""
    with (
        closing(Pair(settings)) as pair,
        closing(Nixl("host", python, settings.most_bytes, NIXL_TCP)) as nixl,
    ):
        for mib in SIZES:
            alone = Way(lambda size: nixl.seconds(size, NIXL_PIECES), nixl.cpu_seconds)
            name, shown = f"kv.vs.nixl_read.{mib}MiB", f"kv.nixl_read.{mib}MiB"
            compare(report, name, ours(pair), alone, mib * MIB, pairs, 2.0, shown, "NIXL over TCP")


def nixl_connector(report: Report, settings: Settings, python: str, pairs: int) -> None:
    """Beside NIXL alone, which reads the same bytes in pieces of a slot, all at once, without checksums."""
    settings = replace(settings, nixl=True)
    for over, environment in NIXL_OVER.items():
        with (
            patch.dict(os.environ, environment),
            exported.opened(settings, "nixl") as pair,
            closing(Nixl("host", python, settings.most_bytes, environment)) as peer,
        ):
            alone = in_pieces(peer, settings.slot_bytes)
            for mib in NIXL_SIZES:
                name = f"kv.nixl{over}.{mib}MiB"
                compare(report, name, ours(pair), alone, mib * MIB, pairs, 0.9, f"{name}.alone", "NIXL alone")


def nixl_on_gpus(report: Report, python: str, pairs: int) -> None:
    """Beside NIXL alone between the same GPUs, in pieces of a slot there. NIXL alone neither gathers nor
    scatters."""
    variants = exported.variants("cuda")
    for variant in ("", ".default_slots"):
        settings = replace(variants[variant], exports=False, nixl=True, nixl_on_gpus=True)
        with (
            exported.opened(settings, "nixl_cuda") as pair,
            closing(Nixl("cuda", python, settings.most_bytes, {})) as peer,
        ):
            alone = in_pieces(peer, exported_slot_bytes(settings.slot_bytes))
            for mib in exported.SIZES["cuda"][1:]:
                name, goal = f"kv.nixl_cuda.{mib}MiB", None if variant or mib < 1024 else 0.9
                shown = "" if variant else f"{name}.alone"
                compare(
                    report, name + variant, ours(pair), alone, mib * MIB, pairs, goal, shown, "NIXL alone"
                )


def in_pieces(peer: Nixl, piece: int) -> Way:
    return Way(lambda size: peer.seconds(size, -(-size // piece)), peer.cpu_seconds)


def rows(report: Report, settings: Settings, device: str, raw: Way, pairs: int) -> None:
    for mib in SIZES:
        name = f"kv.tcp.lanes{settings.lanes}.{mib}MiB"
        with closing(Pair(settings)) as pair:
            compare(report, name, ours(pair), raw, mib * MIB, pairs, 0.85, f"{name}.raw")
        with closing(Pair(replace(settings, device=device))) as pair:
            compare(report, f"{name}.pool", ours(pair), raw, mib * MIB, pairs)


if __name__ == "__main__":
    sys.exit(main())
