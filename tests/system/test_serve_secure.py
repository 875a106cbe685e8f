"""`baton serve` with all that guards it: TLS everywhere, keys, two router processes, an admin port."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
from pathlib import Path

import httpx2
import openai

from cluster.processes import descendants
from tests.conftest import Certificates

from .conftest import free_port
from .machine import BATON, Machine, until

KEY, SECRET = "sk-of-a-test-and-nobody-else", "a cluster secret of a test and nobody else"


def test_tls_keys_and_two_processes(tmp_path: Path, certificates: Certificates) -> None:
    machine = Machine()
    keys, secret = tmp_path / "keys.toml", tmp_path / "secret"
    keys.write_text(f'[tester]\nkey = "{KEY}"\nmax-requests = 64\nsalt = "of a test"\n')
    secret.write_text(SECRET)
    port, admin = free_port(), free_port()
    (chain, key), (worker, worker_key) = certificates.server, certificates.worker
    command = [
        *BATON, "serve", "--port", str(port), "--router-processes", "2", "--admin-port", str(admin),
        "--api-key-file", str(keys), "--cluster-secret-file", str(secret),
        "--ssl-certfile", chain, "--ssl-keyfile", key, "--ssl-ca-certs", certificates.ca,
        "--cluster-certfile", worker, "--cluster-keyfile", worker_key,
        "--cluster-ca-certs", certificates.ca, "--log-dir", str(tmp_path / "logs"),
    ]  # fmt: skip
    output = tmp_path / "serve.log"
    with output.open("wb") as out:
        serve = subprocess.Popen(
            command, env=machine.environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        until(lambda: True if "Ready in" in output.read_text() else None, 120, "ready")
        assert f"baton status --url http://127.0.0.1:{admin}" in output.read_text()
        context = ssl.create_default_context(cafile=certificates.ca)
        context.load_cert_chain(*certificates.client)
        with httpx2.Client(verify=context) as http:
            client = openai.OpenAI(
                base_url=f"https://127.0.0.1:{port}/v1", api_key=KEY, http_client=http, max_retries=0
            )
            answer = client.completions.create(
                model="SmolLM2-135M-Instruct", prompt="The capital of France is", max_tokens=8, temperature=0
            )
            assert "Paris" in answer.choices[0].text
        status = machine.baton("status", "--url", f"http://127.0.0.1:{admin}")
        assert status.returncode == 0, status.stderr
        assert status.stdout.count("ready") == 2

        pids = [serve.pid, *(process.pid for process in descendants(serve.pid))]
        lines = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids if alive(pid))
        assert "baton: router 0.1" in lines
        for log in (output, *(tmp_path / "logs").iterdir()):
            lines += log.read_text()
        for word in (KEY, SECRET, "of a test"):
            assert word not in lines
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(60) == 0, output.read_text()
        machine.assert_no_trace()
    finally:
        if serve.poll() is None:
            os.killpg(serve.pid, signal.SIGKILL)
        machine.remove()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists()
