"""`baton serve --ray-address`: a cluster on a Ray that was there before, which outlives the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.runner import PACKAGES

from .conftest import free_port
from .machine import Machine, alive, titled, tree, until

HEAD = """
import asyncio, sys, threading
from pathlib import Path
from cluster.lifeline import adopt_orphans
from cluster.local_ray import LocalRay
from cluster.processes import end_descendants

async def main():
    adopt_orphans()
    head = LocalRay(Path(sys.argv[1]), cpus=4, gpus=0)
    await head.start()
    import ray
    print(ray.get_runtime_context().gcs_address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await head.stop()
    end_descendants(10, threading.Event())

asyncio.run(main())
"""


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.remove()


def test_a_joined_cluster_outlives_the_command_recovers_and_stops(machine: Machine) -> None:
    ray_dir = machine.home / "ray"
    ray_dir.mkdir(mode=0o700)
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(ray_dir)],
        env=machine.environment | {"PYTHONPATH": PACKAGES},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        machine.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(ray_dir / "token")}
        run_a_cluster(machine, head.pid, address)
    finally:
        head.communicate()
    assert not Path(f"/proc/{head.pid}").exists()


def run_a_cluster(machine: Machine, head: int, address: str) -> None:
    port = free_port()
    flags = ("--ray-address", address, "--port", str(port), "--dtype", "float32")
    served = machine.baton("serve", *flags, within=90)
    assert served.returncode == 0, served.stdout + served.stderr
    ask(port)

    again = machine.baton("serve", "--ray-address", address, "--port", str(free_port()))
    assert again.returncode == 2
    assert "baton stop" in again.stderr

    # Nobody watches but actors: the worker's own one, and the supervisor, which is lost as well.
    worker = titled(head, "baton: decode 0")
    supervisor = titled(head, "ray::ClusterActor")
    assert worker is not None
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: titled(head, "baton: decode 0"), 60, "a new decode worker")
    ask(port)

    roles = [p for p in (titled(head, f"baton: {r} 0") for r in ("router", "prefill", "decode")) if p]
    assert len(roles) == 3
    family = [*roles, *(process for role in roles for process in tree(role.pid))]
    stopped = machine.baton("stop", "--ray-address", address)
    assert stopped.returncode == 0, stopped.stderr
    assert alive(family) == []
    assert list(machine.tmp.glob("baton*")) == []
    nothing = machine.baton("stop", "--ray-address", address)
    assert nothing.returncode == 2
    assert "no cluster" in nothing.stderr


def ask(port: int) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert "Paris" in json.load(response)["choices"][0]["text"]
