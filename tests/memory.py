"""How much memory a process has."""

from pathlib import Path


def anonymous_bytes(pid: int | str = "self") -> int:
    """The memory of a process that is of no file. Pages that it shares with its forks count, so their end
    changes nothing. The kernel counts it, so this reads no page tables."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10
