"""What a transfer process counts."""

import logging
import time
from collections import Counter
from typing import Any

log = logging.getLogger("baton.kv")

_LINES, _SECONDS = 10, 10.0  # lines at most in that time, of one kind and reason


def printable(text: str) -> str:
    """What a peer wrote, with its control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class TransferCounters:
    def __init__(self) -> None:
        self.bytes_sent = 0  # payload of KV frames
        self.frames_sent = 0
        self.bytes_received = 0  # verified
        self.frames_received = 0
        self.late_frames = 0  # of transfers that had ended: read away
        self.transfers: Counter[str] = Counter()  # ended, by reason
        self.checksum_failures: Counter[str] = Counter()  # by kind
        self.refused: Counter[str] = Counter()  # peers, frames and messages, by reason
        self.deadlines: Counter[str] = Counter()  # expired, by name
        self._lines: dict[str, tuple[float, int]] = {}  # of a kind: since when, how many

    def totals(self) -> dict[str, Any]:
        """By their names in `TransferStats`."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def refuse(self, reason: str, message: str) -> None:
        """What comes from the network is refused with a counter and a line in the log."""
        self.refused[reason] += 1
        self._log(f"refused ({reason})", message)

    def checksum(self, kind: str, message: str) -> None:
        self.checksum_failures[kind] += 1
        self._log(f"checksum ({kind})", message)

    def expire(self, name: str, message: str) -> None:
        self.deadlines[name] += 1
        self._log(f"deadline ({name})", message)

    def _log(self, what: str, message: str) -> None:
        """Peers cause these lines, as often as they like."""
        now = time.monotonic()
        since, lines = self._lines.get(what, (now, 0))
        if now >= since + _SECONDS:
            if lines > _LINES:
                log.warning("%s: %d more in %.0f s", what, lines - _LINES, now - since)
            since, lines = now, 0
        self._lines[what] = since, lines + 1
        if lines < _LINES:
            log.warning("%s: %s", what, printable(message))
