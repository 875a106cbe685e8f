"""How much of its machine this process may use.

A container sees the CPUs and the memory of the whole machine. Its cgroup says what it may use.

`addresses` has ports and addresses, `directories` those that a user names,
`connections` the bound of those to a port, `cpu_engines` engines that compute on the same CPUs, `memory` what
gives freed memory back, `device_memory` memory of a GPU or CPU whose pages move, `kept_pages` pages that
outlive a process, `cuda_driver` raw memory of a GPU and its handles, `background` what gives way to other
processes, `turns` the turns of tenants in a thread, `logs` the lines that every process logs, `tracing` the
spans of requests, `lines` and `words` what files and texts share.
The package imports no other package of Baton, and no torch.
"""

import math
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

_ROOT = Path("/")


def usable_cpus(root: Path = _ROOT) -> int:
    """CPUs that this process can keep busy: those of its affinity, at most the CPU quota of its cgroup.
    A part of a CPU counts as one.

    With more threads than its quota a process is stopped for the rest of each period, often 100 ms.
    `os.cpu_count` and `os.process_cpu_count` do not know quotas. `root` has /proc and /sys."""
    return _cpus_and_group(root)[0]


def limited_by_quota() -> bool:
    """Whether a quota gives this process less than its affinity."""
    return _cpus_and_group(_ROOT)[1] is not None


def cpu_names(root: Path = _ROOT) -> list[str]:
    """Names of the CPUs that this process computes on. Two processes share CPUs if they share a name. No CPU
    of another machine has such a name.

    With a quota it is one name, that of the cgroup: the processes of a cgroup share its quota, and those of
    others have CPU time of their own. `root` has /proc and /sys."""
    boot, (_, group) = "".join(_words(root / "proc/sys/kernel/random/boot_id"))[:8], _cpus_and_group(root)
    if not boot:
        return []
    if group is None:
        return [f"{boot} cpu {number}" for number in sorted(os.sched_getaffinity(0))]
    # The path is as the namespace shows it: "/" in most containers.
    namespace = (root / "proc/self/ns/cgroup").stat().st_ino
    return [f"{boot} cgroup {namespace} {group}"]


def _cpus_and_group(root: Path) -> tuple[int, Path | None]:
    """As `usable_cpus`, and the cgroup whose quota is below the affinity. None: none is."""
    cpus, limiting = len(os.sched_getaffinity(0)), None
    for group in _cgroups(root, "cpu"):
        quota = _words(group / "cpu.max") or (
            _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        )
        if quota and quota[0] not in ("max", "-1"):
            most = math.ceil(int(quota[0]) / int(quota[1]))
            if most < cpus:
                cpus, limiting = most, group
    return max(1, cpus), limiting


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that a process could allocate: what the machine has available, at most what its cgroup has left.
    `root` has /proc and /sys."""
    free = _meminfo(root, "MemAvailable")
    for group in _cgroups(root, "memory"):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes") or ["0"]
        if limit and limit[0] != "max":
            free = min(free, int(limit[0]) - int(used[0]) + _page_cache(group))
    return max(0, free)


def memory_limit(root: Path = _ROOT) -> int:
    """Bytes that this process and the others of its cgroup may have in all: those of the machine, at most the
    limit of the cgroup. `root` has /proc and /sys."""
    most = _meminfo(root, "MemTotal")
    for group in _cgroups(root, "memory"):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        if limit and limit[0] != "max":
            most = min(most, int(limit[0]))
    return most


def memory_share(part: int, most: int) -> int:
    """The `part`-th part of `memory_limit`, at most `most` bytes."""
    return min(most, memory_limit() // part)


def oom_kills(root: Path = _ROOT) -> int:
    """How many processes of this cgroup the kernel has killed for want of memory. 0: no cgroup tells. `root`
    has /proc and /sys."""
    kills = [0]
    for words in map(_words, _kill_counters(root)):
        pairs = zip(words[::2], words[1::2], strict=False)
        kills += [int(number) for name, number in pairs if name == "oom_kill"]
    return max(kills)


@cache
def _kill_counters(root: Path) -> Sequence[Path]:
    """The files that count kills, found once: a process stays in its cgroup, and each request of a child asks
    for the counts."""
    names = "memory.events", "memory.oom_control"
    files = (group / name for group in _cgroups(root, "memory") for name in names)
    return [*dict.fromkeys(file for file in files if file.is_file())]


def _meminfo(root: Path, name: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _page_cache(group: Path) -> int:
    """Bytes of files in the memory of a cgroup and of all below it. They can make room."""
    words = _words(group / "memory.stat")
    stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    kinds = ("inactive_file", "active_file")
    return sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in kinds)  # version 1 has both


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The cgroups of this process that limit what `controller` controls, with all above them.

    A limit holds for all groups below. The path in /proc may be that on the host, of which a container sees
    only its own group, as the root of what is mounted. So folders that are not there are left out."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []  # a kernel without cgroups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = ["", "unified"]  # version 2, also beside version 1
        elif controller in controllers.split(","):
            mounts = [controllers, controller]
        else:
            continue
        below = [part for part in path.split("/") if part not in ("", "..")]
        for mount in mounts:
            mounted = root / "sys/fs/cgroup" / mount
            yield from (mounted.joinpath(*below[:depth]) for depth in range(len(below) + 1))


def _words(file: Path) -> tuple[str, ...]:
    """The words of a small file; none if it cannot be read."""
    try:
        return tuple(file.read_text().split())
    except OSError:
        return ()
