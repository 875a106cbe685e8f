"""`baton serve` as a user has it: real Ray, real model, real signals; and nothing left when it has ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cluster.processes import Process, descendants

from .conftest import free_port

BATON = [sys.executable, "-m", "cluster.cli"]
START_S, STOP_S = 90.0, 45.0
T = TypeVar("T")


def until(what: Callable[[], T | None], within: float, why: str) -> T:
    """Polls what another process does and tells nobody."""
    deadline = time.monotonic() + within
    while (result := what()) is None:
        assert time.monotonic() < deadline, f"not within {within} s: {why}"
        time.sleep(0.05)
    return result


class Machine:
    """What a run may leave traces on: a home and a directory for temporary files of its own, and the rest."""

    def __init__(self) -> None:
        # Short, because sockets go there.
        self.tmp = Path(tempfile.mkdtemp(prefix="bs", dir="/tmp"))
        self.home = Path(tempfile.mkdtemp(prefix="bh", dir="/tmp"))
        ours = ("BATON_", "RAY_", "XDG_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.environment |= {"TMPDIR": str(self.tmp), "HOME": str(self.home)}
        self._shared_memory = set(os.listdir("/dev/shm"))
        self._default_ray = Path("/tmp/ray").exists()

    def baton(self, *args: str, within: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        command = [*BATON, *args]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=within, check=False
        )

    def assert_no_trace(self) -> None:
        assert list(self.tmp.iterdir()) == []
        assert [path.name for path in self.home.iterdir()] in ([], [".cache"]), "nothing in ~ but the cache"
        assert set(os.listdir("/dev/shm")) <= self._shared_memory
        assert Path("/tmp/ray").exists() == self._default_ray
        assert str(self.tmp) not in Path("/proc/net/unix").read_text(), "a socket"

    def remove(self) -> None:
        shutil.rmtree(self.tmp)
        shutil.rmtree(self.home)


class Serve:
    """One running `baton serve`."""

    def __init__(self, machine: Machine, *flags: str, ignoring: tuple[int, ...] = ()) -> None:
        def ignore() -> None:
            for signum in ignoring:
                signal.signal(signum, signal.SIG_IGN)

        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = machine.home.with_suffix(".log")
        self.machine = machine
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*BATON, "serve", "--port", str(self.port), "--dtype", "float32", *flags],
                env=machine.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=ignore,
            )

    def output(self) -> str:
        return self.log.read_text()

    def until_ready(self) -> None:
        def ready() -> bool | None:
            assert self.process.poll() is None, self.output()
            return True if "Ready in" in self.output() and "Stop:" in self.output() else None

        until(ready, START_S, "ready")

    def tree(self) -> list[Process]:
        return [process for process in descendants(self.process.pid) if process.alive]

    def role(self, name: str) -> Process | None:
        """The service process of a role, by its title."""
        for process in self.tree():
            try:
                title = Path(f"/proc/{process.pid}/cmdline").read_bytes().partition(b"\0")[0].strip().decode()
            except OSError:
                continue
            if title == f"baton: {name}":
                return process
        return None

    def workers(self) -> dict[str, dict[str, Any]]:
        """`baton status --json`, by name."""
        done = self.machine.baton("status", "--json", "--url", self.url)
        assert done.stdout, done.stderr
        return {f"{w['role']} {w['index']}": w for w in json.loads(done.stdout)["workers"]}

    def ask(self, **more: Any) -> dict[str, Any]:
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0} | more
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def stop(self, signum: int) -> None:
        """Sends the signal, and asserts a clean end: exit code, processes, ports."""
        tree, ports = self.tree(), listening(self.tree())
        assert len(tree) > 10, "Ray, and two or three processes for each worker"
        assert self.port in ports
        self.process.send_signal(signum)
        assert self.process.wait(STOP_S) == 0, self.output()
        assert alive(tree) == [], "no process outlives serve, not even for a moment"
        assert [port for port in ports if answers(port)] == []
        assert "Killed" not in self.output(), "everything ended by itself"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def alive(processes: list[Process]) -> list[Process]:
    living = []
    for process in processes:
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] != "Z" and f"({process.name})" in stat:
            living.append(process)
    return living


def listening(processes: list[Process]) -> set[int]:
    """The TCP ports that these processes listen on."""
    ports = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    found = set()
    for process in processes:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if (inode := target.removeprefix("socket:[").rstrip("]")) in ports:
                found.add(ports[inode])
    return found


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.remove()


@pytest.fixture(scope="module")
def served(machine: Machine) -> Iterator[Serve]:
    """Shared by the tests up to the one that stops it. Started as shells do with `&`: SIGINT is ignored."""
    serve = Serve(machine, ignoring=(signal.SIGINT,))
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.kill()


def test_the_printed_curl_works_when_pasted(served: Serve) -> None:
    command = next(line for line in served.output().splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_status_shows_every_worker(served: Serve) -> None:
    workers = served.workers()
    assert set(workers) == {"prefill 0", "decode 0"}
    assert all(worker["state"] == "ready" for worker in workers.values())
    table = served.machine.baton("status", "--url", served.url)
    assert table.returncode == 0, table.stderr
    for words in ("prefill 0", "decode 0", "ready", "%"):
        assert words in table.stdout


def test_chat_answers_and_shows_its_figures(served: Serve) -> None:
    question = ("--temperature", "0", "--max-tokens", "12", "What is the capital of France?")
    done = served.machine.baton("chat", "--url", served.url, *question)
    assert "Paris" in done.stdout, done.stderr
    assert re.search(r"first token after \d+ ms, \d+ tokens, then [\d.]+ tokens/s", done.stderr)


def test_a_port_in_use_is_an_error_before_anything_starts(served: Serve) -> None:
    started = time.monotonic()
    done = served.machine.baton("serve", "--port", str(served.port))
    assert done.returncode == 2
    assert f"--port {served.port}" in done.stderr
    assert "ray" not in done.stdout
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("name", ["prefill 0", "decode 0"])
def test_a_killed_worker_comes_back_as_a_new_incarnation(served: Serve, name: str) -> None:
    before = served.workers()[name]
    victim = served.role(name)
    assert victim is not None
    family = [victim, *descendants(victim.pid)]
    os.kill(victim.pid, signal.SIGKILL)
    until(
        lambda: True if not alive(family) else None, 5, "engine and transfer process die with their service"
    )

    def back() -> dict[str, Any] | None:
        now = served.workers().get(name)
        ready = now is not None and now["state"] == "ready"
        return now if ready and now["incarnation"] != before["incarnation"] else None

    until(back, 60, "a new incarnation")
    assert served.ask()["choices"][0]["text"].strip().startswith("Paris")


def test_a_killed_actor_takes_its_worker_along_and_both_come_back(served: Serve) -> None:
    worker = served.role("decode 0")
    assert worker is not None
    family = [worker, *descendants(worker.pid)]
    os.kill(worker.parent, signal.SIGKILL)
    until(lambda: True if not alive(family) else None, 5, "the worker dies with its actor")
    until(lambda: served.role("decode 0"), 60, "a new one")
    assert served.ask()["choices"][0]["text"].strip().startswith("Paris")  # the router waits for it


def test_ctrl_c_leaves_nothing(served: Serve) -> None:
    served.stop(signal.SIGINT)
    served.machine.assert_no_trace()


def test_a_killed_serve_takes_all_roles_along_and_the_next_start_cleans_up(machine: Machine) -> None:
    serve = Serve(machine)
    try:
        until(lambda: serve.role("router 0"), START_S, "a router")
        tree = serve.tree()
    finally:
        serve.kill()

    def baton_gone() -> bool | None:
        # Ray's two agents look for their server for up to a minute before they end.
        return True if all(process.name.startswith("ray::") for process in alive(tree)) else None

    until(baton_gone, 15, "everything but Ray's agents dies with serve")
    assert list(machine.tmp.iterdir()) != []
    next_ = Serve(machine)
    try:
        next_.until_ready()
        assert len(list(machine.tmp.iterdir())) == 1, "what the killed one left is gone"
        sigterm_drains(next_)
    finally:
        next_.kill()
        for process in alive(tree):
            os.kill(process.pid, signal.SIGKILL)
    machine.assert_no_trace()


def sigterm_drains(serve: Serve) -> None:
    """SIGTERM in the middle of an answer: the answer is finished, then everything ends."""
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(serve.ask(max_tokens=48, ignore_eos=True)))
    asking.start()
    until(
        lambda: True if any(w["status"]["requests_running"] for w in serve.workers().values()) else None,
        20,
        "a running request",
    )
    serve.stop(signal.SIGTERM)
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] == 48
