"""A router of several processes on one port, started by the `baton` command, over fake workers."""

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import psutil
import pytest

from baton.kv_names import prompt_hints
from baton.processes.children import Forked
from baton.processes.forks import Forks
from baton.processes.sandbox.client import ForkServer
from baton.router.config import RouterConfig
from baton.router.endpoints.http_connections import listen
from baton.router.processes import sockets, supervise
from baton.router.processes.sockets import reserve
from baton.rpc import inference_pb2 as pb
from baton.rpc import worker_pb2
from baton.rpc.stubs import InferenceStub
from baton.system.addresses import url_host
from tests.fake_worker import SECRET
from tests.processes.helpers import helper
from tests.within import WITHIN, eventually, within

from .conftest import TEXT
from .routers import AS_CLIENT, KEY

pytestmark = pytest.mark.all

SALT = "a-secret-salt"
SUCCESS = 'vllm:request_success_total{finished_reason="stop",model_name="fake",role="router"}'


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(f'[one]\nkey = "{KEY}"\nsalt = "{SALT}"\nmax-requests = 6\n')
    return str(path)


def counters(page: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def test_processes_share_ports_and_one_admin_port(start: Callable[..., Any], key_file: str):
    """One test for all: serve, keep secrets, restart after a death, drain. A start takes seconds."""
    routers = await start(
        "--router-processes", "2", "--api-key-file", key_file, "--advanced.admin-key", "trainer"
    )  # fmt: skip
    await routers.until(lambda s: s["router"]["ready"] and len(s["processes"]) == 2)
    parent = psutil.Process(routers.popen.pid)
    before = await routers.processes()
    titles = [process.cmdline()[0] for process in (parent, *map(psutil.Process, before.values()))]
    assert titles == ["baton: router 4", "baton: router 4.0", "baton: router 4.1"]
    assert len(routers.prefill.outputs) == 2, "each process has its own stream"

    for path, key, status in (("/get_world_size", "trainer", 200), ("/get_world_size", KEY, 401)):
        headers = {"Authorization": f"Bearer {key}"}
        async with routers.http.get(routers.admin + path, headers=headers) as response:
            assert response.status == status
    async with routers.http.post(routers.url + "/update_weights_from_disk", headers=AS_CLIENT) as response:
        assert response.status == 404
        assert f"is on the admin port, {routers.admin}" in await response.text()

    for _ in range(8):
        assert (await routers.ask())["choices"][0]["text"] == TEXT
    assert counters(await routers.get(routers.admin + "/metrics"))[SUCCESS] == 8
    steps = routers.decode.steps = asyncio.Semaphore(0)
    running = [asyncio.create_task(routers.ask()) for _ in range(6)]
    await routers.until(lambda s: s["router"]["requests"] == 6)
    for _ in range(6):  # the kernel chooses the process
        headers = {**AS_CLIENT, "Connection": "close"}
        asked = routers.http.post(routers.url + "/v1/completions", json={"prompt": "Hello"}, headers=headers)
        async with asked as response:
            assert response.status == 429, "the limit is that of all processes"
    for _ in range(1000):
        steps.release()
    await asyncio.gather(*running)
    routers.decode.steps = None
    async with grpc.aio.insecure_channel(routers.ready["grpc_address"]) as channel:
        call = InferenceStub(channel).Generate(
            pb.GenerateRequest(text="Hello", max_tokens=99),
            metadata=(("authorization", f"Bearer {KEY}"),),
            timeout=WITHIN,
        )
        assert "".join([d.text async for message in call for d in message.deltas]) == TEXT

    # Metrics and status are on the admin port only.
    for path in ("/metrics", "/metrics/targets", "/status", "/status/requests/x", "/dashboard"):
        async with routers.http.get(routers.url + path, headers=AS_CLIENT) as response:
            assert response.status == 404
            said = (await response.json())["error"]["message"]
            assert said == f"{path} is on the admin port, {routers.admin}"
    assert "/metrics" not in (await routers.get(routers.url + "/openapi.json"))["paths"]
    for url in (routers.url, routers.admin):
        for path in ("/health", "/ready", "/routable"):
            async with routers.http.get(url + path) as response:
                assert response.status == 200
    status = await routers.get(routers.admin + "/status")
    assert [w["role"] for w in status["workers"]] == ["prefill", "decode"]
    router = status["router"]
    assert router["pid"] == routers.popen.pid
    assert router["last_minute"]["requests"] == router["handovers"] == 15
    assert [each["code"] for each in router["failures"]] == ["rate_limit_exceeded"] * 6
    for each in router["recent_requests"]:
        life = await routers.get(f"{routers.admin}/status/requests/{each['id']}")
        assert life["events"][0]["what"] == "planned: handover"
    async with routers.http.get(f"{routers.admin}/status/requests/none%0Astop") as response:
        assert response.status == 404
    assert re.findall(r'href="(\w+)"', await routers.get(routers.admin)) == ["dashboard"]
    assert re.findall(r'href="(\w+)"', await routers.get(routers.url)) == ["chat", "docs"]

    # No log line and no command line has a secret.
    wrong = {"Authorization": "Bearer wrong-key"}
    async with routers.http.get(routers.url + "/v1/models", headers=wrong) as response:
        assert response.status == 401
    lines = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in (parent.pid, *before.values()))
    page = await routers.get(routers.admin + "/metrics")
    for secret in (KEY, SALT, SECRET.decode(), "wrong-key"):
        assert secret not in lines
        assert secret not in routers.log.read_text()
        assert secret not in page + json.dumps(status)

    # One dies: the other serves, its counters stay in the sums, and it is restarted.
    os.kill(before[0], signal.SIGKILL)
    await routers.until(lambda s: before[0] not in [p["pid"] for p in s["processes"]])
    assert (await routers.ask())["choices"][0]["text"] == TEXT
    await routers.until(lambda s: s["router"]["ready"] and len(s["processes"]) == 2)
    after = await routers.processes()
    assert after[1] == before[1]
    assert after[0] != before[0]
    assert counters(await routers.get(routers.admin + "/metrics"))[SUCCESS] == 16

    # All follow the file of keys. One with a mistake changes nothing.
    await routers.new_keys(key_file, "[one]", "the API keys stay as they are")
    assert await routers.statuses(KEY) == {200}
    await routers.new_keys(key_file, '[two]\nkey = "another-key"\n', " 1 API keys")
    assert (await routers.statuses(KEY), await routers.statuses("another-key")) == ({401}, {200})

    # A process that starts later has the same keys, even if the file has a mistake by then.
    await routers.new_keys(key_file, "[one]", "the API keys stay as they are")
    os.kill(after[0], signal.SIGKILL)
    await routers.until(lambda s: after[0] not in [p["pid"] for p in s["processes"]])
    await routers.until(lambda s: s["router"]["ready"] and len(s["processes"]) == 2)
    assert (await routers.statuses(KEY), await routers.statuses("another-key")) == ({401}, {200})
    routers.popen.send_signal(signal.SIGHUP)  # reads the file at once
    await routers.new_keys(key_file, f'[one]\nkey = "{KEY}"\n', " 1 API keys")
    after = await routers.processes()

    # All drain together.
    seen = len(routers.decode.submitted)
    steps = routers.decode.steps = asyncio.Semaphore(0)
    running = [asyncio.create_task(routers.ask()) for _ in range(6)]
    await routers.decode.until(lambda w: len(w.submitted) == seen + 6)
    routers.popen.send_signal(signal.SIGTERM)
    await routers.until(lambda s: all(p["state"] == "draining" for p in s["processes"]))
    async with routers.http.get(routers.admin + "/ready") as response:
        assert response.status == 503
    for _ in range(6 * 40):
        routers.decode.steps.release()
    for running_request in running:
        assert (await running_request)["choices"][0]["text"] == TEXT
    assert await routers.exit_code() == 0
    assert not any(psutil.pid_exists(pid) for pid in after.values())


