"""The three roles by hand, as under systemd or plain Kubernetes: given addresses, a shared secret, no Ray."""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.roles import spawn

from .machine import Machine, until


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """One on which `import ray` fails."""
    machine = Machine()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('ray is not installed')")
    secret = tmp_path / "secret"
    secret.write_text("a secret of the whole cluster")
    machine.environment |= {"PYTHONPATH": str(tmp_path), "BATON_CLUSTER_SECRET_FILE": str(secret)}
    yield machine
    machine.remove()


@contextlib.contextmanager
def role(machine: Machine, *command: str) -> Iterator[Any]:
    """Runs a role; gives what it says it is once it is ready. SIGTERM ends it."""
    process, lines = spawn(command[0], *command[1:], environment=machine.environment)
    try:
        with lines:
            for line in lines:
                message = json.loads(line)
                assert "error" not in message, message
                if "ready" in message:
                    yield message["ready"]
                    break
            else:
                raise AssertionError(f"{command[0]} ended before it was ready")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_prefill_decode_and_router_started_by_hand_without_ray(machine: Machine) -> None:
    serve = machine.baton("serve", "--port", "0", "--ray-address", "127.0.0.1:1")
    assert serve.returncode == 2
    assert "pip install -e '.[ray]'" in serve.stderr
    worker = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1")
    with (
        role(machine, "prefill", *worker) as prefill,
        role(machine, "decode", *worker) as decode,
        role(
            machine, "router", "--port", "0", "--worker", prefill["address"], "--worker", decode["address"]
        ) as router,
    ):

        def ready() -> bool | None:
            try:
                with urllib.request.urlopen(router["url"] + "/ready", timeout=5):
                    return True
            except OSError:
                return None

        until(ready, 30, "the router is attached to both")
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            router["url"] + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert "Paris" in json.load(response)["choices"][0]["text"]
        doctor = machine.baton("doctor", "--cluster", "--url", router["url"])
        assert doctor.returncode == 0, doctor.stdout
        assert "3 tokens in" in doctor.stdout
        assert "model_fingerprint: the same at all" in doctor.stdout
    machine.assert_no_trace()
