"""The command lines of `cpu-demo`, run as its pods would run them: with the variables of its ConfigMap,
nowhere to write but a /tmp of their own, and workers found by way of an API server."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster.supervision.runner import BATON
from baton.system.python_path import PACKAGES
from tests.fake_kubernetes import FakeKubernetes, endpoint
from tests.within import WITHIN, within

from .conftest import Object, PodTemplate, pod_templates
from .test_commands import environment

pytestmark = pytest.mark.long
ADDRESSES = {"router": "127.0.0.4", "prefill": "127.0.0.2", "decode": "127.0.0.3"}
KEY = "a-key-of-the-tests"


@asynccontextmanager
async def pod(
    objects: list[Object], template: PodTemplate, tmp: Path, secret: Path, **more: str
) -> AsyncIterator[str]:
    """Runs its one container until it is ready; gives the pod's address."""
    [container] = template.containers
    address = ADDRESSES[template.labels["app.kubernetes.io/component"]]
    home = tmp / address
    home.mkdir()
    replaced = {
        "$(POD_IP)": address,
        "host=::": f"host={address}",  # --advanced.admin-host too
        "/etc/baton/cluster/secret": str(secret),
        "/etc/baton/api-keys": str(tmp),
    }
    arguments = container["args"]
    for old, new in replaced.items():
        arguments = [argument.replace(old, new) for argument in arguments]
    process = await asyncio.create_subprocess_exec(
        *BATON, *arguments,
        env={
            **environment(objects, container), **more, "HOME": str(home), "TMPDIR": str(home),
            "PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES, "PYTHONDONTWRITEBYTECODE": "1",
        },
        cwd=home,
    )  # fmt: skip
    try:
        await ready(address, container["readinessProbe"], process)
        yield address
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        code = await within(process.wait())
    assert code == 0, "it drains and ends well"


async def ready(address: str, probe: Object, process: asyncio.subprocess.Process) -> None:
    """As the kubelet probes it."""
    asks = over_grpc if "grpc" in probe else over_http
    port = (probe.get("grpc") or probe["httpGet"])["port"]
    async with asyncio.timeout(WITHIN):
        while process.returncode is None:
            with suppress(grpc.aio.AioRpcError, aiohttp.ClientError):
                if await asks(f"{address}:{port}"):
                    return
            await asyncio.sleep(0.1)
    raise AssertionError(f"it ended with {process.returncode}")


async def over_grpc(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())  # pyrefly: ignore[missing-attribute]
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def over_http(address: str) -> bool:
    async with aiohttp.ClientSession() as http, http.get(f"http://{address}/health") as answer:
        return answer.status == 200


async def test_cpu_demo_serves(overlays: dict[str, list[Object]], tmp_path: Path) -> None:
    objects = overlays["cpu-demo"]
    pods = {each.labels["app.kubernetes.io/component"]: each for each in pod_templates(objects)}
    secret = tmp_path / "secret"
    secret.write_text("a secret of the tests, no other\n")
    async with AsyncExitStack() as stack:
        server = FakeKubernetes()
        await server.start()
        stack.push_async_callback(server.stop)
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
        for role in ("prefill", "decode"):
            address = await stack.enter_async_context(pod(objects, pods[role], tmp_path, secret))
            server.put(role, f"baton-{role}", [endpoint(address)])
        (tmp_path / "keys.toml").write_text(f'[first]\nkey = "{KEY}"\n')
        more = {"KUBECONFIG": str(kubeconfig)}
        address = await stack.enter_async_context(pod(objects, pods["router"], tmp_path, secret, **more))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{address}:8000"))
        question = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 4, "temperature": 0}
        async with http.post("/v1/completions", json=question) as refused:
            assert refused.status == 401
        async with http.post(
            "/v1/completions", json=question, headers={"Authorization": f"Bearer {KEY}"}
        ) as response:
            answer = await response.json()
        assert response.status == 200, answer
        assert " 6" in answer["choices"][0]["text"]
        async with aiohttp.ClientSession(f"http://{address}:8002") as admin, admin.get("/metrics") as page:
            assert "vllm:time_to_first_token_seconds" in await page.text()
