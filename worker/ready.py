"""How a worker tells whoever started it that it came up: JSON lines on an inherited descriptor.

Any number of `{"stage": "loading weights", "fraction": 0.4}`, then exactly one `{"ready": {...}}` or,
before a non-zero exit, one `{"error": "message for the user"}`; after either the descriptor is closed.
"""

import json
import logging
import os

log = logging.getLogger(__name__)


class ReadyPipe:
    """Owns `fd` (None: only logs). A reader that went away is no reason to stop."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._told = ("", 0.0)

    def stage(self, stage: str, fraction: float) -> None:
        """Tells new stages and every twentieth of one; a loader reports each tensor."""
        told, before = self._told
        if stage != told or fraction - before >= 0.05 or fraction == 1.0:
            self._told = (stage, fraction)
            self._write({"stage": stage, "fraction": round(fraction, 3)})

    def ready(self, **about: str | int) -> None:
        self._write({"ready": about})
        self.close()

    def error(self, message: str) -> None:
        self._write({"error": message})
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, line: dict[str, object]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
        except BrokenPipeError:
            log.warning("nobody reads the ready descriptor any more")
            self.close()
