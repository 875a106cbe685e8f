"""Reports the start-up of a worker to its parent process, as JSON lines on an inherited descriptor.

1. Any number of `{"stage": "loading weights", "fraction": 0.4}`.
2. Exactly one `{"ready": {...}}`, or one `{"error": "message for the user"}` before a non-zero exit. A worker
   that a signal stops during its start writes neither.
3. The worker closes the descriptor.
"""

import json
import logging
import os

log = logging.getLogger(__name__)


class ReadyPipe:
    """Writes the JSON lines. Owns `fd`; with None it writes nothing. A reader that has gone is ignored."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._last = ("", 0.0)

    def stage(self, stage: str, fraction: float) -> None:
        """Writes a stage when it begins, every 5 % of it, and its end. A loader reports every tensor."""
        last_stage, last_fraction = self._last
        if stage != last_stage or fraction - last_fraction >= 0.05 or fraction == 1.0:
            self._last = (stage, fraction)
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
            log.warning("the reader of the ready descriptor has closed it")
            self.close()
