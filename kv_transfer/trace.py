"""Chrome trace events, one a line, for Perfetto: what ran when, in every process, on one clock.

A file starts with `[` and every event ends with a comma. The format allows the missing `]`, so a killed
process leaves a readable trace. To merge files, drop the first line of all but one, and join them with `cat`.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from baton.kv_transfer.slices import Slice

_FLUSH_EVERY = 256

log = logging.getLogger("baton.kv")


class TraceWriter:
    """Spans and instants in µs of CLOCK_MONOTONIC, which all processes of a host share. Thread-safe.

    With no path every call returns at once; ask `enabled` before building costly arguments. Events that
    cannot be written, as on a full disk, are lost.
    """

    def __init__(self, path: str | os.PathLike[str] | None, process_name: str) -> None:
        self.enabled = path is not None
        self._lock = threading.Lock()  # guards the buffer and the file
        self._lines: list[bytes] = []
        self._file = None
        self._failed = False  # as the log says
        if path is not None:
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115  closed by close()
            self._lines.append(b"[\n")
            self._add({"ph": "M", "name": "process_name", "args": {"name": process_name}})

    def span(self, name: str, start: float, end: float, **args: Any) -> None:
        """From `start` to `end`, both time.monotonic()."""
        if self.enabled:
            self._add({"ph": "X", "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args})

    def moved(self, name: str, s: Slice, start: float, end: float) -> None:
        """A slice on its way to a peer, or from one."""
        if self.enabled:
            self.span(name, start, end, layer=s.piece.layer, seq=s.seq)

    def instant(self, name: str, **args: Any) -> None:
        if self.enabled:
            self._add({"ph": "i", "s": "t", "name": name, "ts": time.monotonic() * 1e6, "args": args})

    @contextmanager
    def measure(self, name: str, **args: Any) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        start = time.monotonic()
        yield
        self.span(name, start, time.monotonic(), **args)

    def flush(self) -> None:
        with self._lock:
            self._write()

    def close(self) -> None:
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
            self._file = None
            self.enabled = False

    def _add(self, event: dict[str, Any]) -> None:
        line = msgspec.json.encode(event | {"pid": os.getpid(), "tid": threading.get_native_id()}) + b",\n"
        with self._lock:
            self._lines.append(line)
            if len(self._lines) >= _FLUSH_EVERY:
                self._write()

    def _write(self) -> None:
        if self._file is not None and self._lines:
            try:
                self._file.write(b"".join(self._lines))
            except OSError as error:
                if not self._failed:
                    log.warning("%s: %s; events are lost", self._file.name, error.strerror)
                self._failed = True
        self._lines.clear()


NO_TRACE = TraceWriter(None, "no process")
"""Writes nothing."""