async def test_a_process_that_starts_after_an_admin_call_reaches_the_workers(start: Callable[..., Any]):
    """The call uses gRPC, which starts threads in the supervisor. A fork of it would reach no worker."""
    routers = await start("--router-processes", "2", "--advanced.admin-key", "trainer")
    await routers.until(lambda s: s["router"]["ready"] and len(s["processes"]) == 2)

    async def call(path: str) -> None:
        headers = {"Authorization": "Bearer trainer"}
        async with routers.http.post(routers.admin + path, headers=headers) as response:
            assert response.status == 200, await response.text()

    async with routers.http.get(routers.admin + "/pause") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
    await call("/pause?mode=keep")
    assert routers.prefill.paused.pause == worker_pb2.PAUSE_STEPS
    await call("/resume")
    assert routers.prefill.paused.pause == worker_pb2.PAUSE_NONE
    for number, pid in (await routers.processes()).items():
        os.kill(pid, signal.SIGKILL)

        def is_back(status: dict[str, Any], number: int = number, pid: int = pid) -> bool:
            pids = {process["number"]: process["pid"] for process in status["processes"]}
            return status["router"]["ready"] and pids.get(number, pid) != pid

        await routers.until(is_back)
    await routers.prefill.until(lambda worker: len(worker.outputs) == 2)


