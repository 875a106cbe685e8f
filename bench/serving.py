"""A whole cluster for a bench: `baton serve` as a user has it, in a process tree of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

START_S, STOP_S = 180.0, 90.0
_POLL_S = 0.02


class Serving:
    """Use as a context manager: `/ready` when entered, all gone when left. Raises RuntimeError if it cannot.

    Attributes:
        started: time.monotonic() at which the command was typed.
        ready: at which `/ready` said so.
    """

    def __init__(self, directory: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.logs = directory / "logs"
        self.output = directory / "serve.log"
        command = [
            sys.executable,
            "-m",
            "cluster.cli",
            "serve",
            "--port",
            str(port),
            "--log-dir",
            str(self.logs),
        ]
        self.started = self.ready = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *flags], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Serving:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the bench ends the cluster
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() - self.started > START_S:
                self._stop()
                raise RuntimeError(f"baton serve did not come up:\n{self.output.read_text()}")
            time.sleep(_POLL_S)
        self.ready = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                return True
        except OSError:
            return False

    def _stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()  # its janitor cleans up
                self.process.wait()

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/status", timeout=30) as response:
            return json.load(response)

    def ask(self, max_tokens: int = 1) -> None:
        """One short completion, to its end."""
        body = {"prompt": "The capital of France is", "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
