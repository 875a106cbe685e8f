"""What a process may have of its machine: descriptors, memory, CPU time."""

import contextlib
import resource
from pathlib import Path

_DESCRIPTORS = 65_536
"""As many as the systemd units allow. Some programs do something for each descriptor that they may have."""


def raise_descriptor_limit() -> None:
    """Lets this process and its children open as many files as its hard limit allows, at most `_DESCRIPTORS`.

    Most systems let a process have 1,024 at first, which clients and peers would fill."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def memory() -> list[int]:
    """Bytes of this process: of its addresses, those that are resident, and those of files among these."""
    return [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:3]]


def limit_memory(most: int) -> None:
    """Limits what this process may have beside what it has now. A lower limit before this one stays.

    If memory ends nevertheless, the kernel should end this process, and no process that serves."""
    most += memory()[0]
    _, before = resource.getrlimit(resource.RLIMIT_AS)
    most = most if before == resource.RLIM_INFINITY else min(most, before)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