async def test_each_process_has_its_own_view_of_the_workers(start: Callable[..., Any]):
    routers = await start("--router-processes", "3", "--advanced.no-prefix-fetches", prefills=2)
    prompt = list(range(3, 503))
    chunks = prompt_hints(prompt, b"", b"")

    async def went_to() -> set[int]:
        """The prefill workers of several requests. The kernel chooses their processes."""
        before = [len(worker.submitted) for worker in routers.prefills]
        for _ in range(8):
            await routers.ask(prompt=prompt, max_tokens=1)
        return {i for i, worker in enumerate(routers.prefills) if len(worker.submitted) > before[i]}

    async def until_all_go_to(worker: int) -> None:
        async with asyncio.timeout(WITHIN):
            while await went_to() != {worker}:
                pass

    await routers.until(lambda s: s["router"]["ready"] and len(s["processes"]) == 3)
    for worker in routers.prefills:
        await worker.until(lambda worker: len(worker.outputs) == len(worker._wanting_cache) == 3)
    [home] = await went_to()
    other = routers.prefills[1 - home]
    other.change_cache(chunks)
    await until_all_go_to(1 - home)
    for health, worker in (
        (worker_pb2.WorkerStatus.HEALTH_DRAINING, home),
        (worker_pb2.WorkerStatus.HEALTH_SERVING, 1 - home),
    ):
        other.status.health = health
        other.report()
        await until_all_go_to(worker)
    killed = (await routers.processes())[1]
    os.kill(killed, signal.SIGKILL)
    await routers.until(lambda s: killed not in [process["pid"] for process in s["processes"]])
    await until_all_go_to(1 - home)  # the next process may be there already, and gets its reports
    other.change_cache([], chunks)
    await until_all_go_to(home)
    routers.popen.send_signal(signal.SIGINT)
    assert await routers.exit_code() == 0


async def test_the_wait_for_a_cpu_is_no_silence_of_a_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sockets, "REPLY_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    client = await sockets.ControlClient.connect(ours, os.getpid())
    with pytest.raises(TimeoutError):
        await client.send("ping")
    starved, reads = 0.0, asyncio.Event()

    def waited(pid: int) -> float:
        nonlocal starved
        starved += 0.1
        if starved > 3:  # three times as long as a process may be silent
            reads.set()
        return starved

    monkeypatch.setattr(sockets, "waited_for_cpu", waited)
    sent = asyncio.create_task(client.send("ping"))
    await reads.wait()
    assert not sent.done()
    theirs.send((4).to_bytes(4) + b"here")
    assert await sent == b"here"
    client.close()
    theirs.close()


def test_a_process_without_a_cpu_waits_for_it():
    """Two busy processes share one CPU."""
    [cpu, *_] = os.sched_getaffinity(0)
    busy = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", busy])) for _ in range(2)]
        for process in both:
            stack.callback(process.kill)
        until = time.monotonic() + WITHIN
        while any(sockets.waited_for_cpu(process.pid) < 0.05 for process in both):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert sockets.waited_for_cpu(both[0].pid) == 0, "it has ended"


