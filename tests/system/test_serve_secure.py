"""`baton serve` with all that guards it: TLS everywhere, keys, two router processes, an admin port. It ends
by SIGTERM, in the middle of an answer."""

import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from openai.types import Completion

from baton.bench.lab.harness.cluster import free_port
from tests.conftest import Certificates

from .machine import Machine, command_lines
from .serve import Serve

pytestmark = pytest.mark.all

KEY, SECRET = "sk-of-a-test-and-nobody-else", "a cluster secret of a test and nobody else"


def test_tls_keys_and_two_processes_that_drain(
    tmp_path: Path, certificates: Certificates, shallow_model_path: Path
) -> None:
    machine = Machine()
    keys, secret, logs = tmp_path / "keys.toml", tmp_path / "secret", tmp_path / "logs"
    keys.write_text(f'[tester]\nkey = "{KEY}"\nmax-requests = 64\nsalt = "of a test"\n')
    secret.write_text(SECRET)
    (chain, key), (worker, worker_key) = certificates.server, certificates.worker
    admin = f"http://127.0.0.1:{(admin_port := free_port())}"
    serve = Serve(
        machine, "--model", str(shallow_model_path), "--served-model-name", "shallow",
        "--router-processes", "2", "--admin-port", str(admin_port),
        "--api-key-file", str(keys), "--cluster-secret-file", str(secret),
        "--ssl-certfile", chain, "--ssl-keyfile", key, "--ssl-ca-certs", certificates.ca,
        "--cluster-ssl-certfile", worker, "--cluster-ssl-keyfile", worker_key,
        "--cluster-ssl-ca-certs", certificates.ca, "--log-dir", str(logs),
    )  # fmt: skip
    try:
        serve.until_ready()
        assert f"baton status --url {admin}" in serve.output()
        context = ssl.create_default_context(cafile=certificates.ca)
        context.load_cert_chain(*certificates.client)
        with httpx2.Client(verify=context) as http:
            client = openai.OpenAI(
                base_url=f"https://127.0.0.1:{serve.port}/v1", api_key=KEY, http_client=http, max_retries=0
            )

            def ask(max_tokens: int) -> Iterator[Completion]:
                return client.completions.create(
                    model="shallow", prompt="The capital of France is", temperature=0,
                    max_tokens=max_tokens, stream=True, stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )  # fmt: skip

            assert "".join(chunk.choices[0].text for chunk in ask(8) if chunk.choices)
            status = machine.baton("status", "--url", admin)
            assert status.returncode == 0, status.stderr
            assert status.stdout.count("ready") == 2
            lines = "".join(command_lines(serve.process.pid).values())
            assert f"baton {serve.port}: router 0.1" in lines

            answer = ask(40)
            next(answer)
            serve.stop(signal.SIGTERM)
            usage = list(answer)[-1].usage
            assert usage is not None
            assert usage.completion_tokens == 40, "what runs is finished first"
        said = "".join(log.read_text() for log in (serve.log, *logs.iterdir()))
        for word in (KEY, SECRET, "of a test"):
            assert word not in lines + said
        machine.assert_no_trace()
    finally:
        serve.kill()
        machine.remove()
