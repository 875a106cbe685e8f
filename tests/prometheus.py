"""A real Prometheus (Debian's package `prometheus`) that scrapes what a test runs."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.within import WITHIN


def find(program: str) -> str:
    """ "prometheus" or "promtool", in the virtual environment or on the PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = shutil.which(program, path=path)
    assert found, f"there is no {program}: `make prometheus` gets it, or install the package prometheus"
    return found


class Prometheus:
    """Listens from the beginning. Scrapes and evaluates every second. Use as a context manager."""

    def __init__(self, directory: Path, rules: Path, router: str) -> None:
        """`router`: host:port of a router, which names its workers."""
        program = find("prometheus")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": "baton-router", "static_configs": [{"targets": [router]}]},
                {
                    "job_name": "baton-workers",
                    "http_sd_configs": [
                        {"url": f"http://{router}/metrics/targets", "refresh_interval": "1s"}
                    ],
                },
            ],
        }
        file = directory / "prometheus.yaml"
        file.write_text(json.dumps(config))  # which is YAML too
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = "{}:{}".format(*free.getsockname())
        self.url = f"http://{address}"
        self._log = directory / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program, f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def __enter__(self) -> Prometheus:
        self.wait_for(lambda: self._up(), "it to serve")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(WITHIN)

    def wait_for(
        self, condition: Callable[[], bool], what: str, why_not: Callable[[], str] = lambda: ""
    ) -> None:
        deadline = time.monotonic() + WITHIN
        while not condition():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, f"{what}: {why_not() or self._log.read_text()[-4000:]}"
            time.sleep(0.1)

    def values(self, query: str) -> list[float]:
        """Of every series that an instant query finds. Raises AssertionError for one that is wrong."""
        data = urllib.parse.urlencode({"query": query}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", data, timeout=WITHIN) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        return [float(series["value"][1]) for series in answer["data"]["result"]]

    def without_numbers(self, queries: Iterable[str]) -> list[str]:
        """Those that find nothing, or only what is not a number."""
        return [query for query in queries if all(math.isnan(value) for value in self.values(query))]

    def alerts(self) -> list[dict[str, Any]]:
        """Those that are pending or firing."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=WITHIN) as response:
            return json.load(response)["data"]["alerts"]

    def _up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False
