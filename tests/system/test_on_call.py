"""The commands of docs/on-call.md, typed as written on a cluster on Ray that has lost a worker."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from baton.bench.lab.harness.cluster import free_port
from tests.pages import typed
from tests.within import WITHIN

from .machine import Machine, until
from .raylets import Raylets
from .test_raylets import FLAGS, machine, raylets  # noqa: F401  fixtures

pytestmark = pytest.mark.all

FOUND = {
    "baton status": "decode 1",
    "baton top": "prompt/s",
    "baton status --worker $WORKER": "decode 0",
    "grep": "attempt 1 failed",
    "baton flip": "decode 1: decode → prefill",
    "baton plan": "baton serve",
    "baton doctor": "KV came over for 2 of 2 pairs of workers",
}
"""What the output of a command has, by its beginning."""


@pytest.mark.long
def test_the_page_is_typed(machine: Machine, raylets: Raylets) -> None:  # noqa: F811
    raylets.add(5)
    url, logs = f"http://127.0.0.1:{(port := free_port())}", machine.home / "logs"
    flags = ("--port", str(port), "--prefill", "1", "--decode", "2", "--log-dir", str(logs), *FLAGS)
    served = machine.baton("serve", "--ray-address", raylets.address, *flags, within=240)
    assert served.returncode == 0, served.stdout + served.stderr
    request = interrupted(url)
    workers = status(url)["workers"]
    (decode,) = [w["address"] for w in workers if (w["role"], w["index"]) == ("decode", 0)]
    environment = machine.environment | {
        "BATON_URL": url, "WORKER": decode, "REQUEST": request, "LOGS": str(logs), "COLUMNS": "200",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    steps = [line for step in typed("docs/on-call.md") for line in step.command.splitlines() if line.strip()]
    assert len(steps) == 9
    for command in map(str.strip, steps):
        done = subprocess.run(
            ["bash", "-ec", command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=WITHIN,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        beginning = max((each for each in FOUND if command.startswith(each)), key=len, default=None)
        if beginning is not None:
            assert FOUND[beginning] in done.stdout, f"{command}: {done.stdout}"
    assert machine.baton("stop", "--ray-address", raylets.address).returncode == 0


def status(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/status", timeout=WITHIN) as answer:
        return json.load(answer)


def interrupted(url: str) -> str:
    """Kills the decode worker of a stream. Returns the id of the request, which the stream survives."""
    body = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
    asked = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "x-request-id": "the-one-that-was-cut"},
    )
    with urllib.request.urlopen(asked, timeout=WITHIN) as stream:
        lines = iter(stream)
        next(lines)
        killed = until(lambda: busy(url), WITHIN, "a worker reports the request")
        os.kill(killed["pid"], signal.SIGKILL)
        text = b"".join(lines)
    assert text.rstrip().endswith(b"[DONE]")
    ready = lambda: all(w["state"] == "ready" for w in status(url)["workers"])  # noqa: E731
    until(lambda: (len(status(url)["workers"]) == 3 and ready()) or None, WITHIN, "all workers are back")
    return "the-one-that-was-cut"


def busy(url: str) -> dict[str, Any] | None:
    """The role that decodes."""
    found = status(url)
    at = [w["address"] for w in found["workers"] if w["status"]["requests_decoding"]]
    return next((role for role in found["cluster"]["roles"] if role["address"] in at), None)
