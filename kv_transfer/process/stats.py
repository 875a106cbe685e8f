"""What a transfer process counts."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger("baton.kv")


class Counters:
    def __init__(self) -> None:
        self.kv_bytes = 0
        self.kv_frames = 0
        self.late_frames = 0  # of transfers that had ended: read away
        self.transfers: Counter[str] = Counter()  # ended, by reason
        self.checksum_failures: Counter[str] = Counter()  # by kind
        self.refused: Counter[str] = Counter()  # peers, frames and messages, by reason
        self.deadlines: Counter[str] = Counter()  # expired, by name

    def refuse(self, reason: str, message: str) -> None:
        """Nothing from the network is refused without a counter and a line in the log."""
        self.refused[reason] += 1
        log.warning("refused (%s): %s", reason, message)

    def checksum(self, kind: str, message: str) -> None:
        self.checksum_failures[kind] += 1
        log.warning("checksum (%s): %s", kind, message)

    def expire(self, name: str, message: str) -> None:
        self.deadlines[name] += 1
        log.warning("deadline (%s): %s", name, message)
