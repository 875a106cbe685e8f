"""Available memory of the machine or its container. Imports no torch, so that every process can use it."""

from pathlib import Path


def host_memory(root: Path = Path("/")) -> int:
    """Bytes that a process could allocate: what the machine has available, at most the container's limit."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    limit = root / "sys/fs/cgroup/memory.max"
    of_container = limit.read_text().strip() if limit.is_file() else "max"
    return free if of_container == "max" else min(free, int(of_container))