async def test_the_processes_end_with_their_supervisor(start: Callable[..., Any]):
    routers = await start("--router-processes", "2")
    pids = list((await routers.processes()).values())
    routers.popen.kill()
    await routers.exit_code()
    await eventually(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.long
async def test_a_process_that_hangs_is_restarted(start: Callable[..., Any]):
    routers = await start("--router-processes", "2")
    await routers.until(lambda s: len(s["processes"]) == 2)
    before = await routers.processes()
    os.kill(before[1], signal.SIGSTOP)
    await routers.until(lambda s: len({p["pid"] for p in s["processes"]} - {before[1]}) == 2)
    routers.popen.send_signal(signal.SIGINT)
    assert await routers.exit_code() == 0


async def test_a_pause_of_the_supervisor_is_no_silence_of_a_process(monkeypatch: pytest.MonkeyPatch):
    """It was stopped, or its machine was, while a process had to reply."""
    monkeypatch.setattr(sockets, "REPLY_SECONDS", 0.4)
    asked = asyncio.Event()

    async def ping(command: str, given: bytes) -> bytes:
        asked.set()
        await asyncio.sleep(0.05)
        return b"here"

    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(sockets.serve_commands(theirs.detach(), ping))
    client = await sockets.ControlClient.connect(ours, os.getpid())
    sent = asyncio.create_task(client.send("ping"))
    await asked.wait()
    time.sleep(0.5)  # noqa: ASYNC251  the pause
    assert await sent == b"here"
    client.close()
    await serving


IDLE = ["-c", "import signal; signal.pause()"]


def of_small_processes(broken: Path) -> supervise.Supervisor:
    """Its processes do little, and end at once while `broken` exists."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = helper(theirs, "-m", "tests.router.small_process", str(broken))
    config = RouterConfig(model=None, secret=SECRET, port=0, processes=2, admin_port=0)
    return supervise.Supervisor(config, Forks(process, ours), ForkServer(IDLE))


@pytest.mark.parametrize("failure", ["ends", "no process"])
async def test_a_failed_restart_leaves_the_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
):
    broken = tmp_path / "broken"
    supervisor = of_small_processes(broken)
    running = asyncio.create_task(supervisor.run())
    monkeypatch.setattr(supervise, "FIRST_BACKOFF", 0.01)
    begin, starts = Forks.start, failure == "ends"

    async def start(forks: Forks, given: bytes, fds: Sequence[int]) -> Forked:
        if not starts and broken.exists():
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await begin(forks, given, fds)

    monkeypatch.setattr(Forks, "start", start)

    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WITHIN):
            while not condition():
                assert not running.done(), await running
                await asyncio.sleep(0.005)

    await until(supervisor._all_ready)
    before = {number: process.pid for number, process in supervisor._processes.items()}
    broken.touch()
    descriptors = psutil.Process().num_fds()
    os.kill(before[1], signal.SIGKILL)
    await until(lambda: "restarting it in 0.02 s" in caplog.text)
    assert psutil.Process().num_fds() <= descriptors
    broken.unlink()
    await until(supervisor._all_ready)
    after = {number: process.pid for number, process in supervisor._processes.items()}
    assert after[0] == before[0]
    supervisor._signals.put_nowait(signal.SIGINT)
    assert await running == 0


async def test_a_process_that_starts_while_the_router_stops_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was not there when the others were told."""
    supervisor = of_small_processes(tmp_path / "never")
    running = asyncio.create_task(supervisor.run())
    begin, starts, may_start = Forks.start, asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(supervise, "END_SECONDS", 10 * WITHIN)

    await eventually(supervisor._all_ready)

    async def start(forks: Forks, given: bytes, fds: Sequence[int]) -> Forked:
        starts.set()
        await may_start.wait()
        return await begin(forks, given, fds)

    monkeypatch.setattr(Forks, "start", start)
    os.kill(supervisor._processes[1].pid, signal.SIGKILL)
    await within(starts.wait())
    supervisor._signals.put_nowait(signal.SIGINT)
    await eventually(lambda: not supervisor._processes)
    may_start.set()
    assert await within(running) == 0


@pytest.mark.parametrize("silent", ["process", "worker"])
async def test_the_admin_port_answers_from_what_is_known(tmp_path: Path, silent: str):
    """While a process is stopped, or waits for the status of a worker."""
    supervisor = of_small_processes(tmp_path / "never")
    async with supervisor._admin() as admin, aiohttp.ClientSession() as http:
        serving = asyncio.create_task(supervisor._serve())

        async def get(path: str) -> tuple[int, str]:
            async with http.get(admin + path) as response:
                return response.status, await response.text()

        async def all_answers() -> list[tuple[int, str]]:
            return [await get(path) for path in ("/health", "/ready", "/metrics")]

        await eventually(supervisor._all_ready)
        before = await all_answers()
        assert [status for status, _ in before] == [200, 200, 200]
        assert "a_total 2.0" in before[2][1]
        if silent == "process":
            os.kill(supervisor._processes[0].pid, signal.SIGSTOP)
        else:
            for process in supervisor._processes.values():
                process.asked("status")
        async with asyncio.timeout(WITHIN):
            assert await all_answers() == before
        supervisor._signals.put_nowait(signal.SIGINT)
        for process in supervisor._processes.values():
            process.kill()
        await serving


async def test_a_mistake_of_the_user_is_reported_once(start: Callable[..., Any], tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text("{{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wrong, unread = await asyncio.gather(
            start("--router-processes", "2", "--port", port),
            start(
                "--router-processes", "2", "--chat-template", str(template)
            ),  # only the processes notice it
        )
        for routers, said in (
            (wrong, f"--port {port}: cannot listen on 127.0.0.1:{port}: the port is in use"),
            (unread, "template"),
        ):
            assert await routers.exit_code() == 2
            assert said in routers.said[-1]["error"]


def test_connections_in_time_wait_refuse_no_start() -> None:
    """Those of a router that had no admin port, and so did not share its port."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        host, port = before.getsockname()
        client, accepted = socket.create_connection((host, port)), before.accept()[0]
        accepted.close()  # this side is first, so its connection stays
        client.close()
    with reserve("--port", host, port), listen("--port", host, port, share=True):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_port_is_reserved_for_all_processes_or_not_at_all(host: str):
    with reserve("--port", host, 0) as held:
        port = held.getsockname()[1]
        with listen("--port", host, port, share=True), listen("--port", host, port, share=True):
            said = re.escape(f"--grpc-port {port}: cannot listen on {url_host(host)}:{port}")
            with pytest.raises(ValueError, match=said):
                reserve("--grpc-port", host, port)
            with pytest.raises(ValueError, match="cannot listen"):
                listen("--port", host, port)
