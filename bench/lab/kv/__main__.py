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

`kv.link.0.2GBs`       over a link of so many bytes between two network namespaces (`--only link`; needs root)
`kv.link.2x0.2GBs`     over two of them, against one
`kv.link.0.1+0.3GBs`   over two cards that carry so much, against the first one

`kv.nixl.64MiB`        as the first, with --kv-connector nixl, against lanes, if NIXL is installed here

`kv.cuda_ipc.4096MiB`  from pool to pool, read from memory that the sender exports: between two GPUs, or in
                       one. On a CPU `kv.shared_memory.…`. The ratio is to plain copies, of 64 MiB each, from
                       memory of another process, which `….plain` shows
`kv.nixl_cuda.4096MiB` the same by NIXL, with `--device cuda`
`….default_slots`      with the slots that workers have by default: smaller copies, less memory
"""

import statistics
import sys
from argparse import Namespace
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch

from baton.bench.lab.driver import Bench, Option, Run, in_turns
from baton.bench.lab.harness.hosts import Hosts
from baton.bench.lab.kv import exported
from baton.bench.lab.kv.pair import BLOCK, Pair, Settings
from baton.bench.lab.kv.raw_sockets import MIB, RawPair
from baton.bench.report import Row
from baton.kv_transfer.config import SLOT_BYTES, SLOTS
from baton.kv_transfer.nixl import memory as nixl

PARTS = ("tcp", "encrypted", "nixl", "exported", "link")
SIZES = (64, 256)  # MiB
LINKS = (0.1, 0.2, 0.4)  # GB/s
TWO_LINKS = {"2x0.2": (0.2, 0.2), "0.1+0.3": (0.1, 0.3)}  # GB/s
OF_SUM = 0.9  # of what both carry (must)


Way = Pair | RawPair | exported.PlainCopy
"""A way to move bytes: the seconds for so many bytes, and its CPU seconds so far."""


def compare(
    run: Run, name: str, way: Way, to: Way, mib: int, goal: float | None = None, *, to_row: str = "",
    other: str = "raw sockets",
) -> None:  # fmt: skip
    """Adds row `name` with its ratio to `to`, which the report names `other`, and its CPU seconds for each
    GB. `to_row` is a row for `to`."""
    size = mib * MIB

    def moved(each: Way) -> tuple[float, float]:
        """GB/s, and CPU seconds for each GB."""
        before = each.cpu_seconds()
        seconds = each.seconds(size)
        return size / 1e9 / seconds, (each.cpu_seconds() - before) / size * 1e9

    moved(way), moved(to)  # warm up
    ours, others = in_turns(partial(moved, way), partial(moved, to), rounds=run.args.pairs)
    (speeds, cpu), (other_speeds, other_cpu) = zip(*ours, strict=True), zip(*others, strict=True)
    run.add_ratio(name, speeds, "GB/s", other_speeds, other, goal=goal, better="higher")
    run.add(Row(f"{name}.cpu", statistics.mean(cpu), "s/GB"))
    if to_row:
        run.add(Row(to_row, statistics.median(other_speeds), "GB/s"))
        run.add(Row(f"{to_row}.cpu", statistics.mean(other_cpu), "s/GB"))


def lanes(run: Run, settings: Settings) -> None:
    with (
        closing(RawPair(settings.lanes)) as raw,
        closing(Pair(settings)) as pair,
        closing(Pair(replace(settings, device=run.device))) as pools,
    ):
        for mib in SIZES:  # the largest at last: pools must hold the same KV when they close
            name = f"kv.tcp.lanes{settings.lanes}.{mib}MiB"
            compare(run, name, pair, raw, mib, 0.85, to_row=f"{name}.raw")
            compare(run, f"{name}.pool", pools, raw, mib)


def beside_lanes(run: Run, name: str, plain: Settings, settings: Settings, goal: float | None) -> None:
    """`name`: of the rows, with a place for the size."""
    with closing(Pair(plain)) as lanes, closing(Pair(settings)) as pair:
        for mib in SIZES:
            row = name % mib
            compare(run, row, pair, lanes, mib, goal, to_row=f"{row}.plain", other="plain lanes")


def without_sockets(run: Run, variant: str, settings: Settings) -> None:
    """From pool to pool, against plain copies. `variant`: the end of the rows' names."""
    with closing(Pair(settings)) as pair, closing(exported.PlainCopy(settings)) as plain:
        for mib in exported.SIZES[run.device]:
            name = f"kv.{settings.transport}.{mib}MiB"
            judged = mib >= 1024 and torch.cuda.device_count() > 1 and not variant
            compare(
                run, name + variant, pair, plain, mib, 0.75 if judged else None,
                to_row="" if variant else f"{name}.plain", other="plain copies",
            )  # fmt: skip


def over_links(run: Run, settings: Settings) -> None:
    with Hosts(2, cards=2) as network, network.hosts[1].inside():
        sender, here = network.hosts
        with (
            closing(RawPair(settings.lanes, sender, here.address)) as raw,
            closing(Pair(replace(settings, sender=sender))) as pair,
        ):
            for rate in LINKS:
                sender.limit(sends=rate * 1e9)
                compare(run, f"kv.link.{rate}GBs", pair, raw, SIZES[0], 0.95, to_row=f"kv.link.{rate}GBs.raw")
            two = replace(settings, sender=sender, cards=2, sources=tuple(here.addresses))
            with closing(Pair(two)) as cards:
                for kind, rates in TWO_LINKS.items():
                    for card, rate in enumerate(rates):
                        sender.limit(sends=rate * 1e9, card=card)
                    name, goal = f"kv.link.{kind}GBs", OF_SUM * sum(rates) / rates[0]
                    compare(run, name, cards, pair, SIZES[0], goal, to_row=f"{name}.one", other="one link")


def measure(run: Run) -> None:
    args = run.args
    torch.set_num_threads(1)
    run.parameters["block_size"] = BLOCK
    settings = Settings(args.lanes, args.slots, args.slot_bytes, max(SIZES) * MIB, sums=run.on_gpus)
    parts = PARTS[:-1] if args.only is None else (args.only,)
    if "tcp" in parts:
        lanes(run, settings)
    if "link" in parts:
        over_links(run, settings)
    if "encrypted" in parts:
        name = f"kv.tcp.lanes{settings.lanes}.%dMiB.encrypted"
        beside_lanes(run, name, settings, replace(settings, encrypt=True), 0.5)
    if "nixl" in parts and nixl.installed():
        beside_lanes(run, "kv.nixl.%dMiB", settings, replace(settings, transport="nixl"), None)
    for variant, of_variant in exported.variants(run.device).items():
        if "exported" in parts:
            without_sockets(run, variant, of_variant)
        if "nixl" in parts and nixl.installed() and run.on_gpus:
            without_sockets(run, variant, replace(of_variant, transport="nixl_cuda"))


def check(args: Namespace) -> None:
    if args.only == "nixl" and not nixl.installed():
        raise ValueError("--only nixl: NIXL is not installed. Install the extra `nixl`.")


BENCH = Bench(
    "kv",
    measure,
    __doc__,
    options=(
        Option("--lanes", "", 4),
        Option("--slots", "arena slots of each side", SLOTS),
        Option("--slot-bytes", "size of an arena slot: the largest frame", SLOT_BYTES),
        Option("--pairs", "", 15, short=7),
        Option("--only", "one kind of transport", choices=PARTS),
    ),
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
