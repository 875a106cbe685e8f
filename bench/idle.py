"""How soon does `baton serve` give a token, and what does it cost when nobody asks? `python -m bench.idle`

Starts the embedded model with one worker of each role, several times; then leaves the last cluster alone, and
adds up the memory and the CPU time of its processes, by who they belong to.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.contract import Report, Row, parser
from bench.serving import Serving

SETTLE_S = 5.0
"""Until the work that the last request caused is over."""
_TICK = os.sysconf("SC_CLK_TCK")
_TIMING = re.compile(r"\s*[\d.]+s +[\d.]+s  ")  # a row of --timings
OWNERS = ("serve", "router", "workers")


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # gone
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    found = [pid]
    for each in found:
        found += children[each]
    return found


def owner(title: str) -> str:
    """Whose a process is, by its title, as "baton 8000: decode 0 engine"."""
    name = title.partition(": ")[2]
    if name.startswith(("prefill", "decode")):
        return "workers"
    return "router" if name.startswith("router") else "serve"


def memory_and_cpu(pids: Sequence[int]) -> dict[str, tuple[float, float]]:
    """MiB (each process' share of what is shared: PSS) and CPU seconds up to now, by owner."""
    found = dict.fromkeys(OWNERS, (0.0, 0.0))
    for pid in pids:
        proc = Path(f"/proc/{pid}")
        try:
            title = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            rollup = (proc / "smaps_rollup").read_text()
            fields = (proc / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone
        pss = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1024
        memory, cpu = found[owner(title)]
        found[owner(title)] = (memory + pss, cpu + (int(fields[11]) + int(fields[12])) / _TICK)
    return found


def main(argv: Sequence[str] | None = None) -> Report:
    p = parser(__doc__ or "", devices=("cpu",))
    p.add_argument("--starts", type=int, default=5)
    p.add_argument("--seconds", type=float, default=30.0, help="how long it is left alone")
    args = p.parse_args(argv)
    starts, seconds = (2, 10.0) if args.short else (args.starts, args.seconds)
    report = Report("idle", {"starts": starts, "seconds": seconds}, args.json)
    took: list[float] = []
    timings: list[str] = []
    before = after = dict.fromkeys(OWNERS, (0.0, 0.0))
    for number in range(starts):
        with tempfile.TemporaryDirectory() as directory, Serving(Path(directory), "--timings") as serving:
            serving.ask()
            took.append(time.monotonic() - serving.started)
            if number == starts - 1:
                serving.ask(16)
                time.sleep(SETTLE_S)
                before = memory_and_cpu(tree(serving.process.pid))
                time.sleep(seconds)
                after = memory_and_cpu(tree(serving.process.pid))
                timings = [line for line in serving.output.read_text().splitlines() if _TIMING.match(line)]
    report.add(
        Row("idle.first_token", statistics.median(took), "s", p99=max(took), goal=15.0, better="lower")
    )
    for name in OWNERS:
        cpu = (after[name][1] - before[name][1]) / seconds
        report.add(Row(f"idle.memory.{name}", after[name][0], "MiB"))
        report.add(Row(f"idle.cpu.{name}", 100 * cpu, "% of a core"))
    report.add(Row("idle.memory.all", sum(memory for memory, _ in after.values()), "MiB"))
    report.detail = {"timings": timings}
    report.finish()
    print("The last start:", *timings, sep="\n")
    return report


if __name__ == "__main__":
    main()
