"""KV between two workers of one host: GB/s over TCP loopback, in turns with raw sockets, and without sockets.

`kv.tcp.lanes4.64MiB`  from arena to arena, with transfer processes, frames, checksums and credits: from
                       fetch() until the receiver reports the KV as injected. Without the copies between arena
                       and pool, as for raw sockets, and as NIXL and Mooncake define a transfer (registered
                       memory to registered memory)
`….raw`                the same bytes over plain sockets, with as many threads and connections (`raw_sockets`)
`….encrypted`          the first with --kv-encrypt, against plain lanes; GB/s and CPU of these are `….plain`
`….pool`               from one paged pool to the other, block size 16, shuffled blocks. On a CPU gather and
                       scatter compete with the sockets for cores; with `--device cuda` the GPU does them
`….cpu`, `….raw.cpu`   CPU seconds for each GB, of all processes

`kv.nixl.64MiB`        as the first, with --kv-connector nixl, against lanes, if NIXL is installed here

`kv.cuda_ipc.4096MiB`  from pool to pool, read from memory that the sender exports: between two GPUs, or in
                       one. On a CPU `kv.shared_memory.…`. The ratio is to plain copies, of 64 MiB each, from
                       memory of another process, which `….plain` shows
`kv.nixl_cuda.4096MiB` the same by NIXL, with `--device cuda`
`….default_slots`      with the slots that workers have by default: smaller copies, less memory
"""

import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from baton.bench.lab.driver import interleaved, parser, report_of
from baton.bench.lab.kv import exported
from baton.bench.lab.kv.pair import BLOCK, Pair, Settings
from baton.bench.lab.kv.raw_sockets import MIB, RawPair
from baton.bench.report import Report, Row
from baton.kv_transfer.nixl import memory as nixl

PARTS = ("tcp", "encrypted", "nixl", "exported")
SIZES = (64, 256)  # MiB


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser("KV between workers of one host: GB/s next to raw sockets, and next to plain copies.")
    p.add_argument("--lanes", type=int, default=4)
    p.add_argument("--slots", type=int, default=16, help="arena slots of each side")
    p.add_argument("--slot-bytes", type=int, default=4 * MIB, help="size of an arena slot: the largest frame")
    p.add_argument("--only", choices=PARTS, help="one kind of transport")
    args = p.parse_args(arguments)
    if args.only == "nixl" and not nixl.installed():
        p.error("--only nixl: NIXL is not installed. Install the extra `nixl`.")
    torch.set_num_threads(1)
    pairs = 7 if args.short else 15
    bench = Bench(report_of("kv", args, pairs=pairs, block_size=BLOCK), pairs, args.device)
    settings = Settings(args.lanes, args.slots, args.slot_bytes, max(SIZES) * MIB)
    parts = PARTS if args.only is None else (args.only,)
    if "tcp" in parts:
        bench.lanes(settings)
    if "encrypted" in parts:
        name = f"kv.tcp.lanes{settings.lanes}.%dMiB.encrypted"
        bench.beside_lanes(name, settings, replace(settings, encrypt=True), 0.5)
    if "nixl" in parts and nixl.installed():
        bench.beside_lanes("kv.nixl.%dMiB", settings, replace(settings, transport="nixl"), None)
    for variant, of_variant in exported.variants(args.device).items():
        if "exported" in parts:
            bench.without_sockets(variant, of_variant)
        if "nixl" in parts and nixl.installed() and args.device == "cuda":
            bench.without_sockets(variant, replace(of_variant, transport="nixl_cuda"))
    return bench.report.finish()


Way = Pair | RawPair | exported.PlainCopy
"""A way to move bytes: the seconds for so many bytes, and its CPU seconds so far."""


@dataclass(frozen=True)
class Bench:
    report: Report
    pairs: int
    device: str

    def compare(
        self, name: str, way: Way, to: Way, mib: int, goal: float | None = None, *, to_row: str = "",
        other: str = "raw sockets",
    ) -> None:  # fmt: skip
        """Adds row `name` with its ratio to `to`, which the report names `other`, and its CPU seconds for
        each GB.

        `to_row` is a row for `to`.
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
        speeds, other_speeds = interleaved(lambda: speed(way, cpu), lambda: speed(to, other_cpu), self.pairs)
        self.report.add_ratio(name, speeds, "GB/s", other_speeds, other, goal=goal, better="higher")
        self.report.add(Row(f"{name}.cpu", statistics.mean(cpu), "s/GB"))
        if to_row:
            self.report.add(Row(to_row, statistics.median(other_speeds), "GB/s"))
            self.report.add(Row(f"{to_row}.cpu", statistics.mean(other_cpu), "s/GB"))

    def lanes(self, settings: Settings) -> None:
        with (
            closing(RawPair(settings.lanes)) as raw,
            closing(Pair(settings)) as pair,
            closing(Pair(replace(settings, device=self.device))) as pools,
        ):
            for mib in SIZES:  # the largest at last: pools must hold the same KV when they close
                name = f"kv.tcp.lanes{settings.lanes}.{mib}MiB"
                self.compare(name, pair, raw, mib, 0.85, to_row=f"{name}.raw")
                self.compare(f"{name}.pool", pools, raw, mib)

    def beside_lanes(self, name: str, plain: Settings, settings: Settings, goal: float | None) -> None:
        """`name`: of the rows, with a place for the size."""
        with closing(Pair(plain)) as lanes, closing(Pair(settings)) as pair:
            for mib in SIZES:
                row = name % mib
                self.compare(row, pair, lanes, mib, goal, to_row=f"{row}.plain", other="plain lanes")

    def without_sockets(self, variant: str, settings: Settings) -> None:
        """From pool to pool, against plain copies. `variant`: the end of the rows' names."""
        with closing(Pair(settings)) as pair, closing(exported.PlainCopy(settings)) as plain:
            for mib in exported.SIZES[self.device]:
                name = f"kv.{settings.transport}.{mib}MiB"
                judged = mib >= 1024 and torch.cuda.device_count() > 1 and not variant
                self.compare(
                    name + variant, pair, plain, mib, 0.75 if judged else None,
                    to_row="" if variant else f"{name}.plain", other="plain copies",
                )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
