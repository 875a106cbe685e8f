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
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import psutil
import torch

from baton.bench.contract import Report, Row, interleaved, parser
from baton.bench.kv import exported
from baton.bench.kv.pair import BLOCK, Pair, Settings
from baton.bench.kv.raw_sockets import MIB, RawPair, cpu_seconds
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
    pairs = 7 if args.short else 15
    shown = {"lanes": args.lanes, "slots": args.slots, "slot_bytes": args.slot_bytes}
    shown |= {"pairs": pairs, "block_size": BLOCK, "pools": args.device}
    bench = Bench(Report("kv", shown, args.json), pairs, args.device)
    settings = Settings(args.lanes, args.slots, args.slot_bytes, max(SIZES) * MIB)
    parts = PARTS if args.only is None else (args.only,)
    if "tcp" in parts:
        bench.lanes(settings)
        if args.nixl is not None:
            bench.beside_nixl(settings, args.nixl)
    if "encrypted" in parts:
        bench.encrypted(settings)
    if "nixl" in parts and args.nixl is not None and nixl_installed():
        bench.nixl_connector(settings, args.nixl)
        if args.device == "cuda":
            bench.nixl_on_gpus(args.nixl)
    if "exported" in parts:
        bench.without_sockets()
    return bench.report.finish()


