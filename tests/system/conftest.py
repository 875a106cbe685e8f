"""One real cluster for all system tests that do not break it: `baton serve`, embedded model, float32."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.chaos.cluster import LocalCluster
from bench.chaos.streams import expected
from tests.otlp import Receiver

from .recovery import FLAGS, LONG, SHORT, Broken

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
GOLDENS = Path(__file__).with_name("goldens.json")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass
class Server:
    """A running `baton serve`: what a user's shell would have."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    traces: Path

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.load(response)

    def assert_whole(self, within_s: float = 5.0) -> None:
        assert_whole(self.url, within_s)


def assert_whole(url: str, within_s: float = 5.0) -> None:
    """All pools whole, at the latest `within_s` after the last answer (releases are asynchronous)."""
    deadline = time.monotonic() + within_s
    while wrong := pools_when_idle(url):
        assert time.monotonic() < deadline, "; ".join(wrong)


def pools_when_idle(url: str) -> list[str]:
    """What is not whole in any worker's pools; empty when all is well."""
    wrong: list[str] = []
    with urllib.request.urlopen(f"{url}/status", timeout=30) as response:
        workers = json.load(response)["workers"]
    for worker in workers:
        status = worker["status"]
        name = f"{worker['role']} {worker['index']}"
        if status["blocks_free"] != status["blocks_total"]:
            wrong.append(f"{name}: {status['blocks_free']} of {status['blocks_total']} blocks free")
        if status["arena_slots_free"] != status["arena_slots_total"]:
            wrong.append(f"{name}: {status['arena_slots_free']} of {status['arena_slots_total']} slots free")
        wrong += [
            f"{name}: {status[key]} {key}"
            for key in (
                "requests_running", "requests_waiting", "tokens_waiting", "held_prefills", "reservations",
                "transfers_open",
            )
            if status[key]
        ]  # fmt: skip
    return wrong


def start_server(tmp: Path, *flags: str) -> Server:
    port = free_port()
    log, traces = tmp / "serve.log", tmp / "traces"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "cluster.cli", "serve",
                "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
                "--trace-dir", str(traces), *flags,
            ],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    server = Server(process, f"http://127.0.0.1:{port}", log, traces)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, f"baton serve exited with {process.returncode}:\n{log.read_text()}"
        try:
            with urllib.request.urlopen(server.url + "/ready", timeout=5):
                return server
        except OSError:
            assert time.monotonic() < deadline, f"not ready in {START_TIMEOUT_S} s:\n{log.read_text()}"
            time.sleep(0.2)  # another process' port: there is no event of ours to await


def stop_server(server: Server, with_signal: int = signal.SIGTERM) -> int:
    if server.process.poll() is None:
        server.process.send_signal(with_signal)
    try:
        return server.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.process.pid, signal.SIGKILL)
        raise


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # A budget of 256 tokens a step makes every longer prompt a chunked one.
    server = start_server(tmp_path_factory.mktemp("serve"), "--max-num-batched-tokens", "256")
    yield server
    server.assert_whole()
    assert stop_server(server) == 0, server.log.read_text()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
async def aclient(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def goldens() -> list[dict[str, Any]]:
    return json.loads(GOLDENS.read_text())


@pytest.fixture(scope="package")
def model_id(server: Server) -> str:
    return server.get("/v1/models")["data"][0]["id"]


@pytest.fixture(scope="session")
def otlp() -> Iterator[Receiver]:
    """Takes the traces of `broken`."""
    receiver = Receiver()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # ms
        yield receiver
    receiver.close()


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory, otlp: Receiver) -> Iterator[Broken]:
    """The one that tests do break: two workers of each role, each started again however it ends."""
    watched = ("--otlp-endpoint", otlp.endpoint, "--log-format", "json", "--log-level", "debug")
    # What is broken here is the way of KV from prefill to decode: decode workers do not go without.
    with LocalCluster(
        tmp_path_factory.mktemp("broken"),
        worker_flags=[*FLAGS, *watched],
        router_flags=["--no-overflow", *watched],
    ) as cluster:
        yield Broken(cluster, asyncio.run(expected(cluster.url, [*SHORT, *LONG], at_once=12)))
