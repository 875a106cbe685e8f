"""`baton serve` as a user has it: real Ray, real model, real signals; and nothing left when it has ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.processes import Process, descendants

from .conftest import free_port
from .machine import BATON, Machine, alive, answers, listening, titled, tree, until

START_S, STOP_S = 90.0, 45.0


class Serve:
    """One running `baton serve`."""

    def __init__(self, machine: Machine, *flags: str, ignoring: tuple[int, ...] = ()) -> None:
        def ignore() -> None:
            for signum in ignoring:
                signal.signal(signum, signal.SIG_IGN)

        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = machine.outputs / f"{self.port}.log"
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

    def role(self, name: str) -> Process | None:
        """The service process of a role."""
        return titled(self.process.pid, f"baton: {name}")

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
        processes = tree(self.process.pid)
        ports = listening(processes)
        assert len(processes) > 10, "Ray, and two or three processes for each worker"
        assert self.port in ports
        self.process.send_signal(signum)
        assert self.process.wait(STOP_S) == 0, self.output()
        assert alive(processes) == [], "no process outlives serve, not even for a moment"
        assert [port for port in ports if answers(port)] == []
        assert self.output().splitlines()[-2:] == ["Stopping …", "Stopped."], "nothing had to be killed"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


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
    for words in ("prefill 0", "decode 0", "ready", "%", "restarts", socket.gethostname()):
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


@pytest.mark.parametrize(("name", "signum"), [("prefill 0", signal.SIGSTOP), ("decode 0", signal.SIGKILL)])
def test_a_killed_or_hung_worker_comes_back_as_a_new_incarnation(
    served: Serve, name: str, signum: int
) -> None:
    before = served.workers()[name]
    victim = served.role(name)
    assert victim is not None
    family = [victim, *descendants(victim.pid)]
    os.kill(victim.pid, signum)
    within = 5 if signum == signal.SIGKILL else 25
    until(lambda: True if not alive(family) else None, within, "engine and transfer die with the service")

    def back() -> dict[str, Any] | None:
        now = served.workers().get(name)
        if now is None or now["state"] != "ready" or now["incarnation"] == before["incarnation"]:
            return None
        return now

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


def test_a_killed_serve_leaves_nothing(machine: Machine) -> None:
    serve = Serve(machine)
    try:
        until(lambda: serve.role("router 0"), START_S, "a router")
        processes = tree(serve.process.pid)
        assert any(process.name.startswith("ray::Dash") for process in processes), "an agent, which lingers"
    finally:
        serve.kill()
    until(lambda: True if not alive(processes) else None, 15, "everything dies with serve, Ray's agents too")
    machine.assert_no_trace()


def test_sigterm_drains_and_leaves_nothing(machine: Machine) -> None:
    serve = Serve(machine)
    try:
        serve.until_ready()
        sigterm_drains(serve)
    finally:
        serve.kill()
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