class Nixl:
    """NIXL in child processes. They poll, so they run only during their turn. Close it.

    `pieces`: of a transfer of so many bytes.
    """

    def __init__(
        self, memory: str, python: str, most_bytes: int, environment: dict[str, str],
        pieces: Callable[[int], int],
    ) -> None:  # fmt: skip
        driver = Path(__file__).with_name("nixl_driver.py")
        self._pieces = pieces
        self._process = subprocess.Popen(
            [python, str(driver), memory, str(most_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | environment, start_new_session=True,
        )  # fmt: skip

    def seconds(self, size: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(f"{size} {self._pieces(size)}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # other lines are its log
                os.killpg(self._process.pid, signal.SIGSTOP)
                return json.loads(line)["seconds"]
        raise RuntimeError(f"{self._process.args} ended")

    def cpu_seconds(self) -> float:
        children = psutil.Process(self._process.pid).children()
        return sum(map(cpu_seconds, (self._process.pid, *(child.pid for child in children))))

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.communicate("")


Way = Pair | RawPair | Nixl | exported.PlainCopy
"""A way to move bytes: the seconds for so many bytes, and its CPU seconds so far."""


@dataclass(frozen=True)
class Bench:
    report: Report
    pairs: int
    device: str

    def compare(
        self, name: str, way: Way, to: Way, mib: int, goal: float | None = None, *, shown: str = "",
        other: str = "raw sockets",
    ) -> None:  # fmt: skip
        """Adds row `name` with its ratio to `to`, which the report names `other`, and its CPU seconds for
        each GB.

        `shown` is a row for `to`.
        """
        size = mib * MIB
        cpu: list[float] = []
        other_cpu: list[float] = []

        def speed(each: Way, into: list[float]) -> float:
            before = each.cpu_seconds()
            seconds = each.seconds(size)
            into.append((each.cpu_seconds() - before) / size * 1e9)
            return size / 1e9 / seconds

        for each in (way, to):
            speed(each, [])  # warm up
        speeds, others = interleaved(lambda: speed(way, cpu), lambda: speed(to, other_cpu), self.pairs)
        self.report.add_ratio(name, speeds, "GB/s", others, other, goal=goal, better="higher")
        self.report.add(Row(f"{name}.cpu", statistics.mean(cpu), "s/GB"))
        if shown:
            self.report.add(Row(shown, statistics.median(others), "GB/s"))
            self.report.add(Row(f"{shown}.cpu", statistics.mean(other_cpu), "s/GB"))

    def lanes(self, settings: Settings) -> None:
        with (
            closing(RawPair(settings.lanes)) as raw,
            closing(Pair(settings)) as pair,
            closing(Pair(replace(settings, device=self.device))) as pools,
        ):
            for mib in SIZES:  # the largest at last: pools must hold the same KV when they close
                name = f"kv.tcp.lanes{settings.lanes}.{mib}MiB"
                self.compare(name, pair, raw, mib, 0.85, shown=f"{name}.raw")
                self.compare(f"{name}.pool", pools, raw, mib)

    def encrypted(self, settings: Settings) -> None:
        with closing(Pair(settings)) as plain, closing(Pair(replace(settings, encrypt=True))) as pair:
            for mib in SIZES:
                name = f"kv.tcp.lanes{settings.lanes}.{mib}MiB.encrypted"
                self.compare(name, pair, plain, mib, 0.5, shown=f"{name}.plain", other="plain lanes")

    def without_sockets(self) -> None:
        kind = exported.KINDS[self.device]
        for variant, settings in exported.variants(self.device).items():
            with exported.opened(settings, kind) as pair, closing(exported.PlainCopy(settings)) as plain:
                for mib in exported.SIZES[self.device]:
                    name = f"kv.{kind}.{mib}MiB"
                    judged = mib >= 1024 and torch.cuda.device_count() > 1 and not variant
                    shown = "" if variant else f"{name}.plain"
                    self.compare(
                        name + variant, pair, plain, mib, 0.75 if judged else None, shown=shown,
                        other="plain copies",
                    )  # fmt: skip

    def beside_nixl(self, settings: Settings, python: str) -> None:
        """Lanes in turns with NIXL over TCP."""
        nixl = Nixl("host", python, settings.most_bytes, NIXL_TCP, lambda size: NIXL_PIECES)
        with closing(Pair(settings)) as pair, closing(nixl):
            for mib in SIZES:
                name, shown = f"kv.vs.nixl_read.{mib}MiB", f"kv.nixl_read.{mib}MiB"
                self.compare(name, pair, nixl, mib, 2.0, shown=shown, other="NIXL over TCP")

    def nixl_connector(self, settings: Settings, python: str) -> None:
        """Beside NIXL alone, which reads the same bytes in pieces of a slot, all at once, without
        checksums."""
        settings = replace(settings, nixl=True)
        most, piece = settings.most_bytes, settings.slot_bytes
        for over, environment in NIXL_OVER.items():
            with (
                patch.dict(os.environ, environment),
                exported.opened(settings, "nixl") as pair,
                closing(_alone("host", python, most, environment, piece)) as alone,
            ):
                for mib in NIXL_SIZES:
                    name = f"kv.nixl{over}.{mib}MiB"
                    self.compare(name, pair, alone, mib, 0.9, shown=f"{name}.alone", other="NIXL alone")

    def nixl_on_gpus(self, python: str) -> None:
        """Beside NIXL alone between the same GPUs, in pieces of a slot there. NIXL alone neither gathers nor
        scatters."""
        variants = exported.variants("cuda")
        for variant in ("", ".default_slots"):
            settings = replace(variants[variant], exports=False, nixl=True, nixl_on_gpus=True)
            piece = exported_slot_bytes(settings.slot_bytes)
            with (
                exported.opened(settings, "nixl_cuda") as pair,
                closing(_alone("cuda", python, settings.most_bytes, {}, piece)) as alone,
            ):
                for mib in exported.SIZES["cuda"][1:]:
                    name, goal = f"kv.nixl_cuda.{mib}MiB", None if variant or mib < 1024 else 0.9
                    shown = "" if variant else f"{name}.alone"
                    self.compare(name + variant, pair, alone, mib, goal, shown=shown, other="NIXL alone")


def _alone(memory: str, python: str, most_bytes: int, environment: dict[str, str], piece: int) -> Nixl:
    return Nixl(memory, python, most_bytes, environment, lambda size: -(-size // piece))


if __name__ == "__main__":
    sys.exit(main())
